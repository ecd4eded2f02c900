"""How shelves look on a screen and as JSON: layouts, tiers, tenants, owners, rows.

Turns what the desk says into tables and plain dicts; asks nothing itself but a tier's tenants and the sizes of files.
Used by the subcommands of `kvtier shelf`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from rich.table import Table

from kvtier.byte_text import bytes_text
from kvtier.cli.terminal import TIER_NAMES
from kvtier.keeper.desk import Desk
from kvtier.keeper.operator_wire import LayoutView, Overview, OwnerView, RowPage, TierView
from kvtier.record import NO_TENANT
from kvtier.replay import JOURNAL_NAME
from kvtier.tiers.header import HEADER_BYTES

TIERS = ("dram", "nvme")
"""By tier index."""
TENANTS_SHOWN = 8
HASH_DIGITS = 16
TENANT_DIGITS = 12


def overview_json(desk: Desk, overview: Overview) -> dict[str, object]:
    """Everything, for machines."""
    keeper = overview.keeper
    return {
        "path": str(desk.path),
        "keeper": None
        if keeper is None
        else {
            "pid": keeper.pid,
            "version": keeper.version,
            "protocol": keeper.protocol,
            "uptime_s": round(keeper.uptime_s, 3),
            "linger_s": keeper.linger_s,
        },
        "in_use": desk.is_occupied(),
        "owners": [_owner_json(owner) for owner in overview.owners],
        "layouts": [_layout_json(desk, layout) for layout in overview.layouts],
        "totals": {TIERS[tier]: _totals(overview, tier) for tier in (0, 1)},
    }


def rows_json(layout: LayoutView, tier: int, page: RowPage) -> Iterator[dict[str, object]]:
    """The rows of a page, for machines."""
    for record, uses, idle_s in zip(page.rows, page.uses, page.idle_s, strict=False):
        yield {
            "layout": layout.name,
            "tier": TIERS[tier],
            "hash": record.block_hash.hex(),
            "slot": record.slot,
            "generation": record.generation,
            "depth": record.depth,
            "priority": record.priority,
            "expiry_s": record.expiry_s,
            "pinned": record.pinned,
            "tenant": record.tenant.hex() if record.tenant != NO_TENANT else "",
            "uses": uses,
            "idle_s": round(idle_s, 3),
        }


def layouts_table(desk: Desk, overview: Overview) -> Table:
    """One line a shelf."""
    table = Table(title=str(desk.path), title_justify="left")
    for heading in ("layout", "tier", "row", "slots", "blocks", "used", "of"):
        table.add_column(heading, justify="left" if heading in ("layout", "tier") else "right")
    for layout in overview.layouts:
        name = layout.name[:8]
        for tier in layout.tiers:
            used, total = _bytes(layout, tier)
            table.add_row(
                name,
                TIER_NAMES[TIERS[tier.tier]],
                bytes_text(layout.row_bytes),
                f"{tier.slots:,}",
                f"{tier.rows:,}",
                bytes_text(used),
                bytes_text(total),
            )
            name = ""
    return table


def tenant_lines(desk: Desk, overview: Overview) -> Iterator[str]:
    """Below the table: who is charged for how many slots, and what is wrong."""
    for layout in overview.layouts:
        for tier in layout.tiers:
            text = _tenants_text(desk.tenants(layout.name, tier.tier))
            if text:
                yield f"{layout.name[:8]} {TIER_NAMES[TIERS[tier.tier]]} slots by tenant: {text}"
        for note in layout.notes:
            yield f"{layout.name[:8]} {note}"


BLOCKS_HEAD = (
    f"{'block':<{HASH_DIGITS}} {'slot':>8} {'depth':>6} {'uses':>5} {'idle':>8} {'priority':>8} {'expires':<19} "
    f"{'':<6} {'tenant':<{TENANT_DIGITS}} generation"
)


def block_line(row: dict[str, object]) -> str:
    """One of `rows_json` for people, below `BLOCKS_HEAD`."""
    expiry_s = row["expiry_s"]
    assert isinstance(expiry_s, int)
    expires = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(expiry_s)) if expiry_s else ""
    return (
        f"{str(row['hash'])[:HASH_DIGITS]} {row['slot']:>8} {row['depth']:>6} {row['uses']:>5} {row['idle_s']:>6.0f} s "
        f"{row['priority']:>8} {expires:<19} {'pinned' if row['pinned'] else '':<6} "
        f"{str(row['tenant'])[:TENANT_DIGITS]:<{TENANT_DIGITS}} {row['generation']}"
    )


def stat_lines(desk: Desk, overview: Overview) -> Iterator[str]:
    """What `stat` says, line by line."""
    keeper = overview.keeper
    if keeper is not None:
        yield (
            f"keeper      process {keeper.pid}, kvtier {keeper.version}, protocol {keeper.protocol}, up "
            f"{keeper.uptime_s:.0f} s, leaves {keeper.linger_s:g} s after the last engine"
        )
    elif desk.is_occupied():
        yield "keeper      none: an engine with sharing: false has the directory; this is what its files say"
    else:
        yield "keeper      none: nobody uses the directory now; this is what its files say"
    for owner in overview.owners:
        yield f"owner {owner.number:<5} {owner_text(owner)}"
    for tier in (0, 1):
        for layout in overview.layouts:
            for view in layout.tiers:
                if view.tier == tier:
                    yield f"{TIER_NAMES[TIERS[tier]]:<11} {layout.name[:8]}: {_tier_text(desk, layout, view)}"
    for layout in overview.layouts:
        for note in layout.notes:
            yield f"note        {layout.name[:8]}: {note}"


def owner_text(owner: OwnerView) -> str:
    """Who an owner is."""
    if owner.pid:
        who = f"process {owner.pid}, {'connected' if owner.joined else 'greeting'}"
    else:
        who = "alive, no line to the keeper" if owner.alive else "gone, its I/O has not landed"
    layout = f", layout {owner.layout[:8]}" if owner.layout else ""
    asked = zip(TIERS, owner.asked_bytes, strict=False)
    wants = [f"{bytes_text(count)} of {TIER_NAMES[tier]}" for tier, count in asked if count]
    layout += f", asks for {' and '.join(wants)}" if wants else ""
    return f"{who}{layout}, {owner.reserved_slots:,} slots reserved, {owner.leased_slots:,} leased"


def tenant_text(tenant: bytes) -> str:
    """A tenant's digest, short."""
    return "" if tenant == NO_TENANT else tenant.hex()[:TENANT_DIGITS]


