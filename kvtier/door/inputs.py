"""The inputs a model's config.pbtxt declares: names, types and shapes. Values only; a test holds config.pbtxt to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tensor:
    """Type and last dimension of a tensor on the wire, as config.pbtxt writes them; -1 is any length."""

    data_type: str
    dims: int = 1


INPUTS = {
    "text_input": Tensor("TYPE_STRING"),
    "input_ids": Tensor("TYPE_INT32", -1),
    "chat": Tensor("TYPE_STRING"),
    "stream": Tensor("TYPE_BOOL"),
    "max_tokens": Tensor("TYPE_INT32"),
    "sampling_parameters": Tensor("TYPE_STRING"),
    "stop": Tensor("TYPE_STRING", -1),
    # what becomes of the blocks of the request, see `Request`
    "cache_salt": Tensor("TYPE_STRING"),
    "cache_tenant": Tensor("TYPE_STRING"),
    "cache_priority": Tensor("TYPE_INT32"),
    "cache_ttl_s": Tensor("TYPE_INT32"),
    "cache_pin": Tensor("TYPE_BOOL"),
    "cache_read": Tensor("TYPE_BOOL"),
    "cache_write": Tensor("TYPE_BOOL"),
    "exclude_input_in_output": Tensor("TYPE_BOOL"),
    "return_finish_reason": Tensor("TYPE_BOOL"),
    "return_num_input_tokens": Tensor("TYPE_BOOL"),
    "return_num_output_tokens": Tensor("TYPE_BOOL"),
    "return_kv_cache_reuse_stats": Tensor("TYPE_BOOL"),
    # what clients of NVIDIA's vllm_backend and tensorrtllm_backend may send as tensors besides
    "return_cumulative_logprob": Tensor("TYPE_BOOL"),
    "return_logprobs": Tensor("TYPE_BOOL"),
    "return_log_probs": Tensor("TYPE_BOOL"),
    "temperature": Tensor("TYPE_FP32"),
    "top_k": Tensor("TYPE_INT32"),
    "top_p": Tensor("TYPE_FP32"),
    "min_length": Tensor("TYPE_INT32"),
    "repetition_penalty": Tensor("TYPE_FP32"),
    "presence_penalty": Tensor("TYPE_FP32"),
    "frequency_penalty": Tensor("TYPE_FP32"),
    "length_penalty": Tensor("TYPE_FP32"),
    "random_seed": Tensor("TYPE_UINT64"),
    "stop_words": Tensor("TYPE_STRING", -1),
    "bad_words": Tensor("TYPE_STRING", -1),
    "end_id": Tensor("TYPE_INT32"),
    "pad_id": Tensor("TYPE_INT32"),
    "beam_width": Tensor("TYPE_INT32"),
}
"""All inputs; all are optional for the Triton server, which cannot say "one of two"."""
