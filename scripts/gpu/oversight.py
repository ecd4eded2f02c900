"""Has the steps of check_gpu run by other processes, and gathers what they find, within a time that they all have.

A step that raises, hangs or ends its process costs itself alone: the next ones run in a new process, since what CUDA
has refused once it may refuse for good. Knows neither device nor steps.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from gpu.found import Line, Mark, Message, Speed, of_text

LEAVE_S = 10.0
"""What a worker may take to end after its last step."""


class Oversight:
    """See the module. `lines` and `speeds` are what was found so far, in order."""

    def __init__(
        self,
        command: Callable[[Sequence[str]], list[str]],
        limit_s: float,
        step_limit_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`command(steps)` starts a worker that says `to_text` of what it finds, and of each step that it begins and
        ends. `say` is given a line for each check and speed as it comes.
        """
        self._command = command
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s
        self._step_limit_s = step_limit_s
        self._say = say
        self.lines: list[Line] = []
        self.speeds: list[Speed] = []

    def run(self, steps: Sequence[str]) -> None:
        """Run each step, or say why it was not."""
        waiting = list(steps)
        while waiting and time.monotonic() < self._end:
            waiting = self._run_worker(waiting)
        for step in waiting:
            self._take(Line(step, False, f"not run: {self._limit_s:.0f} s were over"))

    def _run_worker(self, steps: list[str]) -> list[str]:
        """Have one process run the steps as far as it comes; returns those that are left for another."""
        worker = subprocess.Popen(self._command(steps), stdout=subprocess.PIPE, text=True, start_new_session=True)
        texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        listener = threading.Thread(target=_listen, args=(worker, texts), daemon=True)
        listener.start()
        try:
            waiting, step, why = self._hear(worker, texts, list(steps))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            listener.join(LEAVE_S)
        if not waiting:
            return []
        if step is None and len(waiting) == len(steps):  # another would not come any further
            for each in waiting:
                self._take(Line(each, False, why))
            return []
        if step is not None:
            self._take(Line(step, False, why))
            waiting.remove(step)
        return waiting

    def _hear(
        self, worker: subprocess.Popen[str], texts: queue.SimpleQueue[str | None], waiting: list[str]
    ) -> tuple[list[str], str | None, str]:
        """The steps that have not ended, the one under way, and why it goes no further."""
        step, began = None, time.monotonic()
        while True:
            end = min(began + self._step_limit_s, self._end)
            try:
                text = texts.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return waiting, step, f"still at it after {time.monotonic() - began:.0f} s"
            if text is None:
                return waiting, step, f"its process ended with status {worker.wait(LEAVE_S)}"
            message = of_text(text)
            if not isinstance(message, Mark):
                self._take(message if message is not None else text)
            elif message.kind == "failed":
                return waiting, step, message.says
            elif message.kind == "begin":
                step, began = message.says, time.monotonic()
            else:
                waiting.remove(message.says)
                step, began = None, time.monotonic()
                if not waiting:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        worker.wait(LEAVE_S)
                    return [], None, ""

    def _take(self, message: Message | str) -> None:
        if isinstance(message, Line):
            self.lines.append(message)
            self._say(str(message))
        elif isinstance(message, Speed):
            self.speeds.append(message)
            self._say(f"      {message.what}: {message.gb_s:.1f} GB/s")
        else:
            print(message, end="", file=sys.stderr)


def _listen(worker: subprocess.Popen[str], texts: queue.SimpleQueue[str | None]) -> None:
    assert worker.stdout is not None
    with worker.stdout:
        for text in worker.stdout:
            texts.put(text)
    texts.put(None)
