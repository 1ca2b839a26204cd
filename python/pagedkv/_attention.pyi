from typing import Any

from pagedkv._arrays import Stream
from pagedkv._batch import Batch
from pagedkv._cache import Cache
from pagedkv._tensors import ArrayLike

def write_kv(cache: Cache, layer: int, batch: Batch, k: ArrayLike, v: ArrayLike, stream: Stream, rope: None) -> None: ...
def attend(
    cache: Cache,
    layer: int,
    batch: Batch,
    q: ArrayLike,
    out: ArrayLike | None,
    stream: Stream,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: ArrayLike | None,
    alibi_slopes: ArrayLike | None,
    tree_mask: None,
    lse: ArrayLike | None,
    invariant: bool,
    pdl: bool,
) -> Any: ...

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
