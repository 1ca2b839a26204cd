"""Reads a recording of the calls of a cache, as `cache.trace_start(path)` writes it: docs/trace-formats.md.

A record is one call, or a note of the recorder: its fields, and what it gave back if it succeeded. Arrays stand in the
file as runs of numbers of one width, and are taken out of it by numpy.
"""

import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np

from pagedkv.cli.traces import MAX_LENGTH, Request, Trace, TraceError

MAGIC = b"PKVTRACE"
VERSION = 1

# Code -> name, fields, results. u: unsigned, s: signed, i: array of int64, q: array of uint64, o: options of open,
# O: options of many.
CALLS = {
    0: ("end", "ssssssssss", ""),
    1: ("checkpoint", "ssssssssss", ""),
    2: ("batch", "ussssu", ""),
    3: ("batch_destroy", "u", ""),
    4: ("load", "", ""),
    16: ("open", "io", "us"),
    17: ("rematch", "ui", "s"),
    18: ("fork", "us", "u"),
    19: ("reserve", "us", ""),
    20: ("append", "ui", ""),
    21: ("commit", "ui", ""),
    22: ("truncate", "us", ""),
    23: ("close", "u", ""),
    24: ("shift", "uss", ""),
    25: ("set_retention", "ussss", ""),
    32: ("open_many", "iiO", "qi"),
    33: ("fork_many", "qi", "q"),
    34: ("commit_many", "qii", ""),
    35: ("truncate_many", "qi", ""),
    36: ("close_many", "q", ""),
    37: ("reorder", "qi", ""),
    38: ("accept", "qiii", ""),
    48: ("prepare", "uqiissss", ""),
    49: ("discard", "u", ""),
    50: ("prepare_ahead", "uqiisssss", ""),
    51: ("settle", "uii", ""),
    64: ("evict", "s", "s"),
    65: ("zero_uncached", "", "s"),
    66: ("reset", "", ""),
    67: ("resize", "ss", ""),
    80: ("touch", "io", "s"),
    81: ("pin", "ios", "us"),
    82: ("unpin", "u", ""),
    83: ("invalidate", "u", "s"),
    84: ("set_quota", "us", ""),
    96: ("send", "uss", "u"),
    97: ("receive", "so", "u"),
    98: ("commit_transfer", "ui", "u"),
    99: ("quarantine", "u", ""),
    100: ("finish_transfer", "u", ""),
}

# What a checkpoint counts; from queried_tokens on since the beginning of the recording.
COUNTS = ("uncached_blocks", "cached_blocks", "held_blocks", "num_sequences", "num_pins", "queried_tokens",
          "hit_tokens", "appended_tokens", "evictions", "copies")

OPTIONS = ("block_size", "num_layers", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "order", "kv_scales",
           "num_blocks", "prefix_caching", "eviction", "window", "sinks", "partial_reuse", "low_water",
           "event_capacity", "has_rope", "rotary_dim", "interleaved", "max_num_blocks")
NUM_FIRST_OPTIONS = 19  # that every version has; later ones are 0 where they are missing

# Arrays of a call that are of one length, by their places among the fields.
EQUAL_LENGTHS = {"open_many": [1], "fork_many": [0, 1], "commit_many": [0, 1], "truncate_many": [0, 1],
                 "reorder": [0, 1], "accept": [0, 1, 2], "prepare": [1, 2],
                 "prepare_ahead": [1, 2]}

NO_VALUES, LEFT_OUT = 0, 255
NUM_STATUSES = 10


class RecordingError(TraceError):
    """A recording that cannot be read or run: `FILE: byte N: what`."""

    def __init__(self, path, offset, what):
        Exception.__init__(self, f"{path}: byte {offset}: {what}")


class _CutOff(Exception):
    """The file ends inside a record."""


@dataclass(slots=True)
class Numbers:
    """An array argument. values is None where the call got NULL, and where they were left out."""

    count: int
    values: np.ndarray | None
    is_left_out: bool = False


@dataclass(slots=True)
class OpenOptions:
    namespace: int
    priority: int
    tag: int
    regions: list  # of (start, namespace)


@dataclass(slots=True)
class Record:
    offset: int
    name: str
    status: int
    fields: list
    results: list  # empty if the call was refused


