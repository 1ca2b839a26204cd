"""Times the host kernels: decode and prefill attention and write_kv, for every instruction set and dtype, on one thread
and on all, beside what the machine gives and what PyTorch makes of it.

    python benchmarks/host_kernels.py [--output FILE]

Decode: one new token for each of 8 sequences of 4096; prefill: one sequence of 1024 new tokens. One layer of 32 query
and 8 KV heads of 128 elements, blocks of 16 tokens, queries of the dtype of K and V, bfloat16 where that has 8 bits.
Rates of decode count the K and V bytes that are read, of write_kv those that are stored, of prefill two operations for
each multiply-add under the causal mask. Fastest and median of the runs after a warm-up.

The ceilings of the same run: bytes that a plain reduction reads from memory (the fastest of five of NumPy's), those
that a copy reads and writes, the rate of NumPy's float32 matrix product of 2048. If PyTorch is installed, its
scaled_dot_product_attention has the same sizes over contiguous K and V, with queries of the dtype of K and V; at decode
the four query heads of a KV head are given to it as four queries, which is the fastest way to ask.

One thread is timed by processor time, so that other work on the machine counts little; several threads by the clock.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # what measure_read() shares out itself
import numpy as np  # noqa: E402
from replay_traces import ROOT, describe_machine, find_commit  # noqa: E402

import pagedkv  # noqa: E402

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
NUM_SEQUENCES, CONTEXT, PROMPT = 8, 4096, 1024
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int8"]
ISAS = ["amx", "avx512bf16", "avx512", "avx2", "neon", "scalar"]
NUM_RUNS = 7
PREFILL_OPERATIONS = 4 * NUM_HEADS * HEAD_DIM * PROMPT * (PROMPT + 1) / 2
clock = time.process_time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/host-kernels-DATE.json")
    arguments = parser.parse_args()
    date = datetime.date.today().isoformat()
    isas = list(filter(has_isa, ISAS))
    pagedkv.set_num_threads(0)
    all_threads = pagedkv.num_threads()
    rows, ceilings = [], []
    for threads in sorted({1, all_threads}):
        pagedkv.set_num_threads(threads)
        global clock
        clock = time.process_time if threads == 1 else time.perf_counter
        ceilings.append({"threads": threads, "read_gb_per_s": measure_read(threads),
                         "sgemm_gflop_per_s": measure_sgemm(threads)})
        print(ceilings[-1], file=sys.stderr)
        for isa in isas if threads == 1 else isas[:1]:
            pagedkv.set_isa(isa)
            for dtype in DTYPES:
                rows.append({"threads": threads, "isa": isa, "dtype": dtype, **measure(dtype)})
                if isa == isas[0]:
                    rows[-1].update(measure_torch(dtype, threads))
                print(rows[-1], file=sys.stderr)
    report = {"date": date, "machine": describe_machine(), "version": pagedkv.version(), "commit": find_commit(),
              "torch": find_torch_version(), "runs_each": NUM_RUNS, "copy_gb_per_s": measure_copy(),
              "ceilings": ceilings, "rows": rows}
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
        q = as_queries(rng.standard_normal((PROMPT, NUM_HEADS, HEAD_DIM), dtype=np.float32), dtype)
        out = np.empty_like(q)
        seconds = time_runs(lambda: cache.attend(0, batch, q, out=out))
        results["prefill_gflop_per_s"] = rates(PREFILL_OPERATIONS / 1e9, seconds)

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


def as_queries(array, kv_dtype):
    if kv_dtype in ("float32", "float16"):
        return array.astype(kv_dtype)
    return (array.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16


def measure_torch(dtype, threads):
    """Nothing without PyTorch, and for the dtypes that its attention does not take."""
    try:
        import torch
    except ImportError:
        return {}
    torch_dtype = getattr(torch, dtype, None)
    if dtype not in ("float32", "float16", "bfloat16") or torch_dtype is None:
        return {}
    torch.set_num_threads(threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    make = lambda *shape: torch.randn(*shape, dtype=torch_dtype)  # noqa: E731
    with torch.inference_mode():
        q, k, v = (make(NUM_SEQUENCES, NUM_KV_HEADS, length, HEAD_DIM)
                   for length in (NUM_HEADS // NUM_KV_HEADS, CONTEXT, CONTEXT))
        seconds = time_runs(lambda: attend(q, k, v))
        decode = rates(2 * k.numel() * k.element_size() / 1e9, seconds)
        q, k, v = (make(1, heads, PROMPT, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
        k, v = (array.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for array in (k, v))
        seconds = time_runs(lambda: attend(q, k, v, is_causal=True))
    return {"torch_decode_gb_per_s": decode, "torch_prefill_gflop_per_s": rates(PREFILL_OPERATIONS / 1e9, seconds)}


def find_torch_version():
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__


def measure_read(threads):
    array, vector = np.ones(1 << 26, np.float32), np.ones(1 << 12, np.float32)
    reductions = [lambda part: part.dot(part), np.max, lambda part: np.bitwise_or.reduce(part.view(np.uint64)),
                  lambda part: np.max(part.view(np.int8)),
                  lambda part: part.reshape(-1, vector.size) @ vector]  # several rows at once: several streams
    parts = np.split(array, threads)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        run = (lambda f: f(array)) if threads == 1 else (lambda f: list(pool.map(f, parts)))
        found = [rates(array.nbytes / 1e9, time_runs(lambda f=f: run(f))) for f in reductions]
    return max(found, key=lambda rate: rate["fastest"])


def measure_sgemm(threads):
    """In a process of its own: BLAS libraries read their number of threads when they are loaded."""
    program = f"""
import time, numpy as np
a, seconds = np.random.default_rng(0).standard_normal((2048, 2048), np.float32), []
for _ in range({NUM_RUNS} + 1):
    start = time.perf_counter()
    a @ a
    seconds.append(time.perf_counter() - start)
print(*seconds[1:])
"""
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **dict.fromkeys(names, str(threads))},
                          check=True, capture_output=True, text=True)
    return rates(2 * 2048**3 / 1e9, [float(word) for word in done.stdout.split()])


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
