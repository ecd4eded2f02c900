"""Stand-ins that carry real bytes: a keystream for rows, an I/O engine that moves when told, a model without torch.

A row's payload is a function of its block hash, and the fake model's K and V are a function of all tokens so far, so a
wrong slot, a stale row or a wrong order shows as wrong bytes, not only as a wrong count.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from late import LateArena

from kvtier.block import BlockHash, KVLayout, Tier
from kvtier.books import LocalBooks
from kvtier.cost import CostModel, LoadPolicy
from kvtier.demotion import NvmePolicy
from kvtier.directory import Directory
from kvtier.eviction import LeastRecentlyUsed, PolicyMaker
from kvtier.io.base import IoRequest, IoResult, KernelCalls, Operation, SystemCalls
from kvtier.metrics import Metrics
from kvtier.namespace import HashChain
from kvtier.record import NO_TENANT, tenant_digest
from kvtier.request import FinishReason
from kvtier.retention import PLAIN, Retention
from kvtier.scheduler import Scheduler
from kvtier.sequence import ScheduledSequence, StagedPart
from kvtier.sequence import Sequence as TokenSequence
from kvtier.shelf import Shelf
from kvtier.staging import Staging
from kvtier.store import Store
from kvtier.terms import SlotLimits
from kvtier.ticket import ShelfLimits
from kvtier.tiers.hbm import HbmArena
from kvtier.tiers.header import RowFormat
from kvtier.tiers.slab import Slab, make_dram_slab, open_nvme_slab
from kvtier.tiers.staging import StagingMemory

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=8, dtype="float32")
"""The smallest row there is: 4 KiB, of which 16 bytes a token are used."""
NAMESPACE = bytes(range(32))


def keystream(block_hash: BlockHash, row_bytes: int = LAYOUT.row_bytes) -> bytes:
    """The payload of a block's row."""
    return hashlib.shake_128(block_hash).digest(row_bytes)


class SteppedIo:
    """An `IoEngine` without threads: a request moves when `step` says so, and never while its lane is held back."""

    def __init__(self, calls: SystemCalls | None = None, queue_max: int = 16, seed: int = 0) -> None:
        self._calls = calls if calls is not None else KernelCalls()
        self._queue_max = queue_max
        self._chance = random.Random(seed)
        self._waiting: list[IoRequest] = []
        self._done: list[IoResult] = []
        self._unpolled: Counter[Operation] = Counter()
        self.registered: list[memoryview] = []
        """Memory that writes were said to come from."""
        self.hanging: set[Operation] = set()
        """Requests of these operations stay in flight."""
        self._frozen: set[int] = set()

    def submit(self, requests: Sequence[IoRequest]) -> int:
        taken = 0
        for request in requests:
            if self.room(request.operation) == 0:
                break
            self._waiting.append(request)
            self._unpolled[request.operation] += 1
            taken += 1
        return taken

    def register_memory(self, memory: memoryview) -> None:
        self.registered.append(memory)

    def room(self, operation: Operation) -> int:
        return self._queue_max - self._unpolled[operation]

    def poll(self) -> list[IoResult]:
        done, self._done = self._done, []
        self._unpolled = Counter(request.operation for request in self._waiting)
        return done

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._done)

    def close(self, _: float) -> int:
        self.step(self.in_flight)
        left, self._waiting = len(self._waiting), []
        return left

    def cancel(self, operation: Operation) -> None:
        """End what has not started: all of this operation, unless it hangs."""
        if operation in self.hanging:
            return
        idle = [r for r in self._waiting if r.operation is operation and r.tag not in self._frozen]
        self._waiting = [request for request in self._waiting if request not in idle]
        self._done += [IoResult(request.tag, 0, errno.ECANCELED, None, 0) for request in idle]

    def step(self, count: int = 1) -> int:
        """Move up to `count` waiting requests, in any order; returns how many."""
        moved = 0
        while moved < count:
            ready = [
                request
                for request in self._waiting
                if request.operation not in self.hanging and request.tag not in self._frozen
            ]
            if not ready:
                break
            request = self._chance.choice(ready)
            self._waiting.remove(request)
            self._done.append(self._run(request))
            moved += 1
        return moved

    def hang(self, reads: int) -> int:
        """The first reads in flight have begun, and never end; returns how many more hang now."""
        tags = {request.tag for request in self._waiting if request.operation is Operation.READ} - self._frozen
        hung = sorted(tags)[:reads]
        self._frozen.update(hung)
        return len(hung)

    def freeze(self) -> None:
        """What is in flight now never ends."""
        self._frozen.update(request.tag for request in self._waiting)

    def _run(self, request: IoRequest) -> IoResult:
        if request.prepare is not None:
            request.prepare()
        reads = request.operation is Operation.READ
        call = self._calls.preadv if reads else self._calls.pwritev
        moved, error, value = 0, None, None
        try:
            moved = call(request.descriptor, request.buffers, request.offset)
            if moved < request.total_bytes and not reads:
                error = errno.EIO
        except OSError as failure:
            error = failure.errno
        if error is None and moved == request.total_bytes and request.then is not None:
            value = request.then()
        return IoResult(request.tag, moved, error, value, 1)


