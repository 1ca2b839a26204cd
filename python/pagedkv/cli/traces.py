"""Request traces: files of requests with their lengths and, in some formats, what their prompts share.

The format is found by looking at the first line, never by the file's name:

| format    | told by                                        | prompts                                            |
|-----------|------------------------------------------------|----------------------------------------------------|
| mooncake  | JSON lines with `hash_ids`                     | an id stands for 512 tokens, the last for the rest |
| bailian   | JSON lines with `chat_id` and `hash_ids`       | an id stands for 16 tokens                         |
| sharegpt  | JSON lines with `input_tok_ids`                | real token ids, in and out                         |
| measured  | JSON lines with `input_toks` and `output_toks` | lengths only                                       |
| azure     | CSV with TIMESTAMP,ContextTokens,GeneratedTokens | lengths only                                     |
| lengths   | CSV with a prompt and an output column         | lengths only                                       |

Order in the file is order of arrival. What a trace does not tell is made up so that equal hash ids give equal tokens
and nothing else is shared: see `Trace.prompt_tokens`.
"""

import csv
import gzip
import json
import re
import zlib
from dataclasses import dataclass

import numpy as np

# Token ids that a trace names, by itself or through hash ids, are smaller; those made up for one request are not.
OWN_TOKENS = 1 << 62
MAX_LENGTH = (1 << 31) - 1

MOONCAKE_HASH_BLOCK = 512
BAILIAN_HASH_BLOCK = 16


class TraceError(Exception):
    """A trace that cannot be read: `FILE:LINE: what`."""

    def __init__(self, path, line, what):
        super().__init__(f"{path}:{line}: {what}")


@dataclass(slots=True)
class Request:
    """One request. Of `hash_ids`, `prompt` and `output` those are arrays that the trace has, the others None."""

    prompt_length: int
    output_length: int
    hash_ids: np.ndarray | None = None
    prompt: np.ndarray | None = None
    output: np.ndarray | None = None
    namespace: int = 0
    regions: tuple = ()  # of (start, namespace), as pkv_open_options has them
    priority: int = 0


class Trace:
    """Requests in order of arrival, and their tokens."""

    def __init__(self, name, format, requests, hash_block_size=None):
        self.name = name
        self.format = format
        self.requests = requests
        self.hash_block_size = hash_block_size
        self.prompt_lengths = np.array([request.prompt_length for request in requests], dtype=np.int64)
        self.output_lengths = np.array([request.output_length for request in requests], dtype=np.int64)
        # Where the request's own tokens start: every request gets room for all of its tokens.
        ends = np.cumsum(self.prompt_lengths + self.output_lengths)
        self._own = OWN_TOKENS + np.concatenate(([0], ends[:-1])).astype(np.int64)
        self._outputs = None
        if requests and all(request.output is not None for request in requests):
            self._outputs = np.concatenate([request.output for request in requests])

    def __len__(self):
        return len(self.requests)

    @property
    def longest(self):
        """Tokens of the longest prompt + output."""
        return int((self.prompt_lengths + self.output_lengths).max())

    def prompt_tokens(self, index):
        """The prompt of a request, int64. Token `offset` of the block of hash id h is h * hash_block_size + offset, so
        equal ids give equal tokens; tokens that the trace tells nothing about belong to this request alone."""
        request = self.requests[index]
        if request.prompt is not None:
            return request.prompt
        length, own = request.prompt_length, int(self._own[index])
        if request.hash_ids is None:
            return np.arange(own, own + length, dtype=np.int64)
        block = self.hash_block_size
        offsets = np.arange(min(block, length), dtype=np.int64)
        tokens = (request.hash_ids[:, None] * block + offsets).reshape(-1)[:length]
        if len(tokens) < length:
            tokens = np.concatenate([tokens, np.arange(own + len(tokens), own + length, dtype=np.int64)])
        return tokens

    def output_cursors(self):
        """Per request the cursor of its first output token, int64; that of the next one is one more."""
        if self._outputs is None:
            return self._own + self.prompt_lengths
        return np.concatenate(([0], np.cumsum(self.output_lengths)[:-1])).astype(np.int64)

    def tokens_at(self, cursors):
        """Output tokens at cursors: the real ones if the trace has them, else tokens of no other request."""
        return cursors if self._outputs is None else self._outputs[cursors]


