"""The work behind `kvtier shelf verify | clear | warm | pin | unpin`: walks over rows, with a progress bar.

Owns which rows are meant and what is counted; the desk reaches them. Knows no options. Called by the subcommands.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvtier.block import BlockHash
from kvtier.cli.shelf.view import TIERS
from kvtier.cli.terminal import TIER_NAMES, messages
from kvtier.errors import ShelfError
from kvtier.keeper.desk import Change, Desk
from kvtier.keeper.operator_wire import Counted, LayoutView, Overview, TierView
from kvtier.keeper.verification import Judgement, judge
from kvtier.keeper.warming import Warmed, hottest, warmed
from kvtier.record import Record, tenant_digest
from kvtier.tiers.header import RowFormat

SHOWN_MAX = 1000
"""Bad rows that are named; all are counted."""
SETTLE_S = 1.0
"""Before a bad row in files that somebody writes is looked up again: the journal is written behind."""
DIGEST_DIGITS_MIN = 8
Advance = Callable[[int], None]
Chosen = list[tuple[LayoutView, TierView]]
RowTest = Callable[[Record], bool]
Verb = Callable[[Change, str, int, Sequence[BlockHash]], Counted]
"""`Change.pin` or `Change.unpin`."""


def choose(overview: Overview, layout: str, tier: str) -> Chosen:
    """The shelves that are meant: all, or a layout's (its first digits), or a tier's. ShelfError: there is none."""
    layouts = [view for view in overview.layouts if view.name.startswith(layout)]
    if not layouts and layout:
        known = ", ".join(view.name[:8] for view in overview.layouts) or "none"
        raise ShelfError(f"--layout {layout}: no such layout here; there are: {known}")
    chosen = [(view, shelf) for view in layouts for shelf in view.tiers if tier in ("", TIERS[shelf.tier])]
    if not chosen and tier == "dram" and overview.keeper is None:
        raise ShelfError("DRAM is shared only while engines and their keeper run, and no keeper answers")
    if not chosen and tier:
        raise ShelfError(f"--tier {tier}: no layout has that tier here; see kvtier shelf ls")
    return chosen


def narrowed(overview: Overview, layout: str, tier: str) -> Overview:
    """What is there of a layout and of a tier, as `choose` takes them, notes included. ShelfError: there is none."""
    if layout or tier:
        choose(overview, layout, tier)
    layouts = [
        msgspec.structs.replace(view, tiers=[shelf for shelf in view.tiers if tier in ("", TIERS[shelf.tier])])
        for view in overview.layouts
        if view.name.startswith(layout)
    ]
    return msgspec.structs.replace(overview, layouts=[view for view in layouts if view.tiers or not tier])


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """A bar on stderr, if that is a terminal; gives what moves it on."""
    console = messages()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


@dataclass(slots=True)
class Verified:
    """What `verify` has found."""

    rows: int = 0
    read_bytes: int = 0
    good: int = 0
    bad: int = 0
    """Of those that were still there when they had been judged."""
    changed: int = 0
    """Replaced or dropped while they were read: nothing is wrong with them."""
    unreadable: int = 0
    dropped: int = 0
    seconds: float = 0.0
    bad_rows: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Nothing bad was found."""
        return not (self.bad or self.unreadable)


def verify(desk: Desk, chosen: Chosen, bytes_per_s: float, drops: bool, advance: Advance) -> Verified:
    """Read and judge every row; drop the bad ones if `drops`."""
    found, started = Verified(), time.monotonic()
    for layout, view in chosen:
        form = RowFormat(bytes(32), layout.row_bytes, layout.slice_bytes)
        slab = desk.open_slab(layout, view.tier)
        suspects: list[tuple[Record, Judgement]] = []
        try:
            records = (record for page in desk.rows(layout.name, view.tier) for record in page.rows)
            for judged in judge(slab, form, records, bytes_per_s):
                advance(len(judged))
                found.rows += len(judged)
                found.read_bytes += len(judged) * form.slot_bytes
                for record, judgement in judged:
                    found.good += judgement is Judgement.GOOD
                    found.unreadable += judgement is Judgement.UNREADABLE
                    if judgement not in (Judgement.GOOD, Judgement.UNREADABLE):
                        suspects.append((record, judgement))
        finally:
            slab.close()
        _settle(desk, layout, view, suspects, drops, found)
    found.seconds = time.monotonic() - started
    return found


def _settle(
    desk: Desk,
    layout: LayoutView,
    view: TierView,
    suspects: list[tuple[Record, Judgement]],
    drops: bool,
    found: Verified,
) -> None:
    """Tell bad rows from those that were replaced meanwhile: a row that is there still was there all the time."""
    if not suspects:
        return
    if not desk.is_kept(layout.name) and desk.is_occupied():
        time.sleep(SETTLE_S)
    there = desk.still_there(layout.name, view.tier, [record for record, _ in suspects])
    bad = [(record, judgement) for record, judgement in suspects if (record.slot, record.generation) in there]
    found.bad += len(bad)
    found.changed += len(suspects) - len(bad)
    found.bad_rows += [
        {
            "layout": layout.name,
            "tier": TIERS[view.tier],
            "hash": record.block_hash.hex(),
            "slot": record.slot,
            "reason": judgement.value,
        }
        for record, judgement in bad[: SHOWN_MAX - len(found.bad_rows)]
    ]
    if not drops or not bad:
        return
    try:
        with _opened(desk, layout.name) as change:
            found.dropped += change.hide(layout.name, view.tier, [record for record, _ in bad])
    except ShelfError as error:
        found.notes.append(f"{len(bad)} bad rows of {TIER_NAMES[TIERS[view.tier]]} are left: {error}")


