"""Times the CUDA kernels that move rows, and the zeroing of blocks, beside the machine's copy ceiling.

    python benchmarks/cuda_rows.py [--commit HASH] [--output FILE]

Needs PyTorch, CuPy and a GPU. Each case works on several layers or sets, together larger than the L2 cache; the calls
over all of them are captured in one CUDA graph, and the figure is the median of its replays divided by their number.
Counted are the bytes that must be read and written. The ceiling is a plain kernel that copies two gigabytes, 16 bytes
at a time.
Head dimension 128, 8 KV heads, blocks of 16 tokens in random order, bfloat16 given.
"""

import datetime
import json
import statistics
import sys

import cupy
import numpy as np
import torch
from cuda_kernels import HEAD_DIM, NUM_REPLAYS, Case, stream, time_graph
from replay_traces import ROOT, find_commit, make_parser

import pagedkv

HEADS = (32, 8)
COPY_BYTES = 2 << 30
ROW_BYTES = 2 * HEADS[1] * HEAD_DIM  # of K and V of a token, 8 bits an element
TOKENS = {"256 tokens": [1] * 256, "8192 tokens": [2048] * 4, "65536 tokens": [8192] * 8}

COPY_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(256) copy_all(const uint4 *from, uint4 *to, long long count) {
  const long long first = (long long)blockIdx.x * 1024 + threadIdx.x;
  uint4 part[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) if (first + j * 256 < count) part[j] = from[first + j * 256];
#pragma unroll
  for (int j = 0; j < 4; ++j) if (first + j * 256 < count) to[first + j * 256] = part[j];
}
"""


def main():
    arguments = make_parser(__doc__, "cuda-rows").parse_args()
    date = datetime.date.today().isoformat()
    ceiling = measure_copying()
    report = {"date": date, "version": pagedkv.version(), "commit": arguments.commit or find_commit(),
              "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
              "replays": NUM_REPLAYS, "copy_gb_per_s": ceiling, "rows": []}
    for name, shape, us, moved in walk_cases():
        row = {"kernel": name, "shape": shape, "us": us, "gb_per_s": moved / us / 1e3,
               "share_of_copy_ceiling": moved / us / 1e3 / ceiling}
        report["rows"].append(row)
        print(row, file=sys.stderr)
    output = arguments.output or ROOT / "benchmarks" / "results" / f"cuda-rows-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


def walk_cases():
    """(kernel, shape, microseconds, bytes moved)"""
    for shape, counts in TOKENS.items():
        yield from time_writes(shape, counts)
        yield from time_sequence(shape, sum(counts))
    for tokens in (64, 2048, 32768):
        yield time_merge(tokens)
    for blocks in (16, 256):
        yield time_zeroing(blocks)


def time_writes(shape, counts):
    tables = torch.randn(max(counts), HEAD_DIM, device="cuda")
    for name, dtype, rope, layout in (
            ("write_kv", "bfloat16", None, {}), ("write_kv, angles of a table", "bfloat16", {"cos_sin": tables}, {}),
            ("write_kv, angles by base", "bfloat16", {}, {}),
            ("write_kv to E4M3, static scales", "float8_e4m3", None, {}),
            ("write_kv to E4M3, scales of rows", "float8_e4m3", None, {"kv_scales": "token_head"}),
            ("write_kv to int8, scales of rows", "int8", None, {"kv_scales": "token_head"}),
            ("write_kv to E4M3, scales of rows, angles of a table", "float8_e4m3", {"cos_sin": tables},
             {"kv_scales": "token_head"}),
            ("write_kv to E4M3, static scales, angles by base", "float8_e4m3", {}, {}),
            ("write_kv to int8, scales of rows, angles by base", "int8", {}, {"kv_scales": "token_head"})):
        case = Case(HEADS, dtype, counts, counts, **layout)
        given = None if rope is None else pagedkv.Rope(**rope)
        us = time_graph([lambda layer=layer: case.cache.write_kv(layer, case.batch, case.k, case.v, stream=stream(),
                                                                 rope=given) for layer in range(case.num_layers)])
        yield name, shape, us, sum(counts) * ROW_BYTES * (2 + case.element_bytes)
        case.close()


def time_sequence(shape, tokens):
    """Rows of one sequence out of the cache and back."""
    case = Case(HEADS, "bfloat16", [tokens], [tokens])
    for name, move in (("gather_kv", lambda layer: case.cache.gather_kv(layer, case.batch, 0, 0, tokens, case.k, case.v,
                                                                        stream=stream())),
                       ("scatter_kv", lambda layer: case.cache.scatter_kv(layer, case.batch, 0, 0, case.k, case.v,
                                                                          stream=stream()))):
        us = time_graph([lambda layer=layer: move(layer) for layer in range(case.num_layers)])
        yield name, shape, us, tokens * ROW_BYTES * 4
    case.close()


def time_merge(tokens):
    sets = max(1, (256 << 20) // (tokens * HEADS[0] * HEAD_DIM * 6))
    outs = torch.randn(3, sets, tokens, HEADS[0], HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    lses = torch.randn(3, sets, tokens, HEADS[0], device="cuda")
    us = time_graph([lambda i=i: pagedkv.merge_states(outs[0][i], lses[0][i], outs[1][i], lses[1][i], out=outs[2][i],
                                                      lse=lses[2][i], stream=stream()) for i in range(sets)])
    return "merge_states", f"{tokens} tokens of {HEADS[0]} heads", us, tokens * HEADS[0] * (HEAD_DIM * 6 + 12)


def time_zeroing(num_blocks):
    pool = pagedkv.Pool(2 << 20, num_blocks=512, device="cuda")
    blocks = np.random.default_rng(0).permutation(np.asarray(pool.allocate(512)))[:num_blocks].astype(np.int32)
    us = time_graph([lambda: pool.zero_blocks(blocks, stream=stream())])
    return "zero_blocks", f"{num_blocks} blocks of 2 MiB", us, num_blocks * (2 << 20)


def measure_copying():
    data = torch.randint(0, 2**31 - 1, (2, COPY_BYTES // 4), dtype=torch.int32, device="cuda")
    kernel, count, times = cupy.RawKernel(COPY_KERNEL, "copy_all"), COPY_BYTES // 16, []
    for _ in range(3 + NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with cupy.cuda.ExternalStream(stream()):
            kernel((count // 1024,), (256,), (data[0].data_ptr(), data[1].data_ptr(), np.int64(count)))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return 2 * COPY_BYTES / statistics.median(times[3:]) / 1e3


if __name__ == "__main__":
    main()
