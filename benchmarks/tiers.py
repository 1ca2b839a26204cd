"""The tiers: GB/s of offload and restore beside a plain copy, of the disk tier, and what a decode step loses while blocks
are offloaded beside it.

    python benchmarks/tiers.py                          on the host backend
    python benchmarks/tiers.py --device cuda:0          pinned copies with CuPy are the link's ceiling
    python benchmarks/tiers.py --disk /mnt/nvme/tier    measures the disk tier there (a file of 1 GiB at most)
    python benchmarks/tiers.py --json results.json
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time

import numpy as np

import pagedkv

BLOCK_SIZE = 16
NUM_BLOCKS = 256
SMALL_HEADS = [1, 2, 4, 8, 16, 32]  # of one layer with heads of 64: blocks of 4 KiB each
SMALL_TOTAL = 64 << 20              # bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="host")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--disk", help="path of the disk tier's file; without it the disk is not measured")
    parser.add_argument("--json", help="write the results to this file, - for standard output")
    arguments = parser.parse_args()
    layout = pagedkv.Layout(num_layers=arguments.layers, num_kv_heads=8, head_dim=128, dtype="bfloat16",
                            block_size=BLOCK_SIZE)
    report = {
        "date": datetime.date.today().isoformat(), "version": pagedkv.__version__, "device": arguments.device,
        "processor": platform.processor() or platform.machine(), "num_cpus": os.cpu_count(),
        "block_bytes": layout.block_bytes, "num_blocks": NUM_BLOCKS, "repeats": arguments.repeats,
        "copy_gb_per_s": summarize(measure_plain_copy(arguments.device, layout, arguments.repeats)),
        **measure_host_tier(arguments.device, layout, NUM_BLOCKS, arguments.repeats),
        "small_blocks": [measure_small_blocks(arguments.device, heads, arguments.repeats) for heads in SMALL_HEADS],
        **measure_steps(arguments.device, layout),
    }
    if arguments.disk is not None:
        report.update(measure_disk_tier(arguments.device, layout, arguments.disk))
    for name in ("offload_gb_per_s", "restore_gb_per_s"):
        report[name.replace("gb_per_s", "share_of_copy")] = round(report[name]["fastest"] / report["copy_gb_per_s"]["fastest"], 3)
    if arguments.json not in (None, "-"):
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    elif arguments.json == "-":
        json.dump(report, sys.stdout, indent=1)
        print()
        return
    for name, value in report.items():
        for row in value if isinstance(value, list) else [value]:
            print(f"{name:28} {row}")


def summarize(rates):
    return {"fastest": round(max(rates), 3), "median": round(statistics.median(rates), 3)}


def wait_for(device):
    if device.startswith("cuda"):
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def measure_plain_copy(device, layout, repeats):
    """GB/s of one copy of the same bytes: numpy on the host, pinned memory to the device on CUDA."""
    num_bytes = layout.block_bytes * NUM_BLOCKS
    if device.startswith("cuda"):
        import cupy

        pinned = cupy.cuda.alloc_pinned_memory(num_bytes)
        target = cupy.empty(num_bytes, cupy.uint8)

        def copy():
            target.data.copy_from_host(pinned.ptr, num_bytes)
    else:
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

        def copy():
            np.copyto(target, source)

    rates = []
    for _ in range(repeats + 2):
        wait_for(device)
        start = time.perf_counter()
        copy()
        wait_for(device)
        rates.append(num_bytes / (time.perf_counter() - start) / 1e9)
    return rates[2:]


def fill(cache, first, num_blocks):
    """A cached prefix of so many blocks that nobody holds; its tokens."""
    tokens = np.arange(first, first + num_blocks * BLOCK_SIZE + 1, dtype=np.int64)
    sequence = cache.open(tokens)
    sequence.append(tokens[sequence.length:-1])
    sequence.close()
    return tokens


def measure_host_tier(device, layout, num_blocks, repeats):
    cache = pagedkv.Cache(layout, num_blocks=num_blocks, device=device, host_tier=2 * num_blocks * layout.block_bytes)
    num_bytes = num_blocks * layout.block_bytes
    offloads, restores = [], []
    for i in range(repeats + 2):
        cache.reset()
        tokens = fill(cache, 10 ** 6 * (i + 1), num_blocks)
        cache.flush_tiers()
        start = time.perf_counter()
        cache.evict(num_blocks)
        cache.flush_tiers()
        offloads.append(num_bytes / (time.perf_counter() - start) / 1e9)
        start = time.perf_counter()
        sequence = cache.open(tokens)
        cache.flush_tiers()
        restores.append(num_bytes / (time.perf_counter() - start) / 1e9)
        assert sequence.num_cached_tokens == num_blocks * BLOCK_SIZE
        sequence.close()
    stats = cache.stats()
    return {"offload_gb_per_s": summarize(offloads[2:]), "restore_gb_per_s": summarize(restores[2:]),
            "offload_transfer_gb_per_s": round(stats["offload_rate"] / 1e9, 3),
            "restore_transfer_gb_per_s": round(stats["restore_rate"] / 1e9, 3)}


def measure_small_blocks(device, num_kv_heads, repeats):
    """Offload and restore of blocks so small that it matters how they are copied. The transfers by themselves, too: the
    work of the manager is by block, and more than that of the link for the smallest."""
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=num_kv_heads, head_dim=64, dtype="bfloat16",
                            block_size=BLOCK_SIZE)
    num_blocks = SMALL_TOTAL // layout.block_bytes
    return {"block_bytes": layout.block_bytes, "num_blocks": num_blocks,
            **measure_host_tier(device, layout, num_blocks, repeats)}


def measure_steps(device, layout, num_sequences=32, num_steps=200):
    """Microseconds of a decode step's prepare: without a tier, and with blocks evicted to a tier in every step. On the
    host the copy is part of the call; on a device what is lost is the wait of the step's stream, measured to its end."""
    medians = {}
    for name, host_tier in (("evicting", None), ("offloading", 64 * layout.block_bytes)):
        cache = pagedkv.Cache(layout, num_blocks=NUM_BLOCKS, device=device, host_tier=host_tier)
        batch = cache.batch(max_sequences=num_sequences, max_tokens=4 * BLOCK_SIZE * num_sequences)
        sequences = [cache.open([]) for _ in range(num_sequences)]
        fill(cache, 10 ** 7, NUM_BLOCKS - 3 * num_sequences)
        times = []
        for step in range(num_steps):
            if step % BLOCK_SIZE == 0:  # every sequence takes a block: what is evicted is offloaded
                for sequence in sequences:
                    sequence.truncate(0)
                fill(cache, 10 ** 8 + 10 ** 5 * step, NUM_BLOCKS - 3 * num_sequences)
                cache.flush_tiers()
            counts = [BLOCK_SIZE if step % 2 else 1] * num_sequences
            ids = np.arange(sum(counts), dtype=np.int64) + 1000 * step
            wait_for(device)
            start = time.perf_counter()
            try:
                batch.prepare(sequences, counts, tokens=ids)
            except pagedkv.OutOfBlocksError:
                for sequence in sequences:
                    sequence.truncate(0)
                continue
            wait_for(device)
            times.append((time.perf_counter() - start) * 1e6)
        stats = cache.stats()
        medians[f"step_us_{name}"] = round(statistics.median(times), 1)
        medians[f"step_us_{name}_mean"] = round(statistics.mean(times), 1)
        if host_tier is not None:
            medians["blocks_offloaded_per_step"] = round(stats["offloaded_blocks"] / num_steps, 2)
    medians["step_us_lost_mean"] = round(medians["step_us_offloading_mean"] - medians["step_us_evicting_mean"], 1)
    return medians


def measure_disk_tier(device, layout, path):
    num_blocks = min(64, (1 << 30) // (layout.block_bytes + 8192))
    options = dict(num_blocks=num_blocks, device=device, host_tier=num_blocks * layout.block_bytes, disk_tier=path,
                   disk_tier_bytes=1 << 30, tier_identity="benchmarks/tiers.py")
    num_bytes = num_blocks * layout.block_bytes
    with pagedkv.Cache(layout, **options) as cache:
        tokens = fill(cache, 10 ** 6, num_blocks)
        start = time.perf_counter()
        cache.evict(num_blocks)
        cache.flush_tiers()
        write = num_bytes / (time.perf_counter() - start) / 1e9
    with pagedkv.Cache(layout, **options) as cache:
        start = time.perf_counter()
        sequence = cache.open(tokens)
        read = num_bytes / (time.perf_counter() - start) / 1e9
        assert sequence.num_cached_tokens == num_blocks * BLOCK_SIZE
        sequence.close()
    os.remove(path)
    return {"disk_write_gb_per_s": round(write, 3), "disk_read_gb_per_s": round(read, 3)}


if __name__ == "__main__":
    main()
