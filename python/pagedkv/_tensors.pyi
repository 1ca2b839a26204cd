# Arrays of other libraries as C tensors, for the other modules alone: nothing here is for callers.
from typing import Any, Protocol

import numpy as np

class SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

class SupportsCudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

# The last one is (pointer, shape, dtype[, strides in elements]).
ArrayLike = np.ndarray[Any, Any] | SupportsDLPack | SupportsCudaArray | memoryview | tuple[Any, ...]
