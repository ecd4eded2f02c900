"""The 4 KiB header in front of every row of a slab, and the check of a row against its record.

Owns the format on disk: what it binds, and the sums; native/header.cpp has the same in C++, for speed. A torn, stale,
swapped, misdirected or truncated row fails `check_row`. Knows no file and no directory. Called on I/O workers (pack,
check) and by the rebuild (parse).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvtier.block import ALIGNMENT, KVLayout
from kvtier.record import GENERATION_END, Record
from kvtier.retention import is_possible
from kvtier.tiers.checksum import SUM_BYTES, slice_sums

HEADER_BYTES = ALIGNMENT
MAGIC = b"kvtirow\n"
HEADER_VERSION = 2

_FIXED = struct.Struct("<8sII32s32s16sIiQQQQQB7x")
_SELF_SUM = struct.Struct("<Q")
_SELF_SUM_OFFSET = HEADER_BYTES - _SELF_SUM.size
_WHOLE = struct.Struct(f"{_FIXED.format}{_SELF_SUM_OFFSET - _FIXED.size}s")
"""All but the sum over it: the fixed fields, the sums of the slices, zeros."""
SLICES_MAX = (_SELF_SUM_OFFSET - _FIXED.size) // SUM_BYTES
"""The most layers whose sums fit a header."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What all rows of one writer share: the namespace that its headers bind, and the lengths."""

    namespace: bytes
    row_bytes: int
    slice_bytes: int

    @classmethod
    def of(cls, layout: KVLayout, namespace: bytes) -> RowFormat:
        """The format of a model's rows."""
        return cls(namespace, layout.row_bytes, layout.slice_bytes)

    def __post_init__(self) -> None:
        assert len(self.namespace) == 32, len(self.namespace)
        assert self.slice_bytes > 0 and self.slice_bytes % ALIGNMENT == 0, self.slice_bytes
        assert self.row_bytes % self.slice_bytes == 0 and 0 < self.slice_count <= SLICES_MAX, self

    @property
    def slice_count(self) -> int:
        """Slices of a row."""
        return self.row_bytes // self.slice_bytes

    @property
    def slot_bytes(self) -> int:
        """Header and row."""
        return HEADER_BYTES + self.row_bytes

    def read_bytes(self, layers: range | None) -> int:
        """Bytes of the slices of a run of layers; None: of the row."""
        if layers is None:
            return self.row_bytes
        assert 0 <= layers.start < layers.stop <= self.slice_count and layers.step == 1, layers
        return len(layers) * self.slice_bytes


class Verdict(enum.Enum):
    """What `check_row` found."""

    GOOD = "good"
    HEADER = "header"
    """The header is no header of ours, or its own sum is wrong."""
    IDENTITY = "identity"
    """A sound header of something else: another block, slot, generation, namespace or geometry."""
    SUMS = "sums"
    """The header is right, the bytes of the row are not."""


_GOOD = Verdict.GOOD  # looked up once, see transfers.py


def pack_header(target: memoryview, record: Record, form: RowFormat) -> None:
    """Write the header of `record` into `target` (4 KiB)."""
    assert target.nbytes == HEADER_BYTES and len(record.block_hash) == 32 and len(record.tenant) == 16
    assert len(record.sums) == form.slice_count * SUM_BYTES, len(record.sums)
    _pack(target, record, form.namespace, form.row_bytes, form.slice_bytes)


