"""The outputs of a model, and how an event becomes them.

Owns names and meanings of outputs. Knows no tensors: values are text, whole numbers, or a list of token ids. Used by
the thread that sends a request's responses.
"""

from __future__ import annotations

from kvtier.door.inputs import Tensor
from kvtier.door.parse import DoorRequest
from kvtier.request import TokenEvent

ORIGIN_OUTPUTS = {origin: f"prompt_tokens_{origin}" for origin in ("hbm", "dram", "nvme", "computed")}
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
"""All outputs and their types on the wire."""


def response_fields(door: DoorRequest, event: TokenEvent) -> dict[str, object]:
    """Outputs of the response that tells of `event`, which has no error and, unless streamed, is the whole answer.

    Every response has `text_output` and `output_ids`, and `num_output_tokens` if asked for (of this response alone, as
    vllm_backend counts). The last one alone has `finish_reason` and `num_input_tokens` if asked for, and where the
    prompt's blocks and tokens came from. `kv_cache_alloc_total_blocks` is the sum of reused and new ones.
    """
    assert event.error is None, event
    fields: dict[str, object] = {"text_output": door.echo + event.text, "output_ids": list(event.token_ids)}
    if door.return_num_output_tokens:
        fields["num_output_tokens"] = len(event.token_ids)
    if event.finish_reason is None:
        return fields
    if door.return_finish_reason:
        fields["finish_reason"] = event.finish_reason.value
    usage = event.usage
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
