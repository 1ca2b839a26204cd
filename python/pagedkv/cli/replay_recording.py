"""`pagedkv replay` of a recording: every call again, and whether it did what it did then.

Without overrides each call must have the recorded outcome: its status, what it found and took, and at the checkpoints
the counts of blocks and tokens. The first call that differs is shown; the exit status is then 1.

With another pool or policy, hits and shortages differ and there is nothing to compare. The calls that succeeded are
made again, adapted: the first append of a sequence is for what its own hit has left, and a sequence that does not fit
is closed and counted, and its later calls are left out.
"""

import time

import numpy as np

from pagedkv.cli import CommandError, EXIT_FAILED_CHECK, report
from pagedkv.cli.progress import make_progress
from pagedkv.cli.recording import COUNTS, Numbers, Recording, RecordingError
from pagedkv.cli.recording_abi import NEVER_FITS, OK, OUT_OF_BLOCKS, RawCache

STATUSES = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_MEMORY", "OUT_OF_BLOCKS", "NEVER_FITS", "BUSY",
            "UNSUPPORTED", "DEVICE_ERROR", "INTERNAL")
EVICTIONS = ("lru", "lfu", "priority", "fifo", "slru", "s3fifo")
# Refused by the machine of then, not by the cache: not made again.
MACHINE_FAILURES = (3, 8, 9)
# Field of the sequence or sequences; in calls on many the arrays beside them, and (flat array, its counts).
ON_ONE = {"rematch": 0, "fork": 0, "reserve": 0, "append": 0, "commit": 0, "truncate": 0, "close": 0, "shift": 0,
          "set_retention": 0, "send": 0}
ON_TRANSFER = ("commit_transfer", "quarantine", "finish_transfer")
ON_MANY = {"fork_many": (0, [1], []), "commit_many": (0, [1], [(2, 1)]), "truncate_many": (0, [1], []),
           "close_many": (0, [], []), "reorder": (0, [1], []), "accept": (0, [1, 2], [(3, 2)]),
           "prepare": (1, [2], [(3, 2)]), "prepare_ahead": (1, [2], [(3, 2)])}
PREPARES = ("prepare", "prepare_ahead")


