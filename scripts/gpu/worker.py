"""Runs steps of check_gpu one after the other and says what they find; the first that fails is the last."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

from gpu.found import Mark, Message, to_text
from gpu.steps import STEPS, Scene


def work(arguments: Sequence[str]) -> int:
    """`arguments`: folder, context, 1 for a rehearsal, steps. Returns the exit status: 1 if a step has failed."""
    folder, context, rehearse, *names = arguments
    if rehearse == "1":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    scene = Scene.make(Path(folder), int(context), rehearse == "1")
    for name in names:
        _say(Mark("begin", name))
        try:
            with torch.inference_mode():
                for found in STEPS[name](scene):
                    _say(found)
        except Exception as error:  # whatever it is, it is the step's
            traceback.print_exc()
            _say(Mark("failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"))
            return 1
        _say(Mark("end", name))
    return 0


def _say(message: Message) -> None:
    print(to_text(message), flush=True)
