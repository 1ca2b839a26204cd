"""Times steps that the host prepares one by one against steps ahead that the device makes by itself.

    python benchmarks/stepping.py [--device cuda] [--layers N] [--steps-ahead K] [--commit HASH] [--output FILE]

Each of 1, 64 and 256 sequences (of 1000 tokens at first, blocks of 16) gets K further tokens, once by K calls of prepare
with one token each, once by one prepare with steps_ahead, K times advance, get_advanced and settle. Tokens are told in
both: for prepare in each step, for settle at the end. (The one token that comes with the prepare ahead is not counted.)
Figures are the median of the rounds, in microseconds by step and
nanoseconds by token; the parts of the second way are also given by themselves, in microseconds by call.

On the host no layers are run unless asked for: what is timed is the making of the tables. On a GPU (PyTorch) each step
also writes and attends over --layers layers (32) of 8 KV heads, 32 query heads, captured in one CUDA graph: prepare and a
replay for each step, against replays alone of a graph that advances too. The clock stops when the device is done.
"""

import datetime
import gc
import json
import statistics
import sys
import time

import numpy as np
from replay_traces import ROOT, describe_machine, find_commit, make_parser

import pagedkv

NUM_SEQUENCES = [1, 64, 256]
FIRST_LENGTH, BLOCK_SIZE = 1000, 16
NUM_ROUNDS, NUM_WARM_UPS = 30, 3
clock = time.perf_counter_ns


def main():
    parser = make_parser(__doc__, "stepping")
    parser.add_argument("--device", default="auto", help="default: CUDA where it works, else the host")
    parser.add_argument("--layers", type=int, help="to write and attend in each step; default 32 on CUDA, 0 on the host")
    parser.add_argument("--steps-ahead", type=int, default=64, help="default %(default)s")
    arguments = parser.parse_args()
    rows = []
    for count in NUM_SEQUENCES:
        rows.append(measure(arguments, count))
        print(rows[-1], file=sys.stderr)
    date = datetime.date.today().isoformat()
    report = {"date": date, "machine": describe_machine(), "version": pagedkv.version(),
              "commit": arguments.commit or find_commit(), "device": rows[0]["device"],
              "steps_ahead": arguments.steps_ahead, "rounds": NUM_ROUNDS, "rows": rows}
    for row in rows:
        row.pop("device", None)
    output = arguments.output or ROOT / "benchmarks" / "results" / f"stepping-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


def measure(arguments, count):
    rig = Rig(arguments, count)
    ahead = arguments.steps_ahead
    tokens = np.arange(count * ahead, dtype=np.int64)
    of_step = [tokens[i::ahead].copy() for i in range(ahead)]
    by_host, by_device, parts = [], [], {}
    gc.collect()
    gc.disable()
    for _ in range(NUM_WARM_UPS + NUM_ROUNDS):
        rig.begin()
        start = clock()
        for i in range(ahead):
            rig.prepare(of_step[i])
            rig.replay_layers()
        rig.wait()
        by_host.append(clock() - start)
        rig.begin()
        start = clock()
        rig.prepare(of_step[0], steps_ahead=ahead)
        times = [clock()]
        for i in range(ahead):
            rig.replay_advance()
        times.append(clock())
        counts, _ = rig.batch.get_advanced(stream=rig.stream)
        times.append(clock())
        rig.batch.settle(counts, tokens=tokens)
        times.append(clock())
        by_device.append(times[-1] - start)
        for name, begin, end, calls in zip(("prepare", "advance", "get_advanced", "settle"), [start, *times], times,
                                           (1, ahead, 1, 1)):
            parts.setdefault(name, []).append((end - begin) / calls)
    gc.enable()
    rig.close()
    row = {"device": rig.cache.device, "num_sequences": count, "layers": rig.num_layers}
    for name, times in (("by_host", by_host), ("by_device", by_device)):
        median = statistics.median(times[NUM_WARM_UPS:])
        row[name] = {"us_per_step": round(median / ahead / 1e3, 3),
                     "ns_per_token": round(median / ahead / count, 2)}
    row["ratio"] = round(row["by_device"]["us_per_step"] / row["by_host"]["us_per_step"], 4)
    row["parts_us"] = {name: round(statistics.median(times[NUM_WARM_UPS:]) / 1e3, 3) for name, times in parts.items()}
    return row


