"""The door: what crosses the wire, as plain functions of plain values.

Owns names, types and meanings of inputs and outputs, and every check on them that needs no model. Knows neither the
Triton server nor numpy: model.py turns tensors into Python values, calls `parse_request`, and sends what `Reply` makes.
"""

from kvtier.door.inputs import INPUTS, Tensor
from kvtier.door.parse import DoorLimits, DoorRequest, parse_request
from kvtier.door.reply import ORIGIN_OUTPUTS, OUTPUTS, Reply, response_fields
from kvtier.door.sampling import SAMPLING_KEYS

__all__ = [
    "INPUTS",
    "ORIGIN_OUTPUTS",
    "OUTPUTS",
    "SAMPLING_KEYS",
    "DoorLimits",
    "DoorRequest",
    "Reply",
    "Tensor",
    "parse_request",
    "response_fields",
]