class SteppedTiers:
    """A store over HBM, DRAM and NVMe whose shelves move bytes only in `step`. Real slabs, no threads, no journal."""

    def __init__(
        self,
        folder: Path,
        hbm: int,
        dram: int,
        nvme: int,
        policy: NvmePolicy = NvmePolicy.THROUGH,
        calls: SystemCalls | None = None,
        seed: int = 0,
        queue_max: int = 16,
        fetch_deadline_s: float = 5.0,
        late_s: float = 5.0,
        eviction: PolicyMaker = LeastRecentlyUsed,
        spare_count: int = 0,
        limits: SlotLimits | None = None,
        load: LoadPolicy = LoadPolicy.ALWAYS,
        staged_blocks: int = 0,
        late: bool = False,
    ) -> None:
        """`staged_blocks`: of one sequence, that may lie on NVMe. `late`: HBM is reached by copies that come late."""
        self.arena = HbmArena(LAYOUT, hbm)
        self.late = LateArena(self.arena, seed) if late else None
        self.metrics = Metrics()
        costs = CostModel(LAYOUT, fetch_deadline_s, load)
        unit_bytes = LAYOUT.slice_bytes
        staging = StagingMemory(2 * staged_blocks * unit_bytes, unit_bytes) if staged_blocks else None
        arena = self.late if self.late is not None else self.arena
        self.store = Store(LAYOUT, arena, eviction, self.metrics, policy, costs, spare_count, staging)
        self.io: dict[Tier, SteppedIo] = {}
        self.slabs: dict[Tier, Slab] = {}
        self.shelves: dict[Tier, Shelf] = {}
        form = RowFormat.of(LAYOUT, NAMESPACE)
        for tier, slots in ((Tier.DRAM, dram), (Tier.NVME, nvme)):
            if slots:
                slab = make_dram_slab(form.slot_bytes, slots) if tier is Tier.DRAM else nvme_slab(folder, form, slots)
                io = self.io[tier] = SteppedIo(calls, queue_max, seed)
                self.slabs[tier] = slab
                shelf_limits = ShelfLimits(queue_max, late_s=late_s)
                books = LocalBooks(Directory(slots, eviction, limits=limits))
                shelf = Shelf(tier, form, slab, books, io, shelf_limits, lambda *_: None)
                self.shelves[tier] = shelf
                self.store.add_shelf(shelf)

    def compute(
        self, hashes: Sequence[BlockHash], now: float = 0.0, first: int = 0, retention: Retention = PLAIN
    ) -> list[int]:
        """Blocks as a sequence makes them, the first at depth `first`: allocated, written, sealed. Slots, held."""
        slots = self.store.allocate(len(hashes))
        assert slots is not None, "HBM is full"
        for slot, block_hash in zip(slots, hashes, strict=True):
            self.arena.view(slot)[:] = keystream(block_hash)
        return [self.store.seal(slot, hashes[i], first + i, now, retention) for i, slot in enumerate(slots)]

    def take(self, hashes: Sequence[BlockHash], now: float = 0.0) -> tuple[list[int], list[Tier]]:
        """Fetch `hashes`, wait for them, check their bytes; returns slots, held, and origins of what was found."""
        fetch = self.store.fetch(hashes, len(hashes), now)
        assert fetch is not None, "HBM is full"
        self.settle(now)
        slots, origins = self.store.settle(fetch)
        for slot, block_hash in zip(slots, hashes, strict=False):
            assert self.arena.view(slot) == keystream(block_hash)
        return slots, origins

    def drain(self, tier: Tier, now: float = 0.0) -> None:
        """Push a tier down to its end."""
        for _ in range(100):
            self.settle(now)
            if self.store.drain(tier):
                return
        raise AssertionError("the drain never ends")

    def step(self, count: int = 1 << 20) -> int:
        """Move up to `count` requests of each shelf."""
        return sum(io.step(count) for io in self.io.values())

    def settle(self, now: float) -> None:
        """Run everything that is under way or wished for to its end."""
        for _ in range(1000):
            self.store.poll(now)
            if self.step() == 0 and not self.store.busy:
                return
        raise AssertionError("transfers never end")

    def settle_all_but_hung(self, now: float) -> None:
        """Run everything that can still move to where it ends."""
        for _ in range(1000):
            self.store.poll(now)
            if self.step() == 0 and not (self.late and self.late.waiting_count):
                return
        raise AssertionError("transfers never end")

    def corrupt(self, tier: Tier, slot: int, place: int) -> None:
        """Flip one byte of a slot, header or row, behind everybody's back."""
        slab = self.slabs[tier]
        aligned = place - place % 4096
        flip_byte(slab.descriptor, slab.offset(slot) + aligned, place % 4096)

    def close(self) -> None:
        self.store.close(0.0)
        for slab in self.slabs.values():
            slab.close()


