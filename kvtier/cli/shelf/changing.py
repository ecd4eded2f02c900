"""`kvtier shelf clear | warm | pin | unpin | stop`: what can be done to shelves.

Status 0: done; 1: not all of it (pin: the budget, stop: engines are there); 2: it could not be done, and why.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.shelf import view, work
from kvtier.cli.shelf.options import (
    STATUS_UNWELL,
    AllOption,
    HashesArgument,
    Json,
    LayoutOption,
    PathArgument,
    TenantOption,
    TierOption,
    opened_desk,
    print_json,
    tier_name,
)
from kvtier.cli.terminal import TIER_NAMES, reported
from kvtier.errors import ShelfError
from kvtier.keeper.desk import Change
from kvtier.keeper.operator_line import ask_to_stop


def clear(
    path: PathArgument,
    layout: LayoutOption = "",
    tier: TierOption = "",
    tenant: TenantOption = "",
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned blocks, too.")] = False,
    as_json: Json = False,
) -> None:
    """Hide blocks and free their slots. Servers compute again what they need of them and have no longer in HBM.

    Examples:

      [bold]kvtier shelf clear .cache/kv[/]   # all but pinned blocks

      [bold]kvtier shelf clear .cache/kv --tenant acme --pinned[/]   # all of a tenant
    """
    meant = work.of_tenant(tenant) if tenant else lambda _: True
    with opened_desk(path) as desk:
        chosen = work.choose(desk.overview(), layout, tier_name(tier))
        with work.progress("clearing", sum(shelf.rows for _, shelf in chosen)) as advance:
            cleared, kept = work.clear(desk, chosen, meant, pinned, advance)
        if tenant and not cleared.total() + kept.total():
            raise ShelfError(f"--tenant {tenant}: no block here is charged to it; kvtier shelf ls shows who has some")
    if as_json:
        print_json({"cleared": _by_tier(cleared), "kept_pinned": _by_tier(kept)})
        return
    typer.echo(
        "cleared " + ", ".join(f"{count:,} blocks of {TIER_NAMES[name]}" for name, count in _by_tier(cleared).items())
    )
    if kept.total():
        typer.echo(f"{kept.total():,} blocks stay, since they are pinned: clear --pinned takes them, too")


def warm(
    path: PathArgument,
    layout: LayoutOption = "",
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="At most so many blocks.", show_default="all")
    ] = 1 << 32,
    evict: Annotated[bool, typer.Option("--evict", help="Although others must go from DRAM for them.")] = False,
    as_json: Json = False,
) -> None:
    """Bring the hottest blocks of NVMe into DRAM, as far as it has free slots.

    The hottest: of higher priority, then more often used, then used last. Needs a keeper, since DRAM lives with it.

    Examples:

      [bold]kvtier shelf warm .cache/kv[/]   # after a restart, before requests come

      [bold]kvtier shelf warm .cache/kv --count 1000 --evict[/]
    """
    with opened_desk(path) as desk:
        overview = desk.overview()
        nvme = {found.name for found, _ in work.choose(overview, layout, "nvme")}
        both = [(found, shelf) for found, shelf in work.choose(overview, layout, "dram") if found.name in nvme]
        counts = work.warm(desk, both, count, evict)
    if as_json:
        print_json(asdict(counts))
    else:
        typer.echo(
            f"{counts.moved:,} blocks brought to DRAM, {counts.there:,} were there by then, {counts.evicted:,} evicted "
            f"for them; {counts.refused:,} found no slot, {counts.bad:,} were bad or gone, {counts.unreadable:,} "
            "unreadable"
        )


def pin(
    path: PathArgument,
    hashes: HashesArgument = None,
    every: AllOption = False,
    tenant: TenantOption = "",
    layout: LayoutOption = "",
    tier: TierOption = "",
    as_json: Json = False,
) -> None:
    """Never evict blocks, nor let them expire. Status 1: the budget for pins (tiers.pin_share) refused some.

    Examples:

      [bold]kvtier shelf pin .cache/kv 3fa1b2c4 90ce55[/]   # digits of `ls --blocks`

      [bold]kvtier shelf pin .cache/kv --tenant acme --tier nvme[/]
    """
    meant = _named_blocks(hashes, every, tenant)
    counts = _change_pins(path, layout, tier, meant, Change.pin)
    _tell_pins("pinned", counts, as_json)
    if any(count["refused"] for count in counts.values()):
        raise typer.Exit(STATUS_UNWELL)


def unpin(
    path: PathArgument,
    hashes: HashesArgument = None,
    every: AllOption = False,
    tenant: TenantOption = "",
    layout: LayoutOption = "",
    tier: TierOption = "",
    as_json: Json = False,
) -> None:
    """Let blocks be evicted again.

    Examples:

      [bold]kvtier shelf unpin .cache/kv --all[/]

      [bold]kvtier shelf unpin .cache/kv 3fa1b2c4[/]
    """
    meant = _named_blocks(hashes, every, tenant)
    _tell_pins("unpinned", _change_pins(path, layout, tier, meant, Change.unpin), as_json)


def stop(
    path: PathArgument,
    now: Annotated[
        bool, typer.Option("--now", help="Although engines are there: they start the next one at once.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="For it to leave.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Ask the keeper to leave as soon as no engine is there. Status 1: it is still there, and who is, too.

    DRAM goes with it, unless engines are left that hand it on to the next keeper.

    Examples:

      [bold]kvtier shelf stop .cache/kv[/]

      [bold]kvtier shelf stop .cache/kv --now[/]   # a fresh keeper, after an upgrade
    """
    with opened_desk(path, files_will_do=True) as desk:  # a keeper of another version understands this much
        pid, owners = desk.keeper_pid(), desk.overview().owners
        if now and desk.keeper is not None:
            desk.keeper.leave()
        elif now and pid:
            raise ShelfError(f"--now: the keeper (process {pid}) does not understand it; leave it out, or kill {pid}")
        elif pid:
            ask_to_stop(desk.cache.top)
        end = time.monotonic() + wait_s
        waits = bool(pid) and (now or not any(owner.alive or owner.pid for owner in owners))
        while waits and desk.keeper_is_there(pid) and time.monotonic() < end:
            time.sleep(0.02)
        gone = not pid or not desk.keeper_is_there(pid)
        if as_json:
            waiting_for = [] if gone else [{"number": owner.number, "pid": owner.pid or None} for owner in owners]
            print_json({"keeper": pid or None, "gone": gone, "owners": waiting_for})
        elif not pid:
            typer.echo("there is no keeper")
        elif gone:
            typer.echo(f"the keeper (process {pid}) has left")
        else:
            typer.echo(f"the keeper (process {pid}) leaves when these have gone:")
            for owner in owners:
                typer.echo(f"  owner {owner.number}: {view.owner_text(owner)}")
    if not gone:
        raise typer.Exit(STATUS_UNWELL)


