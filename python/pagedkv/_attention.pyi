from typing import Any

import numpy.typing as npt

from pagedkv._arrays import Stream
from pagedkv._cache import Cache
from pagedkv._tensors import ArrayLike

class Rope:
    def __init__(
        self,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        cos_sin: ArrayLike | None = None,
    ) -> None: ...
    @property
    def base(self) -> float: ...
    @property
    def rotary_dim(self) -> int | None: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def cos_sin(self) -> ArrayLike | None: ...

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

# A method of Cache.
def set_kv_scales(self: Cache, layer: int, k_scale: float | npt.ArrayLike, v_scale: float | npt.ArrayLike) -> None: ...
