"""The door: what crosses the wire, as plain functions of plain values, and the watch for clients that go.

Owns names, types and meanings of inputs and outputs, and every check on them that needs no model. Does not know the
Triton server: model.py hands tensors to `parse_request` and makes tensors of what `response_fields` gives.
"""

from kvtier.door.cancel_watch import CancelWatch
from kvtier.door.inputs import INPUTS, Tensor
from kvtier.door.outputs import ORIGIN_OUTPUTS, OUTPUTS, response_fields
from kvtier.door.parse import DoorLimits, DoorRequest, parse_request
from kvtier.door.sampling import SAMPLING_KEYS

__all__ = [
    "INPUTS",
    "ORIGIN_OUTPUTS",
    "OUTPUTS",
    "SAMPLING_KEYS",
    "CancelWatch",
    "DoorLimits",
    "DoorRequest",
    "Tensor",
    "parse_request",
    "response_fields",
]
