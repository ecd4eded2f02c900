"""Sealing: full blocks of a sequence get their hash and are found by others, and what a request asks for them is noted.

Decides what is indexed, under which retention, and whether it is written through. Knows no queue and no budget. Called
by the scheduler and the streams after passes, and when blocks were found.
"""

from __future__ import annotations

from kvtier.retention import Retention
from kvtier.sequence import Sequence
from kvtier.store import Store


class Sealer:
    """See the module."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._block_tokens = store.layout.block_tokens

    def seal(self, sequence: Sequence, now: float, handed_count: int = 0) -> None:
        """Index every block that has become full, unless the sequence writes nothing.

        Its content may lie in another slot already: it is used from there, unless the sequence reads nothing. The first
        `handed_count` blocks are not written through.
        """
        begin, end = sequence.sealed_count, sequence.computed_count // self._block_tokens
        if begin == end or not (sequence.cache_write or sequence.streamed):
            return
        if sequence.cache_write:
            sequence.chain.extend(sequence.hashes, sequence.tokens)
            for index in range(begin, end):
                self._index(sequence, index, now, handed=index < handed_count)
            self.retain(sequence, begin, end)
        sequence.sealed_count = end

    def retention(self, sequence: Sequence, index: int) -> Retention:
        """What a sequence asks for one of its blocks: only those of the prompt are pinned."""
        in_prompt = (index + 1) * self._block_tokens <= sequence.prompt_count
        return sequence.retention if in_prompt else sequence.retention._replace(pinned=False)

    def retain(self, sequence: Sequence, begin: int, end: int) -> None:
        """Raise what is asked for its blocks `begin .. end`, which may be there already, here and on the shelves."""
        if not sequence.retention.asks:
            return
        prompt_end = max(begin, min(end, sequence.prompt_count // self._block_tokens))
        for first, last in ((begin, prompt_end), (prompt_end, end)):
            if first < last:
                self._store.retain(sequence.hashes[first:last], self.retention(sequence, first))

    def _index(self, sequence: Sequence, index: int, now: float, handed: bool) -> None:
        slot, block_hash = sequence.table.slots[index], sequence.hashes[index]
        assert slot is not None
        if not sequence.cache_read and self._store.is_resident(block_hash):
            return
        index_it = self._store.index if handed else self._store.seal
        kept = index_it(slot, block_hash, index, now, self.retention(sequence, index))
        if kept != slot:
            sequence.table.replace(index, kept, self._store.address(kept))