class RecordingReplay:
    """One run over a recording."""

    def __init__(self, recording, cache, is_exact, resizes=True):
        self._recording = recording
        self._resizes = resizes  # else the pool is of the size that was asked for
        self._cache = cache
        self._is_exact = is_exact
        self._ids = {}  # of sequences and pins, where they differ: recorded -> here
        self._starts = {}  # not exact: sequence before its first append -> (prompt, recorded hit, hit here)
        self._ahead = {}  # not exact: batch -> (recorded sequences of its last prepare ahead, the fields of that here)
        self._lost = set()  # not exact: recorded ids of sequences that were closed for want of blocks
        self.calls = self.refused = self.requests = self.steps = self.checkpoints = self.skipped = self.diverged = 0
        self.lost = 0
        self.first_difference = None

    def run(self, progress=None):
        for record in self._recording:
            self._replay(record)
            if progress is not None:
                progress.update(self._recording.position)

    def _replay(self, record):
        name = record.name
        if name in ("end", "checkpoint"):
            return self._compare_counts(record)
        if name in ("batch", "batch_destroy"):
            self._cache.call(name, record.fields)
            return None
        if name == "load" and record.status == OK:
            raise RecordingError(self._recording.path, record.offset,
                                 "a snapshot was loaded here; its contents are not in the recording")
        self.calls += 1
        self.refused += record.status != OK
        is_left_out = any(isinstance(field, Numbers) and field.is_left_out for field in record.fields)
        is_left_out = is_left_out or (name == "resize" and not self._resizes)
        if is_left_out or name == "load" or record.status in MACHINE_FAILURES:
            self.skipped += 1
            return None
        if name in ("open", "open_many") and record.status == OK:
            self.requests += 1 if name == "open" else record.fields[1].count
        self.steps += name in PREPARES and record.status == OK
        if self._is_exact:
            return self._replay_exactly(record)
        return self._replay_adapted(record) if record.status == OK else None

    # ---- exactly

    def _replay_exactly(self, record):
        status, results = self._cache.call(record.name, self._translate(record))
        if status != record.status:
            text = f" ({self._cache.last_error()})" if status != OK else ""
            return self._differ(record, f"{STATUSES[record.status]} in the recording, {STATUSES[status]} here{text}")
        if status != OK:
            return None
        for i, (then, now) in enumerate(zip(record.results, results)):
            if i == 0 and record.name in ("open", "open_many", "fork", "fork_many", "pin"):
                self._note_ids(then, now)
            elif isinstance(then, Numbers):
                if then.values is not None and then.values.tolist() != now.tolist():
                    return self._differ(record, f"gave {then.values.tolist()} in the recording, {now.tolist()} here")
            elif then != now:
                return self._differ(record, f"gave {then} in the recording, {now} here")
        return None

    def _differ(self, record, what):
        if self.first_difference is None:
            self.first_difference = f"call {self.calls} (byte {record.offset}), {record.name}: {what}"

    def _compare_counts(self, record):
        if not self._is_exact:
            return
        self.checkpoints += 1
        stats = self._cache.stats()
        for name, then in zip(COUNTS, record.fields):
            if stats[name] != then:
                self._differ(record, f"after it {name} was {then} in the recording and is {stats[name]} here")
                return

    # ---- ids

    def _note_ids(self, then, now):
        pairs = zip(then.values.tolist(), now.tolist()) if isinstance(then, Numbers) else [(then, now)]
        self._ids.update((old, new) for old, new in pairs if old != new)

    def _translate(self, record):
        """The fields with the ids of here."""
        if not self._ids:
            return record.fields
        fields = list(record.fields)
        where = ON_ONE.get(record.name, 0 if record.name == "unpin" or record.name in ON_TRANSFER else None)
        if where is not None:
            fields[where] = self._ids.get(fields[where], fields[where])
        elif record.name in ON_MANY:
            where = ON_MANY[record.name][0]
            ids = fields[where]
            if ids.values is not None:
                values = np.array([self._ids.get(id, id) for id in ids.values.tolist()], dtype=np.uint64)
                fields[where] = Numbers(ids.count, values)
        return fields

    # ---- with another pool or policy

    def _replay_adapted(self, record):
        if record.name in ON_ONE and record.fields[0] in self._lost:
            return
        if record.name == "prepare_ahead":
            self._ahead[record.fields[0]] = (record.fields[1].values, record.fields)
        while True:
            if record.name in ON_MANY:
                self._drop_lost(record)
            fields = self._translate(record)
            if record.name == "append":
                fields[1:] = [self._adapt_tokens(record.fields[0], fields[1])]
            elif record.name in PREPARES:
                fields = self._adapt_prepare(record, fields)
            elif record.name == "settle":
                fields = self._adapt_settle(fields)
            status, results = self._cache.call(record.name, fields)
            if status == OK:
                return self._note_success(record, results)
            loses = record.name in ("append", *PREPARES, "accept", "shift")
            if not loses or status not in (OUT_OF_BLOCKS, NEVER_FITS):
                self.diverged += 1
                return
            if record.name in ON_ONE:
                return self._lose(record.fields[0])
            sequences = record.fields[ON_MANY[record.name][0]].values
            self._lose(int(sequences[self._cache.last_shortage_index()]))

    def _lose(self, id):
        self._cache.call("close", [self._ids.get(id, id)])
        self._lost.add(id)
        self._starts.pop(id, None)
        self.lost += 1

    def _note_success(self, record, results):
        name, fields = record.name, record.fields
        if name in ("open", "pin", "fork", "send", "receive", "commit_transfer"):
            self._note_ids(record.results[0], results[0])
        if name in ("open_many", "fork_many"):
            self._note_ids(record.results[0], results[0])
        if name == "open":
            self._starts[record.results[0]] = (fields[0].values, record.results[1], results[1])
        elif name == "open_many" and fields[1].count > 0:
            ends = np.cumsum(fields[1].values).tolist()
            for i, id in enumerate(record.results[0].values.tolist()):
                prompt = fields[0].values[ends[i] - int(fields[1].values[i]) : ends[i]]
                self._starts[id] = (prompt, int(record.results[1].values[i]), int(results[1][i]))
        elif name == "rematch":
            self._starts[fields[0]] = (fields[1].values, record.results[0], results[0])
        elif name == "fork" and fields[0] in self._starts:
            self._starts[record.results[0]] = self._starts[fields[0]]
        elif name == "append":
            self._starts.pop(fields[0], None)
        elif name in PREPARES and fields[1].values is not None:
            for id in fields[1].values.tolist():
                self._starts.pop(id, None)
        elif name == "close":
            self._starts.pop(fields[0], None)

    def _adapt_tokens(self, id, tokens):
        """What is appended first: what this hit has left of the prompt, then what was appended behind the prompt."""
        start = self._starts.get(id)
        if start is None or tokens.values is None:
            return tokens
        prompt, then, now = start
        history = np.concatenate([prompt[:then], tokens.values])
        return Numbers(len(history) - now, history[now:]) if now <= len(history) else Numbers(0, history[:0])

    def _adapt_prepare(self, record, fields):
        number, sequences, counts, tokens, *rest = fields
        ids = record.fields[1].values
        if ids is None or tokens.values is None or not any(id in self._starts for id in ids.tolist()):
            return fields
        ends = np.cumsum(counts.values).tolist()
        parts = []
        for id, count, end in zip(ids.tolist(), counts.values.tolist(), ends):
            part = tokens.values[end - count : end] if tokens.count else np.full(count, -1, dtype=np.int64)
            parts.append(self._adapt_tokens(id, Numbers(count, part)).values)
        flat = np.concatenate(parts)
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return [number, sequences, Numbers(len(lengths), lengths), Numbers(len(flat), flat), *rest]

    def _adapt_settle(self, fields):
        """Counts for the sequences that the prepare had here; 0 for those lost since."""
        number, counts, tokens = fields
        then, prepared = self._ahead.get(number, (None, None))
        if then is None or counts.count != len(then):
            return fields
        here = np.isin(then, prepared[1].values)
        keep = here & ~np.isin(then, list(self._lost))
        if tokens.values is not None and tokens.count:
            tokens = _keep(tokens, np.repeat(keep, counts.values))
        return [number, _keep(Numbers(len(then), np.where(keep, counts.values, 0)), here), tokens]

    def _drop_lost(self, record):
        """Takes lost sequences out of a call on many."""
        where, beside, flat = ON_MANY[record.name]
        ids = record.fields[where]
        if ids.values is None or not self._lost.intersection(ids.values.tolist()):
            return
        keep = np.array([id not in self._lost for id in ids.values.tolist()])
        if record.name == "reorder":  # places in the call
            sources = record.fields[1].values
            keep &= keep[sources]
            record.fields[1] = Numbers(len(sources), (np.cumsum(keep) - 1)[sources])
        fields = record.fields
        for array, counts in flat:
            if fields[array].values is not None and fields[array].count:
                fields[array] = _keep(fields[array], np.repeat(keep, fields[counts].values))
        for array in [where, *beside]:
            if fields[array].values is not None:
                fields[array] = _keep(fields[array], keep)
        record.results = [_keep(result, keep) for result in record.results]


