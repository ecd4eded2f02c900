"""The decoder's small operations on a GPU: torch's, where they need no other shape than on the CPU.

Knows nothing of sequences or rows. Called by the decoder, engine thread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvtier.models.ops import TorchOps


class DeviceOps(TorchOps):
    """`Ops` on tensors of a GPU.

    Linear layers in fp32 keep their fixed number of rows. What torch sums over a row on a GPU may depend on how many
    rows there are, so a row's bits may, too, which is not so on the CPU.
    """

    name = "device"

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops`: one launch, where the CPU takes a stretch at a time to keep bits."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)
