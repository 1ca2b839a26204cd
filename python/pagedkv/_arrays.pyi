# Conversions between Python and C, for the other modules alone: nothing here is for callers.
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

class CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

Stream = int | CudaStream | TorchStream | None
Streams = Stream | Sequence[Stream]  # of a cache over several devices: one for each
Integers = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]
Buffer = bytearray | memoryview | np.ndarray[Any, Any] | tuple[int, int] | Any
