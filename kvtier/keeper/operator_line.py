"""The line from an operator's process to a keeper that is there: questions out, answers in, each with a deadline.

Never starts a keeper and never joins as an engine. What is wrong with a keeper (gone, hung, of another version, of
another user) is a ShelfError that says what to do. Used by desk.py, and by warming.py to speak as an engine does.
"""

from __future__ import annotations

import array
import socket
import time
from typing import Generic

import msgspec
from msgspec import Struct

from kvtier.errors import ShelfError
from kvtier.keeper.connection import CREDENTIALS, close_all
from kvtier.keeper.frames import Frames, Item, WireError, frame
from kvtier.keeper.operator_wire import ANSWER_DECODER, Admitted, Answer, Leave, Missing, Question
from kvtier.keeper.spawn import knock
from kvtier.keeper.wire import PROTOCOL_VERSION, Operate, Refused, Stop

ANSWER_S = 10.0
READ_BYTES = 1 << 20
DESCRIPTORS_BYTES = 4 * 4


class KeeperTrouble(ShelfError):
    """There is a keeper, but not one that this command can work with."""


class LineLost(KeeperTrouble):
    """The keeper has hung up."""


class Line(Generic[Item]):
    """A socket on which one side speaks and waits for what comes, descriptors included."""

    def __init__(self, link: socket.socket, decoder: msgspec.msgpack.Decoder[Item], answer_s: float = ANSWER_S) -> None:
        self._link = link
        self._answer_s = answer_s
        self._frames: Frames[Item] = Frames(decoder)
        self._heard: list[Item] = []
        self.pid = int(CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[0])
        self.descriptors: list[int] = []
        """What came with messages; whoever takes one out closes it."""

    def say(self, message: Struct) -> None:
        """Send a message whole. LineLost, or ShelfError: the keeper does not read."""
        self._link.settimeout(self._answer_s)
        try:
            self._link.sendall(frame(message))
        except TimeoutError:
            raise self._silence() from None
        except OSError as error:
            raise LineLost(f"the keeper (process {self.pid}) has hung up: {error.strerror}") from None

    def hear(self) -> Item:
        """The next message. LineLost, or ShelfError: nothing came in time, or nothing that makes sense."""
        end = time.monotonic() + self._answer_s
        while not self._heard:
            self._link.settimeout(max(0.001, end - time.monotonic()))
            try:
                data, extra, _, _ = self._link.recvmsg(
                    READ_BYTES, socket.CMSG_SPACE(DESCRIPTORS_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError:
                raise self._silence() from None
            except OSError as error:
                raise LineLost(f"the keeper (process {self.pid}) has hung up: {error.strerror}") from None
            for level, kind, payload in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self.descriptors += array.array("i", payload[: len(payload) - len(payload) % 4])
            if not data:
                raise LineLost(f"the keeper (process {self.pid}) has hung up: it has left; run this again")
            try:
                self._heard += self._frames.feed(data)
            except WireError as error:
                raise KeeperTrouble(
                    f"the keeper (process {self.pid}) says what this version cannot read: {error}"
                ) from None
        return self._heard.pop(0)

    def close(self) -> None:
        """Hang up; what was lent and not taken goes with it."""
        close_all(self.descriptors)
        self.descriptors = []
        self._link.close()

    def _silence(self) -> KeeperTrouble:
        return KeeperTrouble(
            f"the keeper (process {self.pid}) does not answer within {self._answer_s:g} s: it is stopped or "
            f"overloaded; try again, or `kill -CONT {self.pid}`"
        )


class OperatorLine:
    """A line that the keeper has admitted."""

    def __init__(self, line: Line[Answer]) -> None:
        """Greet, and take the line over. ShelfError: the keeper is none for this operator."""
        self._line = line
        self.pid = line.pid
        try:
            line.say(Operate(PROTOCOL_VERSION))
            answer = line.hear()
        except LineLost:
            line.close()
            raise LineLost(
                f"the keeper (process {line.pid}) hung up on this command: it is leaving, or of another version; try "
                "again, or use the kvtier of the engines that started it"
            ) from None
        except ShelfError:
            line.close()
            raise
        if not isinstance(answer, Admitted):
            line.close()
            reason = answer.reason if isinstance(answer, Refused) else "it answers something else"
            raise KeeperTrouble(f"the keeper (process {line.pid}) refuses: {reason}")

    def ask(self, question: Question) -> Answer:
        """Ask, and wait for the answer. ShelfError, also for what is not there."""
        self._line.say(question)
        answer = self._line.hear()
        if isinstance(answer, Missing):
            raise ShelfError(answer.reason)
        return answer

    def take_descriptor(self) -> int:
        """What the last answer came with; the caller's to close."""
        if not self._line.descriptors:
            raise ShelfError("the keeper has sent no descriptor")
        return self._line.descriptors.pop(0)

    def leave(self) -> None:
        """Make the keeper leave now; over when it has hung up."""
        self._line.say(Leave())
        try:
            self._line.hear()
        except LineLost:
            return
        raise ShelfError("the keeper does not leave")

    def close(self) -> None:
        """Hang up."""
        self._line.close()


def call_keeper(top: int, answer_s: float = ANSWER_S) -> OperatorLine | None:
    """A line to the keeper of a cache directory (a descriptor); None if there is none."""
    link = knock(top)
    return OperatorLine(Line(link, ANSWER_DECODER, answer_s)) if link is not None else None


def ask_to_stop(top: int) -> None:
    """Tell the keeper to leave once no engine is there, whatever version it is of."""
    link = knock(top)
    if link is not None:
        line = Line(link, ANSWER_DECODER)
        try:
            line.say(Stop(PROTOCOL_VERSION))
        finally:
            line.close()
