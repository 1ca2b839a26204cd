"""Times the cache manager through the Python API: the pool, prefix hits, decode steps, eviction, shared and growing prompts.

    python benchmarks/manager.py [--trace FILE] [--output FILE]           pagedkv alone
    python benchmarks/manager.py --peers-result FILE [--output FILE]      beside its peers, as measured

Alone, each workload runs in rounds behind a warm-up; a figure is the median, the 99th percentile and the mean of the calls
of all rounds, in microseconds. Tokens are int64 arrays made beforehand; blocks hold 16 tokens. A trace is one of Mooncake's
(lines of input_length and hash_ids, each id 512 tokens); 32 of its requests live at a time.

A file of --peers-result is what a comparison with other managers has written: an object with "machine", "managers" (by
name: "version") and "rows": {"row", "managers": {name: {"p50_us", "p99_us", "mean_us", "hit_rate"}}, "best_peer",
"ratio_p50", "ratio_p99", "ratio_mean"}, with this library under the name "pagedkv". All of a row is measured in one run,
by turns. benchmarks/tables.py makes the tables of the documents from the newest file in benchmarks/results.
"""

import argparse
import datetime
import gc
import json
import pathlib
import statistics
import sys
import time
from collections import deque

import numpy as np
from replay_traces import ROOT, describe_machine, find_commit

import pagedkv

BLOCK_SIZE = 16
VOCABULARY = 128_256
WINDOW = 32  # requests that live at a time
LAYOUT = pagedkv.Layout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float8_e4m3", block_size=BLOCK_SIZE)
NUM_ROUNDS = 8
clock = time.perf_counter_ns


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=pathlib.Path, help="a Mooncake trace")
    parser.add_argument("--trace-requests", type=int, default=3000, help="of its beginning; default %(default)s")
    parser.add_argument("--peers-result", type=pathlib.Path, help="the JSON file of a comparison")
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/manager-DATE.json, or with peers "
                        "manager-peers-DATE.json")
    arguments = parser.parse_args()
    date = datetime.date.today().isoformat()
    report = {"date": date, "machine": describe_machine(), "version": pagedkv.version(), "commit": find_commit()}
    if arguments.peers_result is not None:
        report.update(read_comparison(arguments.peers_result))
    else:
        report["rows"] = measure_alone(arguments)
    kind = "manager" if arguments.peers_result is None else "manager-peers"
    output = arguments.output or ROOT / "benchmarks" / "results" / f"{kind}-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


def read_comparison(path):
    """What of a comparison is worth keeping."""
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in document["rows"]:
        best = row["best_peer"]
        if best is None or "pagedkv" not in row["managers"]:
            continue
        kept = {"name": row["row"], "best_peer": best}
        for key, name in (("ours", "pagedkv"), ("best", best)):
            kept[key] = {figure: round(row["managers"][name][figure], 3) for figure in ("p50_us", "p99_us", "mean_us")}
            kept[key]["hit_rate"] = row["managers"][name]["hit_rate"]
        kept["ratio"] = {key: row[f"ratio_{key}"] and round(row[f"ratio_{key}"], 4) for key in ("p50", "p99", "mean")}
        rows.append(kept)
    versions = {name: about["version"] for name, about in document["managers"].items()}
    return {"peers": versions, "seconds": document["seconds"], "rows": rows}


def measure_alone(arguments):
    workloads = [(f"pool, {count} blocks", lambda count=count: measure_pool(count)) for count in (1, 10, 100, 1000)]
    workloads += [
        ("prefix hit of 8192 tokens", measure_hit),
        ("decode step of 256", measure_decode),
        ("evict on every admit", measure_eviction),
        ("shared system prompts", measure_shared),
        ("multi-turn growth", measure_turns),
    ]
    if arguments.trace is not None:
        workloads += [(f"trace {arguments.trace.stem} {blocks // 1000}k blocks",
                       lambda blocks=blocks: measure_trace(arguments.trace, arguments.trace_requests, blocks))
                      for blocks in (25_000, 100_000, 400_000)]
    rows = []
    for name, measure in workloads:
        gc.collect()
        gc.disable()
        try:
            results = measure()
        finally:
            gc.enable()
        for suffix, times, hit_rate in results:
            rows.append({"name": name + suffix, "ours": {**summarize(times), "hit_rate": hit_rate}})
            print(rows[-1], file=sys.stderr)
    return rows


