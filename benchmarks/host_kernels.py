"""Times the host kernels: decode and prefill attention and write_kv, for every instruction set and dtype.

    python benchmarks/host_kernels.py [--threads N] [--output FILE]

Decode: one new token for each of 8 sequences of 4096; prefill: one sequence of 1024 new tokens. One layer of 32 query
and 8 KV heads of 128 elements, blocks of 16 tokens, queries float32. Rates of decode count the K and V bytes that are
read, of write_kv those that are stored, of prefill two operations for each multiply-add under the causal mask. Beside
them stands what this machine copies: bytes read and written. Fastest and median of the runs after a warm-up.

One thread, the default, is timed by processor time, so that other work on the machine counts little; several threads by
the clock.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import time

import numpy as np
from replay_traces import ROOT, describe_machine, find_commit

import pagedkv

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
NUM_SEQUENCES, CONTEXT, PROMPT = 8, 4096, 1024
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int8"]
ISAS = ["avx512", "avx2", "scalar"]
NUM_RUNS = 7
clock = time.process_time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of the kernels; 0: one for each processor")
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/host-kernels-DATE.json")
    arguments = parser.parse_args()
    date = datetime.date.today().isoformat()
    pagedkv.set_num_threads(arguments.threads)
    global clock
    clock = time.process_time if pagedkv.num_threads() == 1 else time.perf_counter
    rows = []
    for isa in filter(has_isa, ISAS):
        pagedkv.set_isa(isa)
        for dtype in DTYPES:
            rows.append({"isa": isa, "dtype": dtype, **measure(dtype)})
            print(rows[-1], file=sys.stderr)
    report = {"date": date, "machine": describe_machine(), "version": pagedkv.version(), "commit": find_commit(),
              "threads": pagedkv.num_threads(), "runs_each": NUM_RUNS, "copy_gb_per_s": measure_copy(), "rows": rows}
    output = arguments.output or ROOT / "benchmarks" / "results" / f"host-kernels-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


def has_isa(name):
    try:
        pagedkv.set_isa(name)
    except pagedkv.UnsupportedError:
        return False
    return True


def measure(dtype):
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype,
                            block_size=BLOCK_SIZE)
    num_blocks = NUM_SEQUENCES * CONTEXT // BLOCK_SIZE
    rng = np.random.default_rng(0)
    results = {}
    with pagedkv.Cache(layout, num_blocks=num_blocks, device="host") as cache:
        batch = cache.batch(max_sequences=NUM_SEQUENCES, max_tokens=NUM_SEQUENCES * CONTEXT)
        sequences = [cache.open([]) for _ in range(NUM_SEQUENCES)]

        batch.prepare(sequences[:1], [PROMPT])
        k, v = (rng.standard_normal((PROMPT, NUM_KV_HEADS, HEAD_DIM), dtype=np.float32) for _ in range(2))
        seconds = time_runs(lambda: cache.write_kv(0, batch, k, v))
        results["write_kv_gb_per_s"] = rates(PROMPT * layout.token_bytes / 1e9, seconds)
        q = rng.standard_normal((PROMPT, NUM_HEADS, HEAD_DIM), dtype=np.float32)
        out = np.empty_like(q)
        seconds = time_runs(lambda: cache.attend(0, batch, q, out=out))
        operations = 4 * NUM_HEADS * HEAD_DIM * PROMPT * (PROMPT + 1) / 2
        results["prefill_gflop_per_s"] = rates(operations / 1e9, seconds)

        for first in range(0, CONTEXT - 1, PROMPT):  # fills the sequences, but for one token
            for sequence in sequences:
                count = min(PROMPT, CONTEXT - 1 - first) - (PROMPT if sequence is sequences[0] and first == 0 else 0)
                if count > 0:
                    batch.prepare([sequence], [count])
                    cache.write_kv(0, batch, k[:count], v[:count])
        batch.prepare(sequences, [1] * NUM_SEQUENCES)
        cache.write_kv(0, batch, k[:NUM_SEQUENCES], v[:NUM_SEQUENCES])
        q, out = q[:NUM_SEQUENCES], out[:NUM_SEQUENCES]
        seconds = time_runs(lambda: cache.attend(0, batch, q, out=out))
        results["decode_gb_per_s"] = rates(NUM_SEQUENCES * CONTEXT * layout.token_bytes / 1e9, seconds)
        for sequence in sequences:
            sequence.close()
        batch.close()
    return results


def measure_copy():
    source = np.ones(1 << 26, np.float32)
    destination = np.empty_like(source)
    return rates(2 * source.nbytes / 1e9, time_runs(lambda: np.copyto(destination, source)))


def time_runs(run):
    run()
    seconds = []
    for _ in range(NUM_RUNS):
        start = clock()
        run()
        seconds.append(clock() - start)
    return seconds


def rates(amount, seconds):
    return {"fastest": round(amount / min(seconds), 2), "median": round(amount / statistics.median(seconds), 2)}


if __name__ == "__main__":
    main()