def _keep(numbers, mask):
    values = np.ascontiguousarray(numbers.values[mask])
    return Numbers(len(values), values)


def run(arguments):
    """Replays a recording, reports, and returns the exit status."""
    _check_arguments(arguments)
    result = _replay(arguments)
    report.emit(result, arguments.json, format_recording)
    return EXIT_FAILED_CHECK if result["verified"] is False else 0


def _check_arguments(arguments):
    for name in ("limit", "hash_block_size", "no_output", "concurrency", "block_size", "memory", "no_prefix_caching",
                 "max_length", "attend", "num_layers", "num_kv_heads", "num_heads", "head_dim", "dtype"):
        if getattr(arguments, name):
            raise CommandError(f"--{name.replace('_', '-')} is for a request trace, not for a recording of calls")


def _replay(arguments):
    """The result as the JSON has it."""
    recording = Recording(arguments.trace)
    options = recording.options
    eviction = None if arguments.eviction is None else EVICTIONS.index(arguments.eviction)
    is_same_size = arguments.num_blocks is None or arguments.num_blocks == options["num_blocks"]
    is_exact = (eviction is None or eviction == options["eviction"]) and is_same_size
    cache = RawCache(recording, arguments.device, arguments.num_blocks, eviction)
    progress = make_progress(recording.size, "bytes")
    start = time.perf_counter()
    try:
        replay = RecordingReplay(recording, cache, is_exact, is_same_size)
        replay.run(progress)
        seconds = time.perf_counter() - start
        stats = cache.stats()
    finally:
        if progress is not None:
            progress.close()
        cache.close()
    num_tokens = stats["queried_tokens"] + stats["appended_tokens"]
    return {
        "requests": replay.requests,
        "prompt_tokens": stats["queried_tokens"],
        "hit_tokens": stats["hit_tokens"],
        "hit_rate": stats["hit_tokens"] / max(stats["queried_tokens"], 1),
        "appended_tokens": stats["appended_tokens"],
        "evictions": stats["evictions"],
        "copies": stats["copies"],
        "rejected": replay.lost,
        "peak_blocks": stats["peak_held_blocks"],
        "steps": replay.steps,
        "calls": replay.calls,
        "refused_calls": replay.refused,
        "skipped_calls": replay.skipped,
        "diverged_calls": replay.diverged,
        "checkpoints": replay.checkpoints,
        "is_complete": recording.is_complete,
        "verified": replay.first_difference is None if is_exact else None,
        "first_difference": replay.first_difference,
        "manager_ns_per_call": cache.manager_ns / max(replay.calls, 1),
        "manager_ns_per_token": cache.manager_ns / max(num_tokens, 1),
        "manager_seconds": cache.manager_ns / 1e9,
        "seconds": seconds,
        "trace": recording.path,
        "format": "recording",
        "library_version": recording.library_version,
        "device": stats["device"],
        "block_size": options["block_size"],
        "num_blocks": stats["num_blocks"],
        "block_bytes": stats["block_bytes"],
        "eviction": EVICTIONS[options["eviction"] if eviction is None else eviction],
        "prefix_caching": options["prefix_caching"] == 1,
    }


