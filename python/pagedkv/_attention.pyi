from typing import Any

from pagedkv._arrays import Stream
from pagedkv._tensors import ArrayLike

# Returns (out, lse): the given ones, or new numpy arrays.
def merge_states(
    out_a: ArrayLike,
    lse_a: ArrayLike,
    out_b: ArrayLike,
    lse_b: ArrayLike,
    out: ArrayLike | None = None,
    lse: ArrayLike | None = None,
    stream: Stream = 0,
) -> tuple[Any, Any]: ...
def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def set_isa(name: str) -> None: ...
def isa() -> str: ...
