"""Checks kernels and engines on a GPU against the CPU, then measures decode from HBM, DRAM and NVMe beside limits.

Each speed stands beside its limit of the same run: a copy within HBM, a pinned copy over PCIe, reads of the disk alone.
Under 8 minutes on one GPU. Where there is no GPU it says "skipped: no GPU" and ends with status 0; --rehearse then runs
all of it, tiny, on the CPU through the kernels' interpreter, which shows that this script works and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SKIPPED = "skipped: no GPU"


def main() -> int:
    """Command line. Status 1 if a result differs from the reference's; speeds never fail."""
    parser = argparse.ArgumentParser(prog="scripts/check_gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--folder", type=Path, help="where the file for NVMe reads is made (default: here)")
    parser.add_argument("--context", type=int, default=32768, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not (options.rehearse or torch.cuda.is_available()):
        print(SKIPPED)
        return 0
    from gpu.correctness import check
    from gpu.engines import check_engines, measure_engines
    from gpu.machine import Machine
    from gpu.prefill import measure_prefill
    from gpu.speed import Geometry, measure

    began = time.monotonic()
    machine = Machine.rehearsal() if options.rehearse else Machine.cuda()
    geometry = Geometry.tiny() if options.rehearse else Geometry.llama(options.context)
    with torch.inference_mode():
        lines = check(machine, few=options.rehearse)
        with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
            lines += check_engines(machine, Path(folder), options.rehearse)
            speeds = measure(machine, geometry, Path(folder))
            limits = dict(zip(("HBM", "DRAM", "NVMe"), (speeds[0].gb_s, speeds[1].gb_s, speeds[3].gb_s), strict=True))
            speeds += measure_prefill(machine, geometry, speeds[1].gb_s)
            speeds += measure_engines(machine, Path(folder), options.rehearse, limits)
    wrong = [line.name for line in lines if not line.right]
    for line in lines:
        print(f"{'ok   ' if line.right else 'WRONG'} {line.name}: {line.says}")
    print(f"\n{machine.name}; {geometry.says}")
    print(f"{'what':<86} {'GB/s':>8} {'limit':>8} {'share':>6}  of")
    for speed in speeds:
        share = f"{speed.gb_s / speed.limit_gb_s:>6.2f}" if speed.limit_gb_s else " " * 6
        limit = f"{speed.limit_gb_s:>8.1f}" if speed.limit_gb_s else " " * 8
        print(f"{speed.what:<86} {speed.gb_s:>8.1f} {limit} {share}  {speed.limit}")
    print(f"{len(lines) - len(wrong)} of {len(lines)} right, {time.monotonic() - began:.0f} s")
    if options.json:
        record = {"machine": machine.name, "rehearsal": options.rehearse, "geometry": geometry.says}
        record["checks"] = [line._asdict() for line in lines]
        record["speeds"] = [speed._asdict() for speed in speeds]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