def _by_tier(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in view.TIERS}


def _named_blocks(hashes: list[str] | None, every: bool, tenant: str) -> work.RowTest:
    with reported():
        if (bool(hashes) + every + bool(tenant)) != 1:
            raise ShelfError("say which blocks: their hashes, --all, or --tenant NAME; one of the three")
        if every:
            return lambda _: True
        return work.of_tenant(tenant) if tenant else work.of_hashes(hashes or [])


def _change_pins(path: Path, layout: str, tier: str, meant: work.RowTest, verb: work.Verb) -> dict[str, Counter[str]]:
    with opened_desk(path) as desk:
        chosen = work.choose(desk.overview(), layout, tier_name(tier))
        with work.progress("looking", sum(shelf.rows for _, shelf in chosen)) as advance:
            counts = work.change_pins(desk, chosen, meant, verb, advance)
        if not any(count["named"] for count in counts.values()):
            raise ShelfError("no such block here; see kvtier shelf ls --blocks")
    return counts


def _tell_pins(done: str, counts: dict[str, Counter[str]], as_json: bool) -> None:
    if as_json:
        print_json({name: dict(count) for name, count in counts.items()})
        return
    for name, count in counts.items():
        if count["named"]:
            typer.echo(
                f"{TIER_NAMES[name]}: {count['done']:,} of {count['named']:,} blocks {done}, "
                f"{count['refused']:,} refused, the rest were so already"
            )
