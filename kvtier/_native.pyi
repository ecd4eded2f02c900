"""The C++ extension (kvtier/native): kernels over raw addresses, each call without the GIL.

Callers own every tensor behind an address and vouch for its shape. Strides are in elements, `*_bytes` in bytes.
"""

import enum

from kvtier.io.base import Ended, IoRequest, IoResult, Operation
from kvtier.record import Record

def supported_isas() -> list[str]: ...
def checksum_isas() -> list[str]: ...
def checksum_rows(rows: list[memoryview], slice_bytes: int, isa: str = "auto", runs: int = 0) -> list[bytes]: ...
def copy_rows(
    sources: list[memoryview], targets: list[memoryview], slice_bytes: int, isa: str = "auto", runs: int = 0
) -> list[bytes]: ...
def pack_header(page: memoryview, record: Record, namespace: bytes, row_bytes: int, slice_bytes: int) -> None: ...
def is_header_of(page: memoryview, record: Record, namespace: bytes, row_bytes: int, slice_bytes: int) -> bool: ...

class Type(enum.Enum):
    float32 = 0
    bfloat16 = 1
    float16 = 2

class Rows:
    def __init__(
        self,
        type: Type,
        kv_heads: int,
        dim: int,
        block_tokens: int,
        layer_bytes: int,
        value_bytes: int,
        head_bytes: int,
    ) -> None: ...

class Kernels:
    def __init__(self, threads: int, isa: str = "auto") -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def few_rows_max(self) -> int: ...
    def append(
        self,
        rows: Rows,
        k: int,
        v: int,
        k_token_stride: int,
        k_head_stride: int,
        v_token_stride: int,
        v_head_stride: int,
        append_rows: int,
        append_offsets: int,
        tokens: int,
    ) -> None: ...
    def attend(
        self,
        rows: Rows,
        q_type: Type,
        q: int,
        q_token_stride: int,
        q_head_stride: int,
        out: int,
        lse: int,
        tables: int,
        table_stride: int,
        query_starts: int,
        lengths: int,
        sequences: int,
        heads: int,
        scale: float,
        window: int,
    ) -> None: ...
    def rmsnorm(
        self,
        x_type: Type,
        x: int,
        outer: int,
        inner: int,
        outer_stride: int,
        inner_stride: int,
        out_type: Type,
        weight: int,
        out: int,
        dim: int,
        eps: float,
    ) -> None: ...
    def add_rmsnorm(
        self,
        residual_type: Type,
        residual: int,
        update_type: Type,
        update: int,
        weight: int,
        out: int,
        tokens: int,
        dim: int,
        eps: float,
    ) -> None: ...
    def rope(
        self,
        type: Type,
        x: int,
        tokens: int,
        heads: int,
        dim: int,
        token_stride: int,
        head_stride: int,
        cos: int,
        sin: int,
    ) -> None: ...
    def silu_mul(self, type: Type, gate_up: int, token_stride: int, out: int, tokens: int, inter: int) -> None: ...
    def widen(self, type: Type, x: int, out: int, rows: int, dim: int) -> None: ...
    def linear(
        self, x: int, x_stride: int, weight: int, bias: int, out: int, tokens: int, in_dim: int, out_dim: int
    ) -> None: ...
    def linear_few(
        self, x: int, x_stride: int, weight: int, out: int, rows: int, in_dim: int, out_dim: int
    ) -> None: ...
    def read(self, memory: int, bytes: int) -> int: ...

class LayerWeights:
    """A matrix is (weight, bias); address 0: there is none."""

    def __init__(
        self,
        qkv: tuple[int, int],
        output: tuple[int, int],
        gate_up: tuple[int, int],
        down: tuple[int, int],
        q_norm: int,
        k_norm: int,
        post_norm: int,
        next_norm: int,
        window: int,
    ) -> None: ...

class Layers:
    """The layers of a decoder on a set of kernels; ValueError for what does not fit. `rows_max` 0: it runs no pass."""

    def __init__(
        self,
        kernels: Kernels,
        rows: Rows,
        slice_bytes: int,
        heads: int,
        hidden: int,
        intermediate: int,
        eps: float,
        scale: float,
        layers: list[LayerWeights],
    ) -> None: ...
    @property
    def rows_max(self) -> int: ...
    def run(
        self,
        first: int,
        end: int,
        tokens: int,
        sequences: int,
        residual: int,
        normed: int,
        cos: int,
        sin: int,
        tables: int,
        table_stride: int,
        query_starts: int,
        lengths: int,
        append_rows: int,
        append_offsets: int,
    ) -> None: ...

class Ring:
    """An io_uring and its thread; see `kvtier.io.base.Ring`. OSError with what the kernel says."""

    def __init__(
        self,
        depth: int,
        slice_bytes: int,
        operations: tuple[Operation, ...],
        result: type[IoResult],
        piece_bytes: int = ...,
    ) -> None: ...
    @property
    def bell(self) -> int: ...
    def push(self, requests: list[IoRequest]) -> None: ...
    def cancel(self) -> list[int]: ...
    def take(self) -> tuple[list[IoResult], list[Ended]]: ...
    def wake(self) -> None: ...
    def register_memory(self, memory: memoryview) -> None: ...
    def refusal(self) -> int: ...
    @property
    def registered_moves(self) -> int:
        """How many moves went to the kernel with registered memory."""
    def close(self) -> bool: ...
    def after_fork_in_child(self) -> None: ...