def format_recording(result):
    """The table of a replay of calls."""
    count, percent, nanoseconds = report.format_count, report.format_percent, report.format_nanoseconds
    rows = [
        ("calls", count(result["calls"])),
        ("refused then", count(result["refused_calls"])),
        ("requests", count(result["requests"])),
        ("prompt tokens", count(result["prompt_tokens"])),
        ("prefix hits", count(result["hit_tokens"]), f"{percent(result['hit_rate'])} of prompt tokens"),
        ("appended tokens", count(result["appended_tokens"])),
        ("evictions", count(result["evictions"]), "blocks"),
        ("copies", count(result["copies"]), "blocks"),
        ("peak blocks", count(result["peak_blocks"]),
         f"{percent(result['peak_blocks'] / result['num_blocks'])} of {count(result['num_blocks'])}"),
        ("steps", count(result["steps"])),
        ("manager per call", nanoseconds(result["manager_ns_per_call"])),
        ("manager per token", nanoseconds(result["manager_ns_per_token"]), "hits included"),
        ("time", f"{result['seconds']:.2f} s", f"{result['manager_seconds']:.2f} s of it in the manager"),
    ]
    if result["rejected"]:
        rows.append(("closed", count(result["rejected"]), "sequences for want of blocks"))
    if result["diverged_calls"]:
        rows.append(("other refusals", count(result["diverged_calls"]), "of calls that succeeded then"))
    if result["skipped_calls"]:
        rows.append(("not made", count(result["skipped_calls"]), "failures of the machine, or arguments left out"))
    if result["verified"] is None:
        verdict = "Not compared with the recording: the pool or the policy is another one."
    elif result["verified"]:
        verdict = f"Every call did what it did then; so say {count(result['checkpoints'])} checkpoints, too."
    else:
        verdict = f"DIFFERENT: {result['first_difference']}"
    lines = [
        f"{result['trace']} (recording by version {result['library_version']}), {result['device']}: blocks of "
        f"{result['block_size']} tokens, {result['eviction']}" +
        ("" if result["prefix_caching"] else ", no prefix caching"),
        "",
        *report.format_rows(rows, 1),
        "",
        verdict,
    ]
    if not result["is_complete"]:
        lines.append("The recording was cut off; this is what there is of it.")
    return "\n".join(lines)
