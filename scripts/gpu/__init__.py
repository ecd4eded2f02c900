"""Parts of scripts/check_gpu: the device (machine), results (correctness), speeds (speed), whole engines (engines)."""