class Rig:
    """Sequences in a cache on a device, and the two ways to step: on a GPU through graphs."""

    def __init__(self, arguments, count):
        device = arguments.device
        if device == "auto":
            device = "cuda" if pagedkv.cuda_info()["is_usable"] else "host"
        self.is_host = device == "host"
        self.num_layers = arguments.layers if arguments.layers is not None else 0 if self.is_host else 32
        self.count, self.ahead = count, arguments.steps_ahead
        most = FIRST_LENGTH + self.ahead + 1
        heads = dict(num_kv_heads=1, head_dim=16) if self.num_layers == 0 else dict(num_kv_heads=8, head_dim=128)
        layout = pagedkv.Layout(num_layers=max(self.num_layers, 1), dtype="bfloat16", block_size=BLOCK_SIZE, **heads)
        self.cache = pagedkv.Cache(layout, num_blocks=count * (most // BLOCK_SIZE + 2), device=device)
        self.batch = self.cache.batch(max_sequences=count, max_tokens=count * FIRST_LENGTH, max_sequence_length=most)
        self.sequences, self.ones = [self.cache.open([]) for _ in range(count)], [1] * count
        self.batch.prepare(self.sequences, [FIRST_LENGTH] * count)
        self.stream, self.layers, self.advance = 0, None, None
        if not self.is_host:
            self.make_graphs()
        elif self.num_layers:
            self.q = np.zeros((count, 32, 128), np.float32)
            self.k = np.zeros((count, 8, 128), np.float32)

    def make_graphs(self):
        import torch

        self.torch_stream = torch.cuda.Stream()
        self.stream = self.torch_stream.cuda_stream
        options = dict(dtype=torch.bfloat16, device="cuda")
        self.q, self.out = (torch.randn(self.count, 32, 128, **options) for _ in "qo")
        self.k = torch.randn(self.count, 8, 128, **options)
        torch.cuda.synchronize()
        self.prepare(None, steps_ahead=self.ahead)
        with torch.cuda.stream(self.torch_stream):
            self.run_layers()
            self.torch_stream.synchronize()
            self.layers, self.advance = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.layers, stream=self.torch_stream):
                self.run_layers()
            with torch.cuda.graph(self.advance, stream=self.torch_stream):
                self.batch.advance(stream=self.stream)
                self.run_layers()

    def run_layers(self):
        for layer in range(self.num_layers):
            self.cache.write_kv(layer, self.batch, self.k, self.k, stream=self.stream)
            self.cache.attend(layer, self.batch, self.q, out=None if self.is_host else self.out, stream=self.stream)

    def begin(self):
        """Every sequence back to where it was, and nothing reserved."""
        self.cache.truncate_many(self.sequences, [FIRST_LENGTH] * self.count)
        self.wait()

    def prepare(self, tokens, **options):
        self.batch.prepare(self.sequences, self.ones, tokens=tokens, stream=self.stream, **options)

    def replay_layers(self):
        if self.is_host:
            self.run_layers()
        else:
            self.replay(self.layers)

    def replay_advance(self):
        if self.is_host:
            self.batch.advance()
            self.run_layers()
        else:
            self.replay(self.advance)

    def replay(self, graph):
        import torch

        with torch.cuda.stream(self.torch_stream):
            graph.replay()

    def wait(self):
        if not self.is_host:
            self.torch_stream.synchronize()

    def close(self):
        for sequence in self.sequences:
            sequence.close()


if __name__ == "__main__":
    main()