def nvme_slab(folder: Path, form: RowFormat, slots: int) -> Slab:
    """A fresh NVMe slab in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return open_nvme_slab(descriptor, form.slot_bytes, slots, KernelCalls())[0]
    finally:
        os.close(descriptor)


def flip_byte(descriptor: int, page_offset: int, place: int) -> None:
    """Change one byte of the 4 KiB page at `page_offset`; works on direct-I/O descriptors too."""
    page = mmap.mmap(-1, 4096)
    os.preadv(descriptor, [page], page_offset)
    page[place] ^= 0x5A
    os.pwritev(descriptor, [page], page_offset)


TENANTS = (NO_TENANT, tenant_digest("one"), tenant_digest("two"))


def random_retention(chance: random.Random, unix_s: float) -> Retention:
    """What some request asks; half of them nothing."""
    if chance.random() < 0.5:
        return PLAIN
    expiry_s = chance.choice([0, int(unix_s) + chance.randrange(1, 9), int(unix_s) + chance.randrange(1, 30)])
    return Retention(chance.choice([-100, -1, 0, 0, 1, 100]), expiry_s, chance.random() < 0.2, chance.choice(TENANTS))


def chain_hashes(tokens: Sequence[int], salt: str = "") -> list[BlockHash]:
    """Hashes of all full blocks of `tokens`."""
    hashes: list[BlockHash] = []
    HashChain(NAMESPACE, LAYOUT.block_tokens, salt).extend(hashes, tokens)
    return hashes


class FakeModel:
    """Next tokens and K,V bytes as digests of all tokens so far. Reads and writes rows by address, as kernels do.

    Each pass checks every byte of every prefix it attends to: AssertionError names the sequence and the block.
    """

    TOKEN_BYTES = 16

    def __init__(self, vocab: int = 50) -> None:
        self._vocab = vocab
        self._states: dict[int, list[bytes]] = {}
        self.tokens_checked = 0

    def run(self, parts: Sequence[ScheduledSequence], staged: dict[int, int] | None = None) -> list[int]:
        """One pass, as `Runner.run`; `staged`: addresses of the blocks that were staged for it."""
        sampled: list[int] = []
        for part in parts:
            sequence = part.sequence
            states = self._states.setdefault(sequence.number, [])
            extend_states(states, sequence.tokens)
            end = part.start + part.count
            assert part.start == sequence.computed_count and end <= len(sequence.tokens)
            self._check_prefix(sequence, states, part.start, staged or {})
            self._write(sequence, states, part.start, end)
            if part.samples:
                assert end == len(sequence.tokens)
                sampled.append(next_token(states[-1], self._vocab))
        return sampled

    def forget(self, number: int) -> None:
        """The sequence is over."""
        self._states.pop(number, None)

    def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """What a sequence of this prompt must generate."""
        tokens, states = list(prompt), list[bytes]()
        for _ in range(count):
            extend_states(states, tokens)
            tokens.append(next_token(states[-1], self._vocab))
        return tokens[len(prompt) :]

    def _check_prefix(self, sequence: TokenSequence, states: list[bytes], end: int, staged: dict[int, int]) -> None:
        block_tokens = LAYOUT.block_tokens
        addresses = sequence.table.addresses.tolist()
        for block, start in enumerate(range(0, end, block_tokens)):
            wanted = b"".join(states[start : min(start + block_tokens, end)])
            address = addresses[block] or staged[block]
            found = ctypes.string_at(address, len(wanted))
            assert found == wanted, f"sequence {sequence.number}: block {block} of its prefix holds other bytes"
        self.tokens_checked += end

    def _write(self, sequence: TokenSequence, states: list[bytes], start: int, end: int) -> None:
        addresses, block_tokens = sequence.table.addresses, LAYOUT.block_tokens
        for position in range(start, end):
            address = int(addresses[position // block_tokens]) + position % block_tokens * self.TOKEN_BYTES
            ctypes.memmove(address, states[position], self.TOKEN_BYTES)


def extend_states(states: list[bytes], tokens: Sequence[int]) -> None:
    """Append the digest of each token that has none: it covers all tokens up to it."""
    for position in range(len(states), len(tokens)):
        before = states[-1] if states else b""
        states.append(hashlib.blake2b(before + tokens[position].to_bytes(4, "little"), digest_size=16).digest())


def next_token(state: bytes, vocab: int) -> int:
    """The fake model's choice after a digest."""
    return int.from_bytes(state[:4], "little") % vocab


