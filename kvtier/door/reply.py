"""Events of a request into the outputs of its responses.

Owns names and meanings of outputs. Knows no tensors: values are text, whole numbers, or a list of token ids. Used by
the thread that sends a request's responses.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.door.inputs import Tensor
from kvtier.door.parse import DoorRequest
from kvtier.request import TokenEvent

ORIGIN_OUTPUTS = {origin: f"kv_cache_{origin}_tokens" for origin in ("hbm", "dram", "nvme", "computed")}
"""Where the prompt's tokens came from: key of `Origin.as_dict` -> output."""

OUTPUTS = {
    "text_output": Tensor("TYPE_STRING", -1),
    "output_ids": Tensor("TYPE_INT32", -1),
    "finish_reason": Tensor("TYPE_STRING", -1),
    "num_input_tokens": Tensor("TYPE_INT32", -1),
    "num_output_tokens": Tensor("TYPE_INT32", -1),
    "kv_cache_reused_blocks": Tensor("TYPE_INT32", -1),
    "kv_cache_alloc_new_blocks": Tensor("TYPE_INT32", -1),
    "kv_cache_alloc_total_blocks": Tensor("TYPE_INT32", -1),
    **{name: Tensor("TYPE_INT32", -1) for name in ORIGIN_OUTPUTS.values()},
}
"""All outputs. The last response has all that were asked for, one before it `text_output`, `output_ids`, and
`num_output_tokens` (of this response alone, as vllm_backend counts) if asked for."""


class Reply:
    """Makes the responses of one request: one for each call with news if it streams, else one when it has ended."""

    def __init__(self, door: DoorRequest) -> None:
        self._door = door
        self._started = False
        self._waiting: list[TokenEvent] = []

    def add(self, events: Sequence[TokenEvent]) -> dict[str, object] | None:
        """Take a request's next events, without errors; return the outputs of the response to send now, if any."""
        self._waiting += events
        if not self._waiting or not (self._door.stream or self._waiting[-1].finish_reason is not None):
            return None
        fields = response_fields(self._door, self._waiting, first=not self._started)
        self._started, self._waiting = True, []
        return fields


def response_fields(door: DoorRequest, events: Sequence[TokenEvent], first: bool) -> dict[str, object]:
    """Outputs of the response that tells of `events` (at least one, in order, without errors). Pure.

    `kv_cache_alloc_total_blocks` is the sum of reused and new ones.
    """
    assert events and all(event.error is None for event in events), events
    token_ids = [token for event in events for token in event.token_ids]
    text = "".join(event.text for event in events)
    fields: dict[str, object] = {"text_output": door.echo + text if first else text, "output_ids": token_ids}
    if door.return_num_output_tokens:
        fields["num_output_tokens"] = len(token_ids)
    last = events[-1]
    if last.finish_reason is None:
        return fields
    if door.return_finish_reason:
        fields["finish_reason"] = last.finish_reason.value
    usage = last.usage
    if usage is None:
        return fields
    if door.return_num_input_tokens:
        fields["num_input_tokens"] = usage.prompt_token_count
    if door.return_kv_cache_reuse_stats:
        fields["kv_cache_reused_blocks"] = usage.reused_blocks
        fields["kv_cache_alloc_new_blocks"] = usage.allocated_blocks
        fields["kv_cache_alloc_total_blocks"] = usage.reused_blocks + usage.allocated_blocks
        fields.update({ORIGIN_OUTPUTS[origin]: count for origin, count in usage.origin.as_dict().items()})
    return fields
