import numpy as np
import numpy.typing as npt

from collections.abc import Collection

from pagedkv._arrays import Integers, Streams
from pagedkv._batch import Batch
from pagedkv._tensors import ArrayLike

# Methods of Batch, which declares them: nothing here is for callers.
def advance(self: Batch, is_active: ArrayLike | Collection[ArrayLike] | None = None, stream: Streams = 0) -> None: ...
def get_advanced(self: Batch, stream: Streams = 0) -> tuple[npt.NDArray[np.int64], int]: ...
def settle(self: Batch, counts: Integers, tokens: Integers | None = None) -> None: ...