def read_trace(path, limit=None, hash_block_size=None):
    """Reads a trace file, gzip or plain: at most `limit` requests. TraceError names the line that is wrong."""
    reader = None
    requests = []
    line = 0
    for line, text in _read_lines(path):
        if not text.strip():
            continue
        try:
            if reader is None:
                reader = _find_reader(text, hash_block_size)
                if not reader.first_line_is_request:
                    continue
            requests.append(reader.parse(text))
        except _Malformed as error:
            raise TraceError(path, line, str(error)) from None
        if limit is not None and len(requests) >= limit:
            break
    if reader is None:
        raise TraceError(path, 1, "the file is empty")
    if not requests:
        raise TraceError(path, line, "no request after the header")
    return Trace(str(path), reader.format, requests, reader.hash_block_size)


class _Malformed(Exception):
    """What is wrong with a line."""


def _read_lines(path):
    """Yields (number, text) of the lines of a file, gzip or plain, without line ends."""
    number = 0
    with open(path, "rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw) if is_gzip else raw as file:
            lines = iter(file)
            while True:
                number += 1
                try:
                    line = next(lines, None)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    raise TraceError(path, number, f"damaged gzip data: {error}") from None
                if line is None:
                    return
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise TraceError(path, number, f"not UTF-8 text (byte {error.start + 1} of the line)") from None
                if "\0" in text:
                    raise TraceError(path, number, "not text: a NUL byte")
                yield number, text.rstrip("\r\n")


def _find_reader(text, hash_block_size):
    """The reader of the format whose first line this is."""
    if text.lstrip().startswith(("{", "[")):
        record = _parse_object(text)
        if "chat_id" in record:
            return _HashIds("bailian", hash_block_size or BAILIAN_HASH_BLOCK, is_rest_optional=True)
        if "input_tok_ids" in record or "output_tok_ids" in record:
            return _TokenIds()
        if "input_toks" in record or "output_toks" in record:
            return _Measured()
        if "hash_ids" in record or "input_length" in record:
            return _HashIds("mooncake", hash_block_size or MOONCAKE_HASH_BLOCK, is_rest_optional=False)
        raise _Malformed("not a known trace: none of the keys hash_ids, chat_id, input_tok_ids, input_toks")
    return _Columns(_split_csv(text))


class _JsonLines:
    first_line_is_request = True
    hash_block_size = None


class _HashIds(_JsonLines):
    """{timestamp, input_length, output_length, hash_ids}: one id for every started block of the prompt."""

    def __init__(self, format, hash_block_size, is_rest_optional):
        self.format = format
        self.hash_block_size = hash_block_size
        self._is_rest_optional = is_rest_optional  # a partial last block may go without an id
        self._max_id = OWN_TOKENS // hash_block_size - 1

    def parse(self, text):
        record = _parse_object(text)
        _check_timestamp(record)
        length = _get_length(record, "input_length")
        output_length = _get_length(record, "output_length")
        ids = _get_ids(record, "hash_ids", self._max_id)
        block = self.hash_block_size
        expected = -(-length // block)
        if len(ids) != expected and not (self._is_rest_optional and len(ids) == length // block):
            raise _Malformed(
                f"{len(ids)} hash_ids for an input_length of {length}: {expected} needed, one for every {block} tokens")
        return Request(length, output_length, hash_ids=ids)


class _TokenIds(_JsonLines):
    """{input_tok_ids, output_tok_ids}: real tokens; input_toks and output_toks, if there, are their counts."""

    format = "sharegpt"

    def parse(self, text):
        record = _parse_object(text)
        prompt = _get_ids(record, "input_tok_ids", OWN_TOKENS - 1)
        output = _get_ids(record, "output_tok_ids", OWN_TOKENS - 1)
        for key, ids in (("input_toks", prompt), ("output_toks", output)):
            if key in record and _get_length(record, key) != len(ids):
                raise _Malformed(f"{key} is {record[key]}, but there are {len(ids)} token ids")
        return Request(len(prompt), len(output), prompt=prompt, output=output)


class _Measured(_JsonLines):
    """{input_toks, output_toks}: lengths, as an engine's log of served requests has them."""

    format = "measured"

    def parse(self, text):
        record = _parse_object(text)
        return Request(_get_length(record, "input_toks"), _get_length(record, "output_toks"))


class _Columns:
    """CSV with one column of prompt lengths and one of output lengths, by whatever usual name."""

    first_line_is_request = False
    hash_block_size = None
    _PROMPT = {"prompt", "input", "context", "prefill", "request"}
    _OUTPUT = {"output", "generated", "generation", "decode", "completion", "response"}
    _FILLERS = {"num", "n", "number", "of", "tokens", "token", "toks", "length", "lengths", "len", "count"}

    def __init__(self, header):
        self._header = [name.strip() for name in header]
        self._prompt = self._find(self._PROMPT)
        self._output = self._find(self._OUTPUT)
        is_azure = self._header == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
        self.format = "azure" if is_azure else "lengths"

    def _find(self, words):
        columns = [i for i, name in enumerate(self._header) if self._reduce(name) in [{word} for word in words]]
        if len(columns) == 1:
            return columns[0]
        which = "prompt" if words is self._PROMPT else "output"
        problem = "no" if not columns else "more than one"
        raise _Malformed(
            f"not a known trace: neither JSON lines nor a CSV header ({problem} column of {which} lengths)")

    def _reduce(self, name):
        """The words of a column's name that say what it is: num_prefill_tokens and PrefillTokens are both {prefill}."""
        return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)} - self._FILLERS

    def parse(self, text):
        fields = _split_csv(text)
        if len(fields) != len(self._header):
            raise _Malformed(f"{len(fields)} columns, but the header has {len(self._header)}")
        return Request(self._get_length(fields, self._prompt), self._get_length(fields, self._output))

    def _get_length(self, fields, column):
        text = fields[column].strip()
        name = self._header[column]
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise _Malformed(f"{name} is {_show(text)}: not a whole number")
        return _check_length(name, int(text))


def _split_csv(text):
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise _Malformed(f"not valid CSV: {error}") from None


def _parse_object(text):
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Malformed(f"not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise _Malformed(f"a JSON object is needed, not {_show(record)}")
    return record


def _get_length(record, key):
    if key not in record:
        raise _Malformed(f"{key} is missing")
    value = record[key]
    if type(value) is not int:
        raise _Malformed(f"{key} is {_show(value)}: not a whole number")
    return _check_length(key, value)


def _check_length(name, value):
    if value < 0:
        raise _Malformed(f"{name} is {value}: negative")
    if value > MAX_LENGTH:
        raise _Malformed(f"{name} is {_show(value)}: larger than {MAX_LENGTH}")
    return value


def _get_ids(record, key, largest):
    if key not in record:
        raise _Malformed(f"{key} is missing")
    values = record[key]
    if not isinstance(values, list):
        raise _Malformed(f"{key} is {_show(values)}: not a list")
    for value in values:
        if type(value) is not int:
            raise _Malformed(f"{key} holds {_show(value)}: not a whole number")
        if not 0 <= value <= largest:
            raise _Malformed(f"{key} holds {_show(value)}: not between 0 and {largest}")
    return np.array(values, dtype=np.int64)


def _check_timestamp(record):
    value = record.get("timestamp", 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Malformed(f"timestamp is {_show(value)}: not a number")


def _show(value):
    """A value for an error line, short and without line ends."""
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= 40 else text[:37] + "..."
