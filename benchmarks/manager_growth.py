"""What a decode step, an admission and a release cost as the pool and the sequences grow.

    python benchmarks/manager_growth.py [--output FILE]      measure
    python benchmarks/manager_growth.py --plot               draw docs/manager-growth.svg from the newest result (matplotlib)

pool      pools of 1e3 to 1e7 blocks of 16 tokens, full of cached blocks, so that every new block evicts one; 8 live
          sequences of 500 tokens; admissions of 1600 new tokens
sequence  4 live sequences of 1e2 to 1e6 tokens in a pool of 400,000 blocks; admissions of a sequence of that length

Figures in nanoseconds, the median of the rounds: of a decode step (one more token for each of the live sequences in one
prepare) by sequence; of an admission (open and prepare) and of a release (close) by block.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import sys

from manager import BLOCK_SIZE, LAYOUT, clock, make_text
import numpy as np
from replay_traces import ROOT, describe_machine, find_commit

import pagedkv

POOLS = [10 ** exponent for exponent in range(3, 8)]
LENGTHS = [10 ** exponent for exponent in range(2, 7)]
FILL_TOKENS = 1600  # of a sequence that fills the pool


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/manager-growth-DATE.json")
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    if arguments.plot:
        plot()
        return
    date = datetime.date.today().isoformat()
    report = {"date": date, "machine": describe_machine(), "version": pagedkv.version(), "commit": find_commit(),
              "pool": [measure_pool(size) for size in POOLS], "sequence": [measure_sequence(n) for n in LENGTHS]}
    output = arguments.output or ROOT / "benchmarks" / "results" / f"manager-growth-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


def measure_pool(num_blocks):
    rng = np.random.default_rng(num_blocks)
    before = read_resident_bytes()
    cache = pagedkv.Cache(LAYOUT, num_blocks=num_blocks, device="host")
    batch = cache.batch(max_sequences=64, max_tokens=1 << 14)
    live = [cache.open(text) for text in (make_text(rng, 500) for _ in range(8))]
    batch.prepare(live, [500] * 8, tokens=make_text(rng, 4000))
    while cache.stats()["uncached_blocks"] > 0:
        count = min(FILL_TOKENS, cache.stats()["uncached_blocks"] * BLOCK_SIZE)
        admit(cache, batch, make_text(rng, count)).close()
    resident = read_resident_bytes() - before
    row = measure(cache, batch, live, [make_text(rng, FILL_TOKENS) for _ in range(200)])
    # Smaller pools take what others have given back to the process.
    bytes_per_block = round(resident / num_blocks) if num_blocks >= 100_000 else None
    return report_row({"num_blocks": num_blocks, "bytes_per_block": bytes_per_block, **row})


def measure_sequence(length):
    rng = np.random.default_rng(length)
    cache = pagedkv.Cache(LAYOUT, num_blocks=400_000, device="host")
    batch = cache.batch(max_sequences=64, max_tokens=1 << 20)
    live = [admit(cache, batch, make_text(rng, length)) for _ in range(4)]
    texts = [make_text(rng, length) for _ in range(max(12, min(200, 4_000_000 // length)))]
    for text in texts[:3]:
        admit(cache, batch, text).close()
    return report_row({"length": length, **measure(cache, batch, live, texts[3:] or texts)})


def admit(cache, batch, tokens):
    sequence = cache.open(tokens)
    num_cached = sequence.num_cached_tokens
    batch.prepare([sequence], [len(tokens) - num_cached], tokens=tokens[num_cached:])
    return sequence


def measure(cache, batch, live, texts):
    decodes, admissions, releases = [], [], []
    for text in texts:
        num_blocks = len(text) / BLOCK_SIZE
        begin = clock()
        sequence = admit(cache, batch, text)
        middle = clock()
        sequence.close()
        end = clock()
        admissions.append((middle - begin) / num_blocks)
        releases.append((end - middle) / num_blocks)
    counts = [1] * len(live)
    for step in range(-20, 320):  # a whole number of blocks, so that the mean holds the step in which they are full
        tokens = make_text(np.random.default_rng(step + 20), len(live))
        begin = clock()
        batch.prepare(live, counts, tokens=tokens)
        if step >= 0:
            decodes.append((clock() - begin) / len(live))
    return {"decode_ns": round(statistics.median(decodes), 1), "admit_ns": round(statistics.median(admissions), 1),
            "release_ns": round(statistics.median(releases), 1)}


def read_resident_bytes():
    for line in pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def report_row(row):
    print(row, file=sys.stderr)
    return row


def plot():
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pagedkv"
    from matplotlib import pyplot

    path = sorted((ROOT / "benchmarks" / "results").glob("manager-growth-*.json"))[-1]
    report = json.loads(path.read_text(encoding="utf-8"))
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, kind, key, label in ((axes[0], "pool", "num_blocks", "blocks in the pool, all of them cached"),
                                   (axes[1], "sequence", "length", "tokens of a sequence")):
        for figure_key, name in (("decode_ns", "decode step, by sequence"), ("admit_ns", "admission, by block"),
                                 ("release_ns", "release, by block")):
            axis.plot([row[key] for row in report[kind]], [row[figure_key] for row in report[kind]], "o-", label=name)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.grid(True, which="major", alpha=0.3)
    axes[0].set_ylabel("ns")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "manager-growth.svg", metadata={"Date": None})
    print("docs/manager-growth.svg")


if __name__ == "__main__":
    main()
