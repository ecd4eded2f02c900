"""The first page of an NVMe slab file: which slab it is, and into how many slots of how many bytes it is cut.

Owns its version, its layout and its sum. Knows nothing of the slots behind it. Called by slab.py.
"""

from __future__ import annotations

import logging
import os
import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvtier.block import ALIGNMENT
from kvtier.byte_text import bytes_text
from kvtier.io.base import SystemCalls, uninterrupted, write_all

log = logging.getLogger(__name__)

SUPERBLOCK_BYTES = ALIGNMENT
SLAB_MAGIC = b"kvtislab"
SLAB_VERSION = 1

_SUPERBLOCK = struct.Struct("<8sI4x16sQQ")


@dataclass(frozen=True, slots=True)
class SlabShape:
    """What a superblock says."""

    epoch: bytes
    slot_bytes: int
    slot_count: int


def read_superblock(descriptor: int, slot_bytes: int) -> tuple[bytes | None, int]:
    """(epoch, slots) of a slab of this geometry and version; (None, 0) if it is none, with a log line if it was one."""
    page = os.pread(descriptor, SUPERBLOCK_BYTES, 0)
    if not page.strip(b"\0"):
        return None, 0
    found = parse_superblock(page)
    if found is not None:
        version, shape = found
        if version == SLAB_VERSION and shape.slot_bytes == slot_bytes:
            return shape.epoch, shape.slot_count
        log.warning("NVMe slab of version %d with slots of %s is made anew", version, bytes_text(shape.slot_bytes))
    else:
        log.warning("NVMe slab with a damaged superblock is made anew")
    return None, 0


def parse_superblock(page: bytes) -> tuple[int, SlabShape] | None:
    """(version, shape), not bounded; None if it is no sound superblock."""
    body, sum_ = page[: _SUPERBLOCK.size], page[_SUPERBLOCK.size : _SUPERBLOCK.size + 8]
    if len(sum_) != 8 or int.from_bytes(sum_, "little") != xxh3_64_intdigest(body):
        return None
    magic, version, epoch, slot_bytes, slot_count = _SUPERBLOCK.unpack(body)
    return (version, SlabShape(epoch, slot_bytes, slot_count)) if magic == SLAB_MAGIC else None


def write_superblock(descriptor: int, shape: SlabShape, calls: SystemCalls) -> None:
    """Put it at the start of the file, on the disk when this returns. OSError as it comes."""
    body = _SUPERBLOCK.pack(SLAB_MAGIC, SLAB_VERSION, shape.epoch, shape.slot_bytes, shape.slot_count)
    page = (body + xxh3_64_intdigest(body).to_bytes(8, "little")).ljust(SUPERBLOCK_BYTES, b"\0")
    write_all(calls, descriptor, memoryview(page), 0)
    uninterrupted(calls.fdatasync, descriptor)