def summarize(times):
    ordered = sorted(times)
    return {"p50_us": round(ordered[len(ordered) // 2] / 1e3, 3),
            "p99_us": round(ordered[len(ordered) * 99 // 100] / 1e3, 3),
            "mean_us": round(statistics.fmean(ordered) / 1e3, 3), "samples": len(ordered)}


def make_text(rng, length):
    return rng.integers(0, VOCABULARY, length, dtype=np.int64)


class Manager:
    """A cache, a batch, and the sequences that live in it, oldest first."""

    def __init__(self, num_blocks):
        self.cache = pagedkv.Cache(LAYOUT, num_blocks=num_blocks, device="host")
        self.batch = self.cache.batch(max_sequences=512, max_tokens=1 << 18)
        self.live = deque()
        self.num_held = deque()
        self.tokens = self.hit_tokens = 0

    def make_room(self, num_tokens, window):
        """How many of the oldest have to go before a request of so many tokens comes in."""
        needed, gone = -(-num_tokens // BLOCK_SIZE), 0
        while self.num_held and (len(self.num_held) >= window or sum(self.num_held) + needed > self.cache.num_blocks):
            self.num_held.popleft()
            gone += 1
        self.num_held.append(needed)
        return gone

    def admit(self, tokens, window=WINDOW):
        """Releases, opens and prepares; the time that it took."""
        gone = self.make_room(len(tokens), window)
        live, batch = self.live, self.batch
        begin = clock()
        for _ in range(gone):
            live.popleft().close()
        sequence = self.cache.open(tokens)
        num_hit = sequence.num_cached_tokens
        batch.prepare([sequence], [len(tokens) - num_hit], tokens=tokens[num_hit:])
        live.append(sequence)
        took = clock() - begin
        self.tokens += len(tokens)
        self.hit_tokens += num_hit
        return took

    def hit_rate(self):
        return round(self.hit_tokens / self.tokens, 4)


def measure_pool(count):
    pool = pagedkv.Pool(block_bytes=LAYOUT.block_bytes, num_blocks=100_000, device="host")
    repeat = max(1, 100 // count)  # so that the clock does not weigh on short calls
    allocations, frees = [], []
    for _ in range(30 * NUM_ROUNDS):
        begin = clock()
        held = [pool.allocate(count) for _ in range(repeat)]
        middle = clock()
        for blocks in held:
            pool.free(blocks)
        end = clock()
        allocations.append((middle - begin) / repeat)
        frees.append((end - middle) / repeat)
    return [(": allocate", allocations, None), (": free", frees, None)]


def measure_admissions(num_blocks, window, warm_up, requests):
    manager = Manager(num_blocks)
    for tokens in warm_up:
        manager.admit(tokens, 1)
    times = [manager.admit(tokens, window) for tokens in requests]
    return [("", times, manager.hit_rate())]


def measure_hit():
    rng = np.random.default_rng(1)
    prefix = make_text(rng, 8192)
    requests = [np.concatenate([prefix, make_text(rng, 64)]) for _ in range(20 * NUM_ROUNDS)]
    return measure_admissions(100_000, 1, [prefix], requests)


def measure_eviction():
    rng = np.random.default_rng(2)
    warm_up = (make_text(rng, 80) for _ in range(20_000))
    return measure_admissions(100_000, 1, warm_up, [make_text(rng, 640) for _ in range(20 * NUM_ROUNDS)])


def measure_shared():
    rng = np.random.default_rng(3)
    prompts = [make_text(rng, 2048) for _ in range(8)]
    requests = [np.concatenate([prompts[rng.integers(8)], make_text(rng, rng.integers(64, 513))])
                for _ in range(100 * NUM_ROUNDS)]
    return measure_admissions(8_000, WINDOW, [], requests)


def measure_turns():
    rng = np.random.default_rng(4)
    chats = [np.empty(0, np.int64)] * 64
    turns = [0] * 64
    requests = []
    for _ in range(100 * NUM_ROUNDS):
        chat = rng.integers(64)
        if turns[chat] == 20:  # a new one takes its place
            chats[chat], turns[chat] = np.empty(0, np.int64), 0
        turns[chat] += 1
        chats[chat] = np.concatenate([chats[chat], make_text(rng, rng.integers(100, 501))])
        requests.append(chats[chat])
    return measure_admissions(20_000, WINDOW, [], requests)


def measure_decode():
    rng = np.random.default_rng(5)
    manager = Manager(40_000)
    for _ in range(256):
        manager.admit(make_text(rng, 1024), 256)
    times = []
    for _ in range(16 * NUM_ROUNDS):
        tokens = make_text(rng, 256)
        begin = clock()
        sequences = list(manager.live)
        manager.batch.prepare(sequences, [1] * len(tokens), tokens=tokens)
        times.append(clock() - begin)
    return [("", times, None)]


def measure_trace(path, num_requests, num_blocks):
    manager = Manager(num_blocks)
    offsets = np.arange(512, dtype=np.uint64)
    times = []
    with path.open(encoding="utf-8") as file:
        for _, line in zip(range(num_requests), file):
            request = json.loads(line)
            keys = np.array(request["hash_ids"], dtype=np.uint64)[:, None] * np.uint64(512) + offsets
            mixed = keys.reshape(-1)[:request["input_length"]] * np.uint64(0x9E3779B97F4A7C15)
            tokens = ((mixed >> np.uint64(32)) % np.uint64(VOCABULARY)).astype(np.int64)
            if len(tokens) <= num_blocks * BLOCK_SIZE:
                times.append(manager.admit(tokens))
    return [("", times, manager.hit_rate())]


if __name__ == "__main__":
    main()
