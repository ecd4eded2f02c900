"""What a disk can do to a slot behind everybody's back, byte by byte. Used by corruption.py and the fault tests.

`SlabFile` is raw access to the slots of a slab, open or closed. A damage takes a slot's bytes, those of another slot
and what lay there before, and returns what lies there now.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.cache_directory import layout_name
from kvtier.tiers.slab import SLAB_NAME
from kvtier.tiers.superblock import SUPERBLOCK_BYTES
from tests.rows import LAYOUT, SLOT_BYTES

PAGE = 4096
SECTOR = 512


class SlabFile:
    """The slab of a cache directory as bytes."""

    def __init__(self, cache: Path) -> None:
        self.path = cache / layout_name(LAYOUT) / SLAB_NAME

    def slot(self, slot: int) -> bytes:
        """Header and row."""
        with open(self.path, "rb") as file:
            file.seek(SUPERBLOCK_BYTES + slot * SLOT_BYTES)
            return file.read(SLOT_BYTES)

    def put(self, slot: int, data: bytes, offset: int = 0) -> None:
        """Overwrite a slot, or a part of it."""
        with open(self.path, "r+b") as file:
            file.seek(SUPERBLOCK_BYTES + slot * SLOT_BYTES + offset)
            file.write(data)


@dataclass(frozen=True, slots=True)
class Scene:
    """What a damage has to work with."""

    mine: bytes
    other: bytes
    before: bytes
    """What lay in this slot at some time before."""
    chance: random.Random


Damage = Callable[[Scene], bytes]


def flip_bit(scene: Scene) -> bytes:
    """One bit of header, row or padding."""
    place = scene.chance.randrange(SLOT_BYTES)
    flipped = bytearray(scene.mine)
    flipped[place] ^= 1 << scene.chance.randrange(8)
    return bytes(flipped)


def tear(scene: Scene) -> bytes:
    """A write that stopped between two sectors: its first part is there, the rest is another row's."""
    place = SECTOR * scene.chance.randrange(1, SLOT_BYTES // SECTOR)
    parts = [scene.mine[:place], scene.other[place:]]
    if scene.chance.random() < 0.3:
        parts = [scene.other[:place], scene.mine[place:]]
    return b"".join(parts)


def zero(scene: Scene) -> bytes:
    """A sector, a slice or all of it reads as zeros."""
    length = scene.chance.choice([SECTOR, PAGE, SLOT_BYTES])
    place = length * scene.chance.randrange(SLOT_BYTES // length)
    return scene.mine[:place] + bytes(length) + scene.mine[place + length :]


def swap_slices(scene: Scene) -> bytes:
    """Two slices have changed places."""
    one, two = scene.chance.sample(range(1, SLOT_BYTES // PAGE), 2)
    pages = [scene.mine[start : start + PAGE] for start in range(0, SLOT_BYTES, PAGE)]
    pages[one], pages[two] = pages[two], pages[one]
    return b"".join(pages)


def take_slice(scene: Scene) -> bytes:
    """A slice, or the header, of another row was written here."""
    page = PAGE * scene.chance.randrange(SLOT_BYTES // PAGE)
    return scene.mine[:page] + scene.other[page : page + PAGE] + scene.mine[page + PAGE :]


def take_row(scene: Scene) -> bytes:
    """Another row, header and all, was written here."""
    return scene.other


def stale_row(scene: Scene) -> bytes:
    """A whole row of before: the write of the new one never came."""
    return scene.before


def stale_slice(scene: Scene) -> bytes:
    """One slice, or the header, of before."""
    page = PAGE * scene.chance.randrange(SLOT_BYTES // PAGE)
    return scene.mine[:page] + scene.before[page : page + PAGE] + scene.mine[page + PAGE :]


def either(*damages: Damage) -> Damage:
    """One of several."""
    return lambda scene: scene.chance.choice(damages)(scene)


DAMAGES: dict[str, Damage] = {
    "flipped": flip_bit,
    "torn": tear,
    "zeroed": zero,
    "swapped": either(swap_slices, take_row),
    "stale": either(stale_row, stale_slice),
    "misdirected": either(take_slice, take_row),
}
"""Kinds of damage to one slot. A swap of two rows is `take_row` at either; truncation is one to the file."""


def damaged(damage: Damage, scene: Scene) -> bytes:
    """The slot after `damage`, which is drawn again until it has changed anything."""
    for _ in range(100):
        data = damage(scene)
        if data != scene.mine:
            assert len(data) == SLOT_BYTES
            return data
    raise AssertionError("this damage changes nothing")


def region(place: int) -> str:
    """Where in a slot a byte lies, in words."""
    if place < PAGE:
        return "header"
    layer, offset = divmod(place - PAGE, PAGE)
    return f"slice {layer}" if offset < PAGE // 2 else f"padding of slice {layer}"
