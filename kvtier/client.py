"""A small gRPC client of a served model: one stream a request, so that closing the iterator cancels it.

Used by `kvtier smoke`, the quickstart and the server tests; not by the engine. Needs the optional `tritonclient`, which
is imported when a `Client` is made.
"""

from __future__ import annotations

import contextlib
import queue
import re
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from kvtier.door import INPUTS
from kvtier.door.values import unknown
from kvtier.errors import KvtierError

_NUMPY_TYPES: dict[str, type] = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "BYTES": (str, bytes),
    "BOOL": (bool,),
    "INT32": (int,),
    "UINT64": (int,),
    "FP32": (float, int),
}
_STATUS = re.compile(r"(INVALID_ARGUMENT|UNAVAILABLE|INTERNAL): ")
"""What model.py begins the text of an error with."""


class ServerError(KvtierError):
    """The server answered with an error; `status` is the gRPC status name, such as `INVALID_ARGUMENT`.

    `UNKNOWN` for what the server itself refused: an error in a stream carries no status but the one model.py writes
    into its text.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Response:
    """One response: every output the server sent, by name, as Python values; a list of one stands bare."""

    outputs: dict[str, Any]

    @property
    def text(self) -> str:
        """`text_output`, empty if there is none."""
        return str(self.outputs.get("text_output", ""))


class Client:
    """A connection to one model. `infer` may be called from several threads."""

    def __init__(self, url: str, model: str, timeout_s: float = 60.0) -> None:
        """Connect to `url` (HOST:PORT of gRPC) and read the model's shapes. Raises ServerError."""
        import tritonclient.grpc as grpc

        self._grpc = grpc
        self._url = url
        self._model = model
        self._client = grpc.InferenceServerClient(url)
        try:
            config = self._client.get_model_config(model, client_timeout=timeout_s).config
        except grpc.InferenceServerException as error:
            self._client.close()
            raise self._explained(error, "the configuration", timeout_s) from None
        self._batched = config.max_batch_size > 0

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def infer(
        self,
        inputs: dict[str, object],
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        parameters: dict[str, str | int | bool] | None = None,
    ) -> Generator[Response, None, None]:
        """Send one request and yield its responses until the last; closing the iterator cancels the request.

        Names are those of `kvtier.door.INPUTS`; values are bool, int, float, str or lists of int or str, or numpy
        arrays, which go out in their own type and shape. `parameters` are request parameters and may hold what `inputs`
        does not. Raises ValueError for an input of another type, and ServerError, also when the answer takes longer
        than `timeout_s`: a model process that dies leaves its clients waiting, so give one where that matters.
        """
        grpc = self._grpc
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client = grpc.InferenceServerClient(self._url)
        ended = False
        try:
            # Not with the header `triton_grpc_error`: it brings the status, but errors then crash server 2.51.
            client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=timeout_s)
            # When the stream has failed already, this refuses without the reason, which then waits in `answers`.
            with contextlib.suppress(grpc.InferenceServerException):
                client.async_stream_infer(
                    self._model,
                    [self._tensor(name, value) for name, value in inputs.items()],
                    priority=priority,
                    parameters=parameters,
                    enable_empty_final_response=True,
                )
            while not ended:
                result, error = answers.get()
                if error is not None:
                    ended = True
                    raise self._explained(error, "an answer", timeout_s)
                answer = result.get_response()
                ended = answer.parameters["triton_final_response"].bool_param
                if answer.outputs:
                    yield Response({output.name: _value(result.as_numpy(output.name)) for output in answer.outputs})
        finally:
            # Cancelling a stream whose request has ended makes the server (2.51) hold on to the model for ever.
            client.stop_stream(cancel_requests=not ended)
            client.close()

    def _explained(self, error: Any, wanted: str, timeout_s: float | None) -> ServerError:
        """What model.py says as it is; for what gRPC or the server say: who was asked for what, and what to do."""
        text: str = error.message()
        if written := _STATUS.match(text):
            return ServerError(written[1], text[written.end() :])
        status = (error.status() or "UNKNOWN").removeprefix("StatusCode.")
        asked = f"asked {self._url} for {wanted} of model {self._model}"
        if status == "UNAVAILABLE":
            detail = text.rpartition(": ")[2].rstrip("]")
            return ServerError(
                status,
                f"{asked}: nobody answers ({detail}); is a Triton server running there, and is this its gRPC port, "
                "8001 unless it was told otherwise?",
            )
        if status == "DEADLINE_EXCEEDED":
            return ServerError(status, f"{asked}: none within {timeout_s:g} s; give it longer, or see the server's log")
        if status == "UNIMPLEMENTED":
            return ServerError(status, f"{asked}: what answers is no Triton server's gRPC port ({text})")
        if "unknown model" in text:
            return ServerError(status, f"{asked}: it does not serve that model ({text}); see its model repository")
        return ServerError(status, f"{asked}: {text}")

    def _tensor(self, name: str, value: object) -> Any:
        if isinstance(value, np.ndarray):
            from tritonclient.utils import np_to_triton_dtype

            tensor = self._grpc.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
            tensor.set_data_from_numpy(value)
            return tensor
        if name not in INPUTS:
            raise ValueError(f"inputs: {unknown(name, INPUTS)}")
        wire_type = INPUTS[name].data_type.removeprefix("TYPE_").replace("STRING", "BYTES")
        values = value if isinstance(value, (list, tuple)) else [value]
        kinds = _PYTHON_TYPES[wire_type]
        if not all(isinstance(item, kinds) and (bool in kinds or not isinstance(item, bool)) for item in values):
            raise ValueError(f"{name}: must be {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}")
        encoded = [item.encode() if isinstance(item, str) else item for item in values]
        array: Any = np.array(encoded, dtype=_NUMPY_TYPES[wire_type])
        if self._batched:
            array = array.reshape(1, -1)
        tensor = self._grpc.InferInput(name, list(array.shape), wire_type)
        tensor.set_data_from_numpy(array)
        return tensor


def _value(array: Any) -> object:
    """A tensor as Python values: bytes become str, one element stands alone."""
    values = [item.decode(errors="replace") if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    return values[0] if len(values) == 1 else values