def journal_bytes(desk: Desk, layout: LayoutView) -> int:
    """Bytes of a layout's journal now."""
    try:
        return os.stat(f"{layout.name}/{JOURNAL_NAME}", dir_fd=desk.cache.top, follow_symlinks=False).st_size
    except OSError:
        return 0


def _bytes(layout: LayoutView, tier: TierView) -> tuple[int, int]:
    slot_bytes = layout.row_bytes + HEADER_BYTES
    return tier.used_slots * slot_bytes, tier.slots * slot_bytes


def _tier_text(desk: Desk, layout: LayoutView, view: TierView) -> str:
    used, total = _bytes(layout, view)
    parts = [
        f"{view.rows:,} blocks in {view.slots:,} slots, {bytes_text(used)} of {bytes_text(total)} used",
        f"{view.pinned:,} pinned",
        f"{view.evictions:,} evicted, {view.expirations:,} expired",
    ]
    if view.tier == 1:
        parts.append(f"journal {bytes_text(journal_bytes(desk, layout))}")
    if view.written_bytes_max:
        parts.append(f"{bytes_text(view.written_bytes)} of {bytes_text(view.written_bytes_max)} a day written")
    elif view.written_bytes:  # read from files, which do not know the budget
        parts.append(f"{bytes_text(view.written_bytes)} written within a day")
    if view.frozen:
        parts.append("grants nothing until the I/O of engines that are gone has landed")
    return "; ".join(parts)


def _tenants_text(tenants: dict[bytes, int]) -> str:
    named = sorted(((count, tenant) for tenant, count in tenants.items() if tenant != NO_TENANT), reverse=True)
    shown = [f"{tenant_text(tenant)} {count:,}" for count, tenant in named[:TENANTS_SHOWN]]
    return ", ".join(shown) + (f" and {len(named) - TENANTS_SHOWN:,} more" if len(named) > TENANTS_SHOWN else "")


def _owner_json(owner: OwnerView) -> dict[str, object]:
    return {
        "number": owner.number,
        "pid": owner.pid or None,
        "layout": owner.layout or None,
        "joined": owner.joined,
        "alive": owner.alive,
        "reserved_slots": owner.reserved_slots,
        "leased_slots": owner.leased_slots,
        "asked_bytes": dict(zip(TIERS, owner.asked_bytes, strict=False)),
    }


def _layout_json(desk: Desk, layout: LayoutView) -> dict[str, object]:
    return {
        "name": layout.name,
        "row_bytes": layout.row_bytes or None,
        "slice_bytes": layout.slice_bytes or None,
        "kept": desk.is_kept(layout.name),
        "journal_bytes": journal_bytes(desk, layout),
        "notes": layout.notes,
        "tiers": {TIERS[view.tier]: _tier_json(desk, layout, view) for view in layout.tiers},
    }


def _tier_json(desk: Desk, layout: LayoutView, view: TierView) -> dict[str, object]:
    tenants = desk.tenants(layout.name, view.tier)
    return {
        **_numbers(layout, view),
        "written_bytes": view.written_bytes,
        "written_bytes_max": view.written_bytes_max,
        "frozen": view.frozen,
        "tenants": {tenant.hex() if tenant != NO_TENANT else "": count for tenant, count in tenants.items()},
    }


def _numbers(layout: LayoutView, view: TierView) -> dict[str, int]:
    used, total = _bytes(layout, view)
    return {
        "slots": view.slots,
        "used_slots": view.used_slots,
        "used_bytes": used,
        "total_bytes": total,
        "blocks": view.rows,
        "pinned": view.pinned,
        "evictions": view.evictions,
        "expirations": view.expirations,
    }


def _totals(overview: Overview, tier: int) -> dict[str, int]:
    found = [_numbers(layout, view) for layout in overview.layouts for view in layout.tiers if view.tier == tier]
    keys = ("slots", "used_slots", "used_bytes", "total_bytes", "blocks", "pinned", "evictions", "expirations")
    return {key: sum(numbers[key] for numbers in found) for key in keys}
