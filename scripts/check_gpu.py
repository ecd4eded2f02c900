"""Checks kernels and engines on a GPU against the CPU, then measures decode from HBM, DRAM and NVMe beside limits.

Each speed stands beside its limit of the same run: a copy within HBM, a pinned copy over PCIe, reads of the disk alone.
What a step finds is said as it comes; one that fails or hangs costs itself alone, and at --minutes all of them end, so
the tables always come. Where there is no GPU it says "skipped: no GPU", and why, and ends with status 0; one that torch
cannot use is an error. --rehearse runs all of it, tiny, on the CPU through the kernels' interpreter: that shows that
this script works and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu.found import table
from gpu.oversight import Oversight
from gpu.steps import STEPS

from kvtier.serving.locate import GPU_DEVICES

MINUTES = 7.5
STEP_S = 150.0
"""No step is worth more of that."""
WORKER = "--worker"


def main() -> int:
    """Command line. Status 1 if a result differs from the reference's or a step came to nothing; speeds never fail."""
    if sys.argv[1:2] == [WORKER]:  # one of the processes that steps run in
        from gpu.worker import work

        return work(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="scripts/check_gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--folder", type=Path, help="where the file for NVMe reads is made (default: here)")
    parser.add_argument("--context", type=int, default=32768, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all steps (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=list(STEPS), help="this step; repeatable", metavar="STEP")
    parser.add_argument("--steps", action="store_true", help="name the steps")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args()
    if options.steps:
        print(*STEPS, sep="\n")
        return 0
    if not options.rehearse and (reason := why_no_gpu()):
        there = any(device.exists() for device in GPU_DEVICES)
        print(f"there is a GPU, and it cannot be used: {reason}" if there else f"skipped: no GPU: {reason}")
        return int(there)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:

        def command(steps: Sequence[str]) -> list[str]:
            settings = [folder, str(options.context), str(int(options.rehearse))]
            return [sys.executable, __file__, WORKER, *settings, *steps]

        found = Oversight(command, options.minutes * 60, STEP_S, lambda text: print(text, flush=True))
        found.run(options.only or list(STEPS))
    wrong = [line for line in found.lines if not line.right]
    seconds = time.monotonic() - began
    print(f"\n{len(found.lines) - len(wrong)} of {len(found.lines)} right, {seconds:.0f} s")
    print(*wrong, *table(found.speeds), sep="\n")
    if options.json:
        record = {"rehearsal": options.rehearse, "seconds": seconds}
        record["checks"] = [line._asdict() for line in found.lines]
        record["speeds"] = [speed._asdict() for speed in found.speeds]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2))
    return 1 if wrong else 0


def why_no_gpu() -> str:
    """What this Python lacks to use one; empty if there is one."""
    import torch

    from kvtier.device import make_device
    from kvtier.errors import ConfigError

    try:
        make_device("cuda")
    except ConfigError as error:
        return str(error).partition(": ")[2].partition(";")[0].replace('"cuda" ', "it ")
    return "" if torch.cuda.device_count() else "torch counts none"


if __name__ == "__main__":
    sys.exit(main())