def is_recording(path):
    """Whether a file is a recording, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class Recording:
    """A file: `options` by name, `rope_base`, `device`, and its records by iterating. is_complete, size and position
    tell how far that has come."""

    def __init__(self, path):
        self.path = str(path)
        self.is_complete = False
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        if self._data[: len(MAGIC)] != MAGIC:
            raise RecordingError(path, 0, "not a recording")
        self.position = len(MAGIC)
        try:
            self._read_header()
        except _CutOff:
            raise RecordingError(path, self.position, "the file ends inside the header") from None

    def _read_header(self):
        version = self._unsigned()
        if version != VERSION:
            raise RecordingError(self.path, len(MAGIC), f"version {version} of the format; this is for {VERSION}")
        self.library_version = self._text()
        self.device = self._text()
        self.rope_base = struct.unpack("<d", self._take(8))[0]
        numbers = [self._signed() for _ in range(self._unsigned())]
        if any(numbers[len(OPTIONS):]):
            raise RecordingError(self.path, self.position, "options of a newer version of the library")
        if len(numbers) < NUM_FIRST_OPTIONS:
            raise RecordingError(self.path, self.position, f"{len(numbers)} options; {NUM_FIRST_OPTIONS} needed")
        self.options = dict(zip(OPTIONS, numbers + [0] * len(OPTIONS)))

    def __iter__(self):
        """Yields the records. A file that was cut off ends at its last whole one."""
        while self.position < self.size:
            offset = self.position
            try:
                record = self._read_record(offset)
            except _CutOff:
                self.position = offset
                return
            yield record
            if record.name == "end":
                self.is_complete = True
                return

    def _read_record(self, offset):
        code, status = self._take(2)
        if code not in CALLS:
            raise RecordingError(self.path, offset, f"a record of kind {code}, unknown")
        name, fields, results = CALLS[code]
        if status >= NUM_STATUSES:
            raise RecordingError(self.path, offset, f"status {status}, unknown")
        values = [self._READERS[kind](self) for kind in fields]
        counts = [values[i].count for i in EQUAL_LENGTHS.get(name, ())]
        if name == "open_many" and values[2] is not None:
            counts.append(len(values[2]))
        if len(set(counts)) > 1:
            raise RecordingError(self.path, offset, f"{name} with arrays of {' and '.join(map(str, counts))} elements")
        given = [self._READERS[kind](self) for kind in results] if status == 0 else []
        return Record(offset, name, status, values, given)

    # ---- parts of a record

    def _take(self, size):
        end = self.position + size
        if end > self.size:
            raise _CutOff
        part = self._data[self.position : end]
        self.position = end
        return part

    def _unsigned(self):
        data, position, size = self._data, self.position, self.size
        value = shift = 0
        while True:
            if position >= size:
                raise _CutOff
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.position = position
                return value
            shift += 7
            if shift > 63:
                raise RecordingError(self.path, self.position, "a number of more than 64 bits")

    def _signed(self):
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _text(self):
        return self._take(self._unsigned()).decode("utf-8", "replace")

    def _array(self, kind):
        offset = self.position
        count = self._signed()
        width = self._take(1)[0]
        if width == NO_VALUES or width == LEFT_OUT:
            return Numbers(count, None, width == LEFT_OUT)
        if width not in (1, 2, 4, 8):
            raise RecordingError(self.path, offset, f"an array of {width}-byte numbers")
        wide = np.int64 if kind == "i" else np.uint64
        if count <= 0:
            return Numbers(count, np.zeros(0, dtype=wide))
        if self.position + count * width > self.size:
            raise _CutOff
        values = np.frombuffer(self._data, dtype=f"<{kind.replace('q', 'u')}{width}", count=count, offset=self.position)
        self.position += count * width
        return Numbers(count, values.astype(wide))

    def _options(self):
        namespace, priority, tag, count = self._unsigned(), self._signed(), self._unsigned(), self._signed()
        return OpenOptions(namespace, priority, tag, [(self._signed(), self._unsigned()) for _ in range(count)])

    def _many_options(self):
        """None where the call got NULL."""
        count = self._signed()
        return None if count < 0 else [self._options() for _ in range(count)]

    _READERS = {
        "u": _unsigned,
        "s": _signed,
        "i": lambda self: self._array("i"),
        "q": lambda self: self._array("q"),
        "o": _options,
        "O": _many_options,
    }


def read_recorded_requests(path, limit=None):
    """The prompts that were opened, as a trace: for the laboratory."""
    requests = []
    recording = Recording(path)
    for record in recording:
        if record.status != 0:
            continue
        if record.name == "open":
            requests.append(_make_request(path, record, record.fields[0].values, record.fields[1]))
        elif record.name == "open_many":
            tokens, counts, options = record.fields
            ends = np.cumsum(counts.values).tolist() if counts.count > 0 else []
            for i, (count, end) in enumerate(zip(counts.values.tolist() if ends else [], ends)):
                prompt = tokens.values[end - count : end] if tokens.values is not None else None
                requests.append(_make_request(path, record, prompt, options[i] if options else None))
        if limit is not None and len(requests) >= limit:
            break
    if not requests:
        raise RecordingError(path, recording.position, "no prompt was opened")
    return Trace(str(path), "recording", requests[:limit])


def _make_request(path, record, prompt, options):
    prompt = np.zeros(0, dtype=np.int64) if prompt is None else prompt
    if len(prompt) > MAX_LENGTH:
        raise RecordingError(path, record.offset, f"a prompt of {len(prompt)} tokens")
    request = Request(len(prompt), 0, prompt=prompt, output=np.zeros(0, dtype=np.int64))
    if options is not None:
        request.namespace, request.regions = options.namespace, tuple(options.regions)
        request.priority = options.priority
    return request