def parse_header(source: memoryview) -> tuple[Record, RowFormat] | None:
    """The record and format that a header claims, or None if it is no sound header of this version."""
    if source.nbytes != HEADER_BYTES or source[: len(MAGIC)] != MAGIC:
        return None
    if _SELF_SUM.unpack_from(source, _SELF_SUM_OFFSET)[0] != xxh3_64_intdigest(source[:_SELF_SUM_OFFSET]):
        return None
    fields = _FIXED.unpack_from(source)
    _, version, slice_count, namespace, block_hash, tenant, depth, priority, slot, generation, *rest = fields
    row_bytes, slice_bytes, expiry_s, pinned = rest
    if version != HEADER_VERSION or not 0 < slice_count <= SLICES_MAX:
        return None
    if generation >= GENERATION_END or not is_possible(priority, expiry_s) or pinned > 1:
        return None
    if slice_bytes == 0 or slice_bytes % ALIGNMENT != 0 or row_bytes != slice_count * slice_bytes:
        return None
    sums = bytes(source[_FIXED.size : _FIXED.size + slice_count * SUM_BYTES])
    record = Record(block_hash, slot, generation, depth, sums, priority, expiry_s, tenant, bool(pinned))
    return record, RowFormat(namespace, row_bytes, slice_bytes)


def check_row(header: memoryview, row: memoryview, record: Record, form: RowFormat, sums: bytes = b"") -> Verdict:
    """Judge a row that was read, by its `sums` if they have been taken: only GOOD bytes may be used.

    The header has the priority, expiry and pin that the row was written with; the record's may have been raised since.
    """
    if not _is_header_of(header, record, form.namespace, form.row_bytes, form.slice_bytes):
        return Verdict.HEADER if parse_header(header) is None else Verdict.IDENTITY
    if (sums or slice_sums(row, form.slice_bytes)) != record.sums:
        return Verdict.SUMS
    return _GOOD


def check_slices(slices: memoryview, layers: range, record: Record, form: RowFormat, sums: bytes = b"") -> Verdict:
    """Judge the slices of a run of layers that were read without the row's header, as `check_row`: GOOD or SUMS."""
    wanted = record.sums[layers.start * SUM_BYTES : layers.stop * SUM_BYTES]
    return _GOOD if (sums or slice_sums(slices, form.slice_bytes)) == wanted else Verdict.SUMS


def pack_plainly(target: memoryview, record: Record, namespace: bytes, row_bytes: int, slice_bytes: int) -> None:
    """`pack_header` without the native module."""
    _WHOLE.pack_into(
        target,
        0,
        MAGIC,
        HEADER_VERSION,
        row_bytes // slice_bytes,
        namespace,
        record.block_hash,
        record.tenant,
        record.depth,
        record.priority,
        record.slot,
        record.generation,
        row_bytes,
        slice_bytes,
        record.expiry_s,
        record.pinned,
        record.sums,
    )
    _SELF_SUM.pack_into(target, _SELF_SUM_OFFSET, xxh3_64_intdigest(target[:_SELF_SUM_OFFSET]))


def is_header_of_plainly(
    source: memoryview, record: Record, namespace: bytes, row_bytes: int, slice_bytes: int
) -> bool:
    """Whether this is a sound header of that row, whatever priority, expiry and pin it names; likewise."""
    if source.nbytes != HEADER_BYTES:
        return False
    claimed = _FIXED.unpack_from(source)
    priority, expiry_s, pinned = claimed[7], *claimed[12:]
    block_hash, slot, generation, depth, sums, _, _, tenant, _ = record
    count = row_bytes // slice_bytes
    identity = (MAGIC, HEADER_VERSION, count, namespace, block_hash, tenant, depth)
    return (
        claimed == (*identity, priority, slot, generation, row_bytes, slice_bytes, expiry_s, pinned)
        and bytes(source[_FIXED.size : _FIXED.size + count * SUM_BYTES]) == sums  # a view is compared byte by byte
        and generation < GENERATION_END
        and is_possible(priority, expiry_s)
        and pinned <= 1
        and _SELF_SUM.unpack_from(source, _SELF_SUM_OFFSET)[0] == xxh3_64_intdigest(source[:_SELF_SUM_OFFSET])
    )


Pack = Callable[[memoryview, Record, bytes, int, int], None]
IsHeaderOf = Callable[[memoryview, Record, bytes, int, int], bool]


def _fastest() -> tuple[Pack, IsHeaderOf]:
    try:
        from kvtier._native import is_header_of, pack_header
    except ImportError:
        return pack_plainly, is_header_of_plainly
    return pack_header, is_header_of


_pack, _is_header_of = _fastest()
