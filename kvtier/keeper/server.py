"""The keeper's loop: greets engines, answers them, tells mirrors of every change, watches owners and files, leaves.

One thread, no waiting but in `select`; deadlines are checked before work is done. Whatever an engine sends can cost it
its own connection and nothing else. Runs in a process of its own (`__main__`), holding `keeper.lock` all its life.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from kvtier.block import ALIGNMENT
from kvtier.cache_directory import CacheDirectory
from kvtier.directory import PublishOutcome
from kvtier.errors import KvtierError
from kvtier.eviction import POLICIES
from kvtier.keeper.connection import Connection, close_all
from kvtier.keeper.kept import DRAM, NVME, Handover, KeptLayout, fill
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.owners import OWNERS_NAME, is_locked, open_owners
from kvtier.keeper.wire import (
    OWNERS_MAX,
    PROTOCOL_VERSION,
    Abandon,
    Acquire,
    Acquired,
    Drop,
    Farewell,
    Granted,
    Hello,
    Here,
    Join,
    Numbers,
    Publish,
    Published,
    Refused,
    Release,
    Reserve,
    Snapshot,
    Stop,
    ToEngine,
    ToKeeper,
    Touch,
    Welcome,
    WireError,
    as_claims,
    as_rows,
    frame,
)
from kvtier.record import Record
from kvtier.tiers.header import SLICES_MAX, RowFormat

log = logging.getLogger(__name__)

SOCKET_NAME = "keeper.sock"
TICK_S = 0.2
WATCH_S = 1.0
BACKLOG = 128
SNAPSHOT_ROWS = 512
GREETINGS_MAX = 128
"""Connections that have not joined yet."""

DUPLICATE = PublishOutcome.DUPLICATE
_OUTCOMES = {PublishOutcome.PUBLISHED: 0, PublishOutcome.DUPLICATE: 1, PublishOutcome.STALE: 2}
_CREDENTIALS = struct.Struct("iII")
RECOVERING = "recovering: engines of the keeper before this one have not come yet"
FIRST_S = 5.0
"""How much longer than the linger the keeper waits for its first engine."""
CLOSE_S = 10.0
"""What the journal gets to end."""


class Server:
    """See the module. Serves until `run` returns."""

    def __init__(self, cache: CacheDirectory, linger_s: float) -> None:
        """`cache` holds the lock already."""
        self._cache = cache
        self._linger_s = linger_s
        self._owners = cache.hold(open_owners(cache.top))
        self._survivors = {owner for owner in range(OWNERS_MAX) if is_locked(self._owners, owner)}
        self._layouts: dict[str, KeptLayout] = {}
        self._dram_total_bytes = 0
        self._connections: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._used_told: dict[tuple[str, int], int] = {}
        self._lonely_since = time.monotonic() + FIRST_S
        self._leaving = ""
        self._socket = self._listen()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until nobody has been there for the linger, the files are gone, or an engine asked for it."""
        tick_at = watch_at = 0.0
        while not self._leaving:
            ready = self._selector.select(TICK_S)
            for key, mask in ready:
                if key.fileobj is self._socket:
                    self._accept()
                elif mask & selectors.EVENT_READ:
                    self._read(key.data)
            self._tell()
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                self._tend_owners(now)
            if now >= watch_at:
                watch_at = now + WATCH_S
                self._watch()
        self._leave()

    def _listen(self) -> socket.socket:
        """Bind below the directory's descriptor: the path itself may be too long for an address."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET_NAME, dir_fd=self._cache.top)
        before = os.umask(0o177)
        try:
            listener.bind(f"/proc/self/fd/{self._cache.top}/{SOCKET_NAME}")
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener

    # ---- connections -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            link, _ = self._socket.accept()
        except OSError:
            return
        _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        greetings = sum(not connection.joined for connection in self._connections.values())
        if user != os.geteuid() or greetings >= GREETINGS_MAX:
            log.warning("a connection of user %d was refused", user)
            link.close()
            return
        connection = Connection(link)
        self._connections[link.fileno()] = connection
        self._selector.register(link, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        if self._connections.get(connection.link.fileno()) is not connection:
            return
        descriptors: list[int] = []
        try:
            messages, descriptors = connection.receive()
            for message in messages:
                if connection.closing:
                    break
                self._handle(connection, message, descriptors)
        except (WireError, OSError) as error:
            if isinstance(error, WireError):
                log.warning("a connection is ended: %s", error)
            self._end(connection)
        finally:
            close_all(descriptors)

    def _end(self, connection: Connection) -> None:
        descriptor = connection.link.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._selector.unregister(connection.link)
        connection.close()

    def _handle(self, connection: Connection, message: ToKeeper | ToEngine, descriptors: list[int]) -> None:
        """One message of an engine. Takes those descriptors that it uses out of the list."""
        if isinstance(message, Stop):
            self._linger_s, self._lonely_since = 0.0, min(self._lonely_since, time.monotonic())
            connection.closing = True
        elif isinstance(message, Hello):
            if connection.owner is not None:
                raise WireError("a second greeting")
            self._greet(connection, message, descriptors)
        elif connection.owner is None:
            raise WireError("no greeting")
        elif isinstance(message, Join):
            self._join(connection, message)
        elif not connection.joined:
            raise WireError("not joined")
        elif isinstance(message, (Reserve, Publish, Abandon, Drop, Touch, Acquire, Release)):
            ledger = self._layouts[connection.layout].ledgers.get(message.tier)
            if ledger is None:
                raise WireError("no such shelf")
            self._answer(connection, connection.owner, ledger, message)

    def _answer(
        self,
        connection: Connection,
        owner: int,
        ledger: Ledger,
        message: Reserve | Publish | Abandon | Drop | Touch | Acquire | Release,
    ) -> None:
        now = time.monotonic()
        if isinstance(message, (Reserve, Publish, Acquire)) and message.deadline_ns < time.monotonic_ns():
            return
        if isinstance(message, Reserve):
            before = ledger.evictions
            grants = ledger.reserve(owner, message.count, message.tenant)
            self._tell()
            connection.send(Granted(message.number, as_claims(grants), ledger.evictions - before))
        elif isinstance(message, Publish):
            self._tell()
            outcomes = ledger.publish(owner, message.rows, message.lease, now)
            self._tell(but=connection)  # it knows what it has published when it hears of it
            twice = [row.block_hash for row, end in zip(message.rows, outcomes, strict=True) if end is DUPLICATE]
            if twice:
                connection.send(Here(message.tier, as_rows(ledger.rows_of(twice))))
            connection.send(Published(message.number, [_OUTCOMES[outcome] for outcome in outcomes]))
        elif isinstance(message, Acquire):
            connection.send(Acquired(message.number, ledger.acquire(owner, message.grants)))
        elif isinstance(message, Abandon):
            ledger.abandon(owner, message.grants)
        elif isinstance(message, Drop):
            ledger.drop(message.grants)
        elif isinstance(message, Touch):
            ledger.touch(message.hashes, min(message.at, now), message.counts)
        else:
            ledger.release(owner, message.grants)

    # ---- greeting --------------------------------------------------------------------------------------------------

    def _greet(self, connection: Connection, hello: Hello, descriptors: list[int]) -> None:
        reason = self._refusal(hello)
        if not reason:
            try:
                kept = self._layout(hello, descriptors)
            except KvtierError as error:
                reason = str(error)
            else:
                if hello.epochs and not set(hello.epochs) <= set(kept.epochs):
                    self._survivors.discard(hello.owner)
                    reason = "the shelves are others"
        owner = hello.owner if hello.owner >= 0 else self._free_owner()
        if not reason and owner is None:
            reason = f"{OWNERS_MAX} engines share this cache directory already"
        if reason or owner is None:
            log.info("an engine is refused: %s", reason)
            connection.send(Refused(reason))
            connection.closing = True
            return
        self._survivors.discard(owner)
        for other in [other for other in self._connections.values() if other.owner == owner]:
            self._end(other)
        connection.owner, connection.layout = owner, hello.layout
        connection.send_with(Welcome(owner, os.getpid(), kept.epochs, kept.notes), kept.descriptors())

    def _refusal(self, hello: Hello) -> str:
        if hello.version != PROTOCOL_VERSION:
            return f"protocol {hello.version}, the keeper speaks {PROTOCOL_VERSION}"
        slices, rest = divmod(hello.row_bytes, hello.slice_bytes)
        if rest or hello.slice_bytes % ALIGNMENT or not 0 < slices <= SLICES_MAX:
            return "impossible geometry"
        if hello.policy not in POLICIES:
            return f"eviction {hello.policy} is unknown to the keeper"
        if hello.owner >= 0 and not is_locked(self._owners, hello.owner):
            return "an owner without its lock"
        if self._survivors and hello.owner not in self._survivors:
            return RECOVERING
        return ""

    def _layout(self, hello: Hello, descriptors: list[int]) -> KeptLayout:
        """The layout's shelves; opened if they are not, with what the engine has brought."""
        kept = self._layouts.get(hello.layout)
        handed: dict[int, Handover] = {}
        for tier, epoch, slot_count in hello.epochs:
            slab = descriptors.pop(0) if tier == DRAM and descriptors else None
            table = descriptors.pop(0) if descriptors else None
            if table is None or slot_count == 0 or tier in handed or (tier == DRAM and slab is None):
                close_all([one for one in (slab, table) if one is not None])
                raise WireError("descriptors are missing")
            handed[tier] = Handover(epoch, slot_count, table, slab)
        try:
            if kept is None:
                form = RowFormat(bytes(32), hello.row_bytes, hello.slice_bytes)
                kept = KeptLayout(hello.layout, form, self._cache.folder(hello.layout), POLICIES[hello.policy])
                self._layouts[hello.layout] = kept
            elif (kept.form.row_bytes, kept.form.slice_bytes) != (hello.row_bytes, hello.slice_bytes):
                raise WireError("another geometry under the same name")
            self._dram_total_bytes = self._dram_total_bytes or hello.budgets[DRAM]
            taken = [one.ledgers[DRAM].slab.total_bytes for one in self._layouts.values() if DRAM in one.ledgers]
            left = min(hello.budgets[DRAM], max(1, self._dram_total_bytes - sum(taken)))
            fresh = not self._survivors - {hello.owner}
            fill(kept, self._cache, (left, hello.budgets[NVME]), handed, fresh, time.monotonic())
        finally:
            for one in handed.values():
                close_all([one.table] + ([one.slab] if one.slab is not None else []))
        return kept

    def _free_owner(self) -> int | None:
        taken = {connection.owner for connection in self._connections.values()}
        for layout in self._layouts.values():
            for ledger in layout.ledgers.values():
                taken |= ledger.owners()
        for owner in range(OWNERS_MAX):
            if owner in taken or is_locked(self._owners, owner):
                continue
            if not any(layout.has_io(owner) for layout in self._layouts.values()):
                return owner
        return None

    def _join(self, connection: Connection, join: Join) -> None:
        owner = connection.owner
        if connection.joined or owner is None or not is_locked(self._owners, owner):
            raise WireError("joined twice, or without its lock")
        self._tell()
        connection.joined = True
        for tier, ledger in self._layouts[connection.layout].ledgers.items():
            grants = [(slot, generation) for where, slot, generation in join.grants if where == tier]
            leases = [(slot, generation) for where, slot, generation in join.leases if where == tier]
            ledger.reconcile(owner, grants, leases)
        self._tell(but=connection)
        for tier, ledger in self._layouts[connection.layout].ledgers.items():
            connection.send_lazily(_snapshot(tier, ledger.records()))
            connection.send(Numbers(tier, ledger.used_slots))

    # ---- telling, tending, leaving ---------------------------------------------------------------------------------

    def _tell(self, but: Connection | None = None) -> None:
        """Tell mirrors what has changed, and write to whoever reads."""
        for name, kept in self._layouts.items():
            for tier, ledger in kept.ledgers.items():
                told: list[bytes] = [frame(change) for change in ledger.take_changes()]
                if self._used_told.get((name, tier)) != ledger.used_slots:
                    self._used_told[(name, tier)] = ledger.used_slots
                    told.append(frame(Numbers(tier, ledger.used_slots)))
                for connection in self._connections.values() if told else ():
                    if connection.joined and connection.layout == name and connection is not but:
                        for data in told:
                            connection.send_bytes(data)
        for connection in list(self._connections.values()):
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            connection.flush()
        except OSError:
            self._end(connection)
            return
        if connection.closing and not connection.wants_to_write:
            self._end(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
        if self._selector.get_key(connection.link).events != events:
            self._selector.modify(connection.link, events, connection)

    def _tend_owners(self, now: float) -> None:
        """Take back what the dead held, once their I/O has landed; look whether anybody is there."""
        self._survivors = {owner for owner in self._survivors if is_locked(self._owners, owner)}
        present = {connection.owner for connection in self._connections.values()}
        for kept in self._layouts.values():
            for ledger in kept.ledgers.values():
                for owner in ledger.owners() - present:
                    if not is_locked(self._owners, owner) and not kept.has_io(owner):
                        log.info("owner %d is gone, its slots are free again", owner)
                        ledger.forget(owner)
            nvme = kept.ledgers.get(NVME)
            if nvme is not None and nvme.frozen:
                nvme.frozen = any(kept.has_io(owner) for owner in range(OWNERS_MAX) if owner not in present)
        greeted = any(connection.owner is not None for connection in self._connections.values())
        if greeted or any(is_locked(self._owners, owner) for owner in range(OWNERS_MAX)):
            self._lonely_since = now
        elif now - self._lonely_since >= self._linger_s:
            self._leaving = f"nobody was here for {self._linger_s:g} s"

    def _watch(self) -> None:
        cache = self._cache
        there = cache.is_there() and cache.holds_lock() and cache.is_current(OWNERS_NAME, self._owners)
        with contextlib.suppress(OSError):
            os.stat(SOCKET_NAME, dir_fd=cache.top)
            if there and all(kept.is_current(cache) for kept in self._layouts.values()):
                return
        self._leaving = "its files are gone or replaced"
        for connection in self._connections.values():
            if connection.joined:
                connection.send(Farewell(self._leaving))
        self._tell()

    def _leave(self) -> None:
        """The socket goes first, then the books to disk, then with the process the lock."""
        log.info("the keeper leaves: %s", self._leaving)
        if self._cache.is_there():
            with contextlib.suppress(OSError):
                os.unlink(SOCKET_NAME, dir_fd=self._cache.top)
        self._socket.close()
        for connection in list(self._connections.values()):
            self._end(connection)
        for kept in self._layouts.values():
            kept.close(CLOSE_S)


def _snapshot(tier: int, records: Sequence[Record]) -> Iterator[bytes]:
    """All rows in pieces, each made when it is sent."""
    for start in range(0, len(records), SNAPSHOT_ROWS):
        rows = records[start : start + SNAPSHOT_ROWS]
        yield frame(Snapshot(tier, as_rows(rows), last=False))
    yield frame(Snapshot(tier, [], last=True))