@contextlib.contextmanager
def _opened(desk: Desk, layout: str) -> Iterator[Change]:
    """Open a layout to change, through the keeper if one has come since the desk was opened."""
    if desk.keeper is not None:
        with desk.change(layout) as change:
            yield change
        return
    with Desk(desk.path) as later:
        later.overview()
        with later.change(layout) as change:
            yield change


def clear(
    desk: Desk, chosen: Chosen, meant: RowTest, pinned: bool, advance: Advance
) -> tuple[Counter[str], Counter[str]]:
    """Hide the rows that are meant, `pinned` ones only if asked; how many by tier, and how many stay for their pins."""
    cleared, kept = Counter[str](), Counter[str]()
    for layout, view in chosen:
        name = TIERS[view.tier]
        with desk.change(layout.name) as change:
            for piece in _pieces(desk, layout, view, meant, advance):
                going = [record for record in piece if pinned or not record.pinned]
                cleared[name] += change.hide(layout.name, view.tier, going)
                kept[name] += len(piece) - len(going)
    return cleared, kept


def change_pins(desk: Desk, chosen: Chosen, meant: RowTest, verb: Verb, advance: Advance) -> dict[str, Counter[str]]:
    """Pin or unpin the blocks that are meant, first blocks of chains first; by tier how many were `named`, `done`
    (others were so already) and `refused` by the budget for pins."""
    counts = {name: Counter[str](named=0, done=0, refused=0) for name in TIERS}
    for layout, view in chosen:
        found = [record for piece in _pieces(desk, layout, view, meant, advance) for record in piece]
        found.sort(key=lambda record: record.depth)
        with desk.change(layout.name) as change:
            answer = verb(change, layout.name, view.tier, [record.block_hash for record in found])
        counts[TIERS[view.tier]].update(named=len(found), done=answer.done, refused=answer.refused)
    return counts


def warm(desk: Desk, chosen: Chosen, count: int, evicts: bool) -> Warmed:
    """Bring the hottest blocks of NVMe into DRAM, `count` at most; without `evicts` into slots that are free."""
    counts = Warmed()
    for layout, view in chosen:
        room = view.slots if evicts else view.slots - view.used_slots
        records = hottest(desk, layout.name, min(room, count - counts.ended))
        with progress(f"warming {layout.name[:8]}", len(records)) as advance:
            for ended in warmed(desk, layout, records, evicts, counts):
                advance(ended)
    return counts


def _pieces(desk: Desk, layout: LayoutView, view: TierView, meant: RowTest, advance: Advance) -> Iterator[list[Record]]:
    for page in desk.rows(layout.name, view.tier):
        advance(len(page.rows))
        yield [record for record in page.rows if meant(record)]


def of_tenant(name: str) -> RowTest:
    """Rows charged to a tenant: by its name, or by the first digits of its digest as `ls` shows them."""
    digest = tenant_digest(name)
    digits = name.lower() if len(name) >= DIGEST_DIGITS_MIN and _is_hexadecimal(name) else None
    return lambda record: record.tenant == digest or (digits is not None and record.tenant.hex().startswith(digits))


def of_hashes(prefixes: Iterable[str]) -> RowTest:
    """Rows whose block hash begins with one of these digits. ShelfError: one is no hash."""
    wanted: dict[int, set[str]] = {}
    for prefix in prefixes:
        if not _is_hexadecimal(prefix) or not 4 <= len(prefix) <= 64:
            raise ShelfError(f"{prefix}: a block is named by 4 to 64 hexadecimal digits, as ls --blocks shows them")
        wanted.setdefault(len(prefix), set()).add(prefix.lower())

    def named(record: Record) -> bool:
        digits = record.block_hash.hex()
        return any(digits[:length] in prefixes for length, prefixes in wanted.items())

    return named


def resolve(path: Path) -> Path:
    """The cache directory: itself, or what an engine.yaml or a model's folder names as tiers.nvme.path. ShelfError."""
    candidates = [path, path / "1" / "engine.yaml", path / "engine.yaml"]
    configured = next((file for file in candidates if file.suffix == ".yaml" and file.is_file()), None)
    if configured is None:
        return path
    from kvtier.config import EngineConfig

    found = EngineConfig.load(configured).tiers.nvme.path
    if found is None:
        raise ShelfError(f"{configured}: tiers.nvme.path is not set, so its shelves are private to each engine")
    return found


def _is_hexadecimal(text: str) -> bool:
    return bool(text) and all(digit in "0123456789abcdefABCDEF" for digit in text)
