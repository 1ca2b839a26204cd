import os
from collections.abc import Iterable
from collections.abc import Sequence as Collection
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv._arrays import Buffer, Integers, Stream, Streams
from pagedkv._attention import Rope
from pagedkv._batch import Batch
from pagedkv._layout import Layout
from pagedkv._pin import Pin
from pagedkv._resize import PreparedResize
from pagedkv._sequence import Sequence
from pagedkv._transfer import Transfer
from pagedkv._snapshot import Source, Target
from pagedkv._tensors import ArrayLike
from pagedkv._views import MemoryView

Eviction = Literal["lru", "lfu", "priority", "fifo", "slru", "s3fifo"]
Shard = Literal["heads", "layers", "sequences"]
Format = Literal["table", "csr", "pointers"]
_CacheType = TypeVar("_CacheType", bound=Cache)

class Cache:
    def __init__(
        self,
        layout: Layout,
        num_blocks: int | None = None,
        memory: str | int | float | None = None,
        device: str = "auto",
        prefix_caching: bool = True,
        eviction: Eviction = "lru",
        buffer: Buffer | None = None,
        hash_seed: int = 0,
        low_water: int = 0,
        event_capacity: int = 0,
        window: int | None = None,
        sinks: int = 0,
        partial_reuse: bool = False,
        rope: Rope | None = None,
        devices: Collection[str] | None = None,
        shard: Shard | None = None,
        host_tier: str | int | None = None,
        disk_tier: str | bytes | os.PathLike[str] | None = None,
        disk_tier_bytes: str | int | None = None,
        tier_identity: str | None = None,
        recompute_tokens_per_second: float = 0.0,
        tier_min_hits: int = 0,
        disk_tier_reset: bool = False,
        max_num_blocks: int | None = None,
    ) -> None: ...
    def open(
        self,
        tokens: Integers,
        namespace: int = 0,
        priority: int = 0,
        tag: int = 0,
        salts: Iterable[tuple[int, int]] | None = None,
    ) -> Sequence: ...
    def open_many(
        self,
        prompts: Collection[Integers],
        namespace: int | Collection[int] = 0,
        priority: int | Collection[int] = 0,
        tag: int | Collection[int] = 0,
        salts: Collection[Collection[tuple[int, int]] | None] | None = None,
    ) -> list[Sequence]: ...
    def fork_many(
        self, sequences: Collection[Sequence], lengths: int | Integers | None = None
    ) -> list[Sequence]: ...
    def commit_many(self, sequences: Collection[Sequence], tokens: Collection[Integers]) -> None: ...
    def truncate_many(self, sequences: Collection[Sequence], lengths: int | Integers) -> None: ...
    def close_many(self, sequences: Collection[Sequence], stream: Streams = None) -> None: ...
    def reorder(self, sequences: Collection[Sequence], sources: Integers) -> None: ...
    def accept(
        self,
        sequences: Collection[Sequence],
        num_drafts: int | Integers,
        kept: Collection[Integers],
        stream: Streams = None,
    ) -> None: ...
    def probe(self, tokens: Integers, namespace: int = 0, salts: Iterable[tuple[int, int]] | None = None) -> int: ...
    def touch(self, tokens: Integers, namespace: int = 0, salts: Iterable[tuple[int, int]] | None = None) -> int: ...
    def pin(
        self,
        tokens: Integers,
        namespace: int = 0,
        salts: Iterable[tuple[int, int]] | None = None,
        ttl: float | None = None,
    ) -> Pin: ...
    def invalidate(self, namespace: int) -> int: ...
    def set_quota(self, namespace: int, max_blocks: int) -> None: ...
    def namespace_stats(self, namespace: int) -> dict[str, int]: ...
    def send(self, sequence: Sequence, start: int = 0, end: int | None = None, stream: Stream = None) -> Transfer: ...
    def receive(
        self,
        num_blocks: int,
        namespace: int = 0,
        priority: int = 0,
        tag: int = 0,
        salts: Iterable[tuple[int, int]] | None = None,
        stream: Stream = 0,
    ) -> Transfer: ...
    def regions(self) -> list[dict[str, Any]]: ...
    def evict(self, n: int | None = None) -> int: ...
    def zero_uncached(self, stream: Streams = 0) -> int: ...
    def victims(self, n: int) -> list[Sequence]: ...
    def reset(self) -> None: ...
    def resize(self, num_blocks: int, move: bool = False, stream: Streams = 0) -> None: ...
    def prepare_resize(self, num_blocks: int) -> PreparedResize: ...
    def flush_tiers(self) -> None: ...
    def load_sequence(
        self,
        file: Source,
        namespace: int | None = None,
        priority: int | None = None,
        tag: int | None = None,
        stream: Streams = 0,
    ) -> Sequence: ...
    def save(self, file: Target, stream: Streams = 0) -> None: ...
    def load(self, file: Source, stream: Streams = 0) -> int: ...
    def read_events(self, max_events: int | None = None) -> npt.NDArray[np.void]: ...
    def batch(
        self,
        max_sequences: int,
        max_tokens: int,
        max_sequence_length: int | None = None,
        num_heads: int | None = None,
        formats: Format | Collection[Format] = ("table",),
        tables: Literal["device", "mapped"] = "device",
        shared_prefixes: bool = False,
        min_shared_tokens: int | None = None,
    ) -> Batch: ...
    def discard(self, batch: Batch) -> None: ...
    def write_kv(
        self,
        layer: int,
        batch: Batch,
        k: ArrayLike,
        v: ArrayLike,
        stream: Stream = 0,
        rope: Rope | None = None,
        pdl: bool = False,
        shard: int | None = None,
    ) -> None: ...
    # Returns (k, v): the given ones, or new numpy arrays.
    def gather_kv(
        self,
        layer: int,
        batch: Batch,
        index: int,
        start: int,
        count: int,
        k: ArrayLike | None = None,
        v: ArrayLike | None = None,
        stream: Stream = 0,
        shard: int | None = None,
    ) -> tuple[Any, Any]: ...
    def scatter_kv(
        self,
        layer: int,
        batch: Batch,
        index: int,
        start: int,
        k: ArrayLike,
        v: ArrayLike,
        stream: Stream = 0,
        shard: int | None = None,
    ) -> None: ...
    # Returns out, or a new numpy array.
    def attend(
        self,
        layer: int,
        batch: Batch,
        q: ArrayLike,
        out: ArrayLike | None = None,
        stream: Stream = 0,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: ArrayLike | None = None,
        alibi_slopes: ArrayLike | None = None,
        tree_mask: ArrayLike | None = None,
        lse: ArrayLike | None = None,
        invariant: bool = False,
        pdl: bool = False,
        shard: int | None = None,
    ) -> Any: ...
    def set_kv_scales(self, layer: int, k_scale: float | npt.ArrayLike, v_scale: float | npt.ArrayLike) -> None: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def device(self) -> str: ...
    @property
    def max_num_blocks(self) -> int: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def shard(self) -> Shard | None: ...
    @property
    def parts(self) -> tuple[Cache, ...]: ...
    # What each device holds: device, base_ptr, block_bytes, first_layer, num_layers, first_kv_head, num_kv_heads.
    @property
    def shards(self) -> tuple[dict[str, Any], ...]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_cached_blocks(self) -> int: ...
    @property
    def base_ptr(self) -> int: ...
    def block_ptr(self, block: int) -> int: ...
    def k_view(self, layer: int) -> MemoryView: ...
    def v_view(self, layer: int) -> MemoryView: ...
    def block_view(self, block: int) -> MemoryView: ...
    def stats(self) -> dict[str, Any]: ...
    def stats_text(self, format: Literal["prometheus", "json"] = "prometheus") -> str: ...
    def measure(self) -> dict[str, Any]: ...
    def publish_stats(self, path: str | bytes | os.PathLike[str] | None = None) -> str: ...
    def unpublish_stats(self) -> None: ...
    def trace_start(self, path: str | os.PathLike[str]) -> None: ...
    def trace_stop(self) -> None: ...
    def check(self) -> Literal[True]: ...
    def explain(self, block: int) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def __enter__(self: _CacheType) -> _CacheType: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