def make_sequence(
    number: int,
    prompt: Sequence[int],
    output_max: int,
    priority: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    **cache: Any,
) -> TokenSequence:
    """A sequence as intake makes them, without a session; `cache`: retention, cache_read, cache_write."""
    chain = HashChain(NAMESPACE, LAYOUT.block_tokens)
    return TokenSequence(number, priority, list(prompt), len(prompt), output_max, stop_ids, chain, None, **cache)


class SteppedEngine:
    """Scheduler, store and fake model turned by hand: the engine's step without its thread."""

    def __init__(self, tiers: SteppedTiers, scheduler: Scheduler) -> None:
        self.tiers = tiers
        self.scheduler = scheduler
        self.model = FakeModel()
        self.given_up: list[TokenSequence] = []
        self.reasons: list[str] = []
        """Why, of each of those."""
        self.passes: Counter[int] = Counter()
        """Tokens that each sequence has had computed."""
        self._suspended: tuple[StagedPart, Staging] | None = None
        """The pass over NVMe rows that waits for them."""

    def step(self, now: float, on_finish: Callable[[TokenSequence], None]) -> list[ScheduledSequence]:
        """One turn; `on_finish` gets each sequence that has ended by itself or was given up."""
        self.tiers.store.poll(now)
        plan = self.scheduler.schedule(now)
        for sequence, why in self.scheduler.take_stalled():
            self.reasons.append(why)
            if self._suspended is not None and self._suspended[0].part.sequence is sequence:
                self._abandon()
            self.scheduler.finish(sequence, FinishReason.ERROR, now)
            self.given_up.append(sequence)
            on_finish(sequence)
        if plan:
            self._commit(plan, self.model.run(plan), now, on_finish)
        self._turn(now, on_finish)
        return plan

    def cancel(self, sequence: TokenSequence, now: float) -> None:
        """End a sequence, and the suspended pass over it first."""
        if self._suspended is not None and self._suspended[0].part.sequence is sequence:
            self._abandon()
        self.scheduler.finish(sequence, FinishReason.CANCELLED, now)
        self.model.forget(sequence.number)

    def _commit(
        self,
        plan: list[ScheduledSequence],
        sampled: list[int],
        now: float,
        on_finish: Callable[[TokenSequence], None],
    ) -> None:
        tokens = iter(sampled)
        for part in plan:
            self.passes[part.sequence.number] += part.count
            reason = self.scheduler.commit(part, next(tokens) if part.samples else None, now)
            if reason is not None:
                self.scheduler.finish(part.sequence, reason, now)
                self.model.forget(part.sequence.number)
                on_finish(part.sequence)

    def _turn(self, now: float, on_finish: Callable[[TokenSequence], None]) -> None:
        """Begin a suspended pass, or run it once its rows are there (of one layer, so all at once)."""
        stager, parts = self.tiers.store.stager, self.scheduler.staged_parts
        if stager is None:
            return
        if self._suspended is not None and not parts.is_sound(self._suspended[0].part.sequence):
            self._abandon()
        if self._suspended is None:
            staged = parts.schedule_staged(now)
            if staged is not None:
                self._suspended = staged, stager.begin(staged.records, now, staged.expected)
            return
        staged, staging = self._suspended
        answer, sequence = stager.stage(staging, now), staged.part.sequence
        blocks = [block for block, address in enumerate(sequence.table.addresses.tolist()) if address == 0]
        if answer.lost is not None:
            stager.abandon(staging)
            self._suspended = None
            parts.lost(sequence, blocks[answer.lost], now)
        elif answer.addresses is not None:
            where = dict(zip(blocks, answer.addresses.tolist(), strict=True))
            tokens = self.model.run([staged.part], where)
            stager.use_up(staging, now)
            self._suspended = None
            self._commit([staged.part], tokens, now, on_finish)

    def _abandon(self) -> None:
        assert self._suspended is not None and self.tiers.store.stager is not None
        staged, staging = self._suspended
        self._suspended = None
        self.tiers.store.stager.abandon(staging)
        self.scheduler.staged_parts.abandon_staged(staged.part.sequence)
