import os
from typing import Protocol

from pagedkv._arrays import Integers

class _Writer(Protocol):
    def write(self, data: bytes, /) -> int | None: ...

class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...

Target = str | bytes | os.PathLike[str] | _Writer
Source = str | bytes | os.PathLike[str] | _Reader

def block_hash(tokens: Integers, parent: bytes | None = None, namespace: int = 0) -> bytes: ...
