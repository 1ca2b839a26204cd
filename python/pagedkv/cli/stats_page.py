"""Pages of statistics that other processes publish (docs/stats-page.md): found, read, and removed where their process has
ended. Reading disturbs nobody."""

import mmap
import os
import struct
from dataclasses import dataclass

from pagedkv._monitor import order_loads

_HEADER = struct.Struct("=8sIIQQQIIII16s16s16s16siiiiiiQ")
_MAGIC = b"PKVSTATS"
_VERSION = 1
_MOST_BYTES = 1 << 20
_MOST_TRIES = 1000


class NoPageError(Exception):
    """A file that is no page of statistics, or one of a version that is not understood."""


@dataclass
class Page:
    path: str
    process_id: int
    start_time: int  # clock ticks from the start of the machine; 0: unknown
    process_namespace: int  # 0: unknown
    created_at: float  # seconds since 1970
    device: str
    library_version: str
    dtype: str
    eviction: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    prefix_caching: bool
    values: dict  # name -> number

    @property
    def key(self):
        """Tells the pages of caches that come and go apart."""
        return self.path, self.process_id, self.created_at


def read_page(path):
    """The page in a file. NoPageError for something else, OSError where it cannot be read."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        size = os.fstat(file).st_size
        if not _HEADER.size <= size <= _MOST_BYTES:
            raise NoPageError(f"{path}: {size} bytes are no page of statistics")
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as memory:
            return _parse(path, memory, size)
    finally:
        os.close(file)


def _parse(path, memory, size):
    if memory[: len(_MAGIC)] != _MAGIC:
        raise NoPageError(f"{path}: not a page of statistics")
    order_loads()  # the rest was there before the magic was
    (_, version, page_bytes, process_id, start_time, created_at, num_values, name_bytes, names, values, device,
     library_version, dtype, eviction, *layout, process_namespace) = _HEADER.unpack(memory[: _HEADER.size])
    if version != _VERSION:
        raise NoPageError(f"{path}: a page of version {version}; {_VERSION} is understood")
    if not (page_bytes <= size and names + num_values * name_bytes <= page_bytes
            and values + 8 * (1 + num_values) <= page_bytes):
        raise NoPageError(f"{path}: a damaged page of statistics")
    all_names = [_text(memory[names + i * name_bytes : names + (i + 1) * name_bytes]) for i in range(num_values)]
    numbers = _read_values(path, memory, values, num_values)
    block_size, num_layers, num_kv_heads, head_dim, v_head_dim, prefix_caching = layout
    return Page(path, process_id, start_time, process_namespace, created_at / 1e9, _text(device), _text(library_version),
                _text(dtype), _text(eviction), block_size, num_layers, num_kv_heads, head_dim, v_head_dim,
                bool(prefix_caching), dict(zip(all_names, numbers)))


def _read_values(path, memory, offset, count):
    """One consistent set: the sequence number is even and the same before and after."""
    layout = struct.Struct(f"={count}q")
    sequence = struct.Struct("=Q")
    for _ in range(_MOST_TRIES):
        (before,) = sequence.unpack_from(memory, offset)
        order_loads()
        numbers = layout.unpack_from(memory, offset + sequence.size)
        order_loads()
        if before % 2 == 0 and sequence.unpack_from(memory, offset) == (before,):
            return numbers
    raise NoPageError(f"{path}: the page is always being written")


def _text(raw):
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def is_stale(page):
    """The process has ended, or another one has its number by now. False where that cannot be known."""
    if page.process_namespace and page.process_namespace != _own_namespace():
        return False
    start_time = _read_start_time(page.process_id)
    if start_time is None:
        return not _is_alive(page.process_id)
    return page.start_time != 0 and start_time != page.start_time


def _own_namespace():
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _is_alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _read_start_time(process_id):
    """Field 22 of /proc/PID/stat, or None; the name in field 2 may hold anything."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        # A process that has ended and was not waited for publishes no more.
        return int(fields[19]) if fields[0] != b"Z" else -1
    except (OSError, IndexError, ValueError):
        return None


def read_command(page):
    """The command line of the process, or ""."""
    if page.process_namespace not in (0, _own_namespace()):
        return ""
    try:
        with open(f"/proc/{page.process_id}/cmdline", "rb") as file:
            return " ".join(file.read(4096).decode("utf-8", "replace").split("\0")).strip()
    except OSError:
        return ""


def find_pages(folder, process_id=None):
    """The pages of running processes in a folder, of one of them if process_id is given, by process and age. Pages that
    were left behind by processes of this user are removed."""
    pages = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return pages
    for name in names:
        if not name.startswith("pkv-"):
            continue
        path = os.path.join(folder, name)
        try:
            page = read_page(path)
        except (NoPageError, OSError, ValueError):
            continue
        if is_stale(page):
            _remove(path, name, page)
        elif process_id in (None, page.process_id):
            pages.append(page)
    return sorted(pages, key=lambda page: (page.process_id, page.created_at))


def _remove(path, name, page):
    # Only under the name that publish_stats() gives: another one was chosen by somebody.
    try:
        if name.startswith(f"pkv-{page.process_id}-") and os.lstat(path).st_uid == os.getuid():
            os.unlink(path)
    except OSError:
        pass
