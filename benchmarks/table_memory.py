"""An experiment: tables of a batch in device memory against tables in mapped pinned memory of the host (zero-copy).

    python benchmarks/table_memory.py [--commit HASH] [--output FILE]

For some decode steps, the same cache and the same blocks: the time of prepare on the host, the time until the tables are
up to date on the device, and that of attend over layers that are together larger than the L2 cache, in one CUDA graph
(median of its replays, by layer), with the tables in one memory and in the other, by turns. Needs PyTorch and a GPU;
without one it says so, and writes the host's times of prepare alone.
"""

import datetime
import json
import statistics
import sys
import time

import numpy as np
from replay_traces import ROOT, describe_machine, find_commit, make_parser

import pagedkv

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
LAYER_BYTES = 200 << 20  # of all layers of a case together, at least
CASES = {"1 x 8192": [8192], "8 x 8192": [8192] * 8, "64 x 2048": [2048] * 64, "256 x 1024": [1024] * 256,
         "256 x 128": [128] * 256}
MEMORIES = ("device", "mapped")
NUM_ROUNDS, NUM_WARM_UPS = 60, 5
clock = time.perf_counter_ns


def main():
    arguments = make_parser(__doc__, "table-memory").parse_args()
    date = datetime.date.today().isoformat()
    info = pagedkv.cuda_info()
    if not info["is_usable"]:
        print(f"without a GPU: {info['reason']}", file=sys.stderr)
    rows = []
    for shape, lengths in CASES.items():
        rows.append({"shape": shape, **Case(lengths, info["is_usable"]).measure()})
        print(rows[-1], file=sys.stderr)
    report = {"date": date, "machine": describe_machine(), "version": pagedkv.version(),
              "commit": arguments.commit or find_commit(), "device": pagedkv.device_info()["name"],
              "rounds": NUM_ROUNDS, "rows": rows}
    output = arguments.output or ROOT / "benchmarks" / "results" / f"table-memory-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


class Case:
    def __init__(self, lengths, has_gpu):
        self.has_gpu, self.count = has_gpu, len(lengths)
        steps = NUM_ROUNDS + NUM_WARM_UPS + 2
        most = max(lengths) + len(MEMORIES) * steps
        layer_bytes = sum(lengths) * NUM_KV_HEADS * HEAD_DIM * 4
        self.num_layers = max(2, min(32, -(-LAYER_BYTES // layer_bytes))) if has_gpu else 1
        layout = pagedkv.Layout(num_layers=self.num_layers, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM,
                                dtype="bfloat16", block_size=BLOCK_SIZE)
        self.cache = pagedkv.Cache(layout, num_blocks=self.count * -(-most // BLOCK_SIZE),
                                   device="cuda" if has_gpu else "host", prefix_caching=False)
        self.sequences, self.ones = [self.cache.open([]) for _ in lengths], [1] * self.count
        self.batches = {memory: self.cache.batch(max_sequences=self.count, max_tokens=sum(lengths),
                                                 max_sequence_length=most, num_heads=NUM_HEADS, tables=memory)
                        for memory in MEMORIES}
        self.batches["device"].prepare(self.sequences, lengths)
        self.tokens = np.arange(self.count, dtype=np.int64)
        self.stream = 0

    def measure(self):
        if self.has_gpu:
            self.make_graphs()
        times = {memory: {"prepare_us": [], "ready_us": [], "attend_us": []} for memory in MEMORIES}
        for _ in range(NUM_WARM_UPS + NUM_ROUNDS):
            for memory in MEMORIES:
                start = clock()
                self.batches[memory].prepare(self.sequences, self.ones, tokens=self.tokens, stream=self.stream)
                times[memory]["prepare_us"].append((clock() - start) / 1e3)
                if self.has_gpu:
                    self.torch_stream.synchronize()
                    times[memory]["ready_us"].append((clock() - start) / 1e3)
                    times[memory]["attend_us"].append(self.replay(memory))
        result = {"layers": self.num_layers}
        for memory, parts in times.items():
            result[memory] = {name: round(statistics.median(values[NUM_WARM_UPS:]), 3)
                              for name, values in parts.items() if values}
        if self.has_gpu:
            result["mapped_over_device"] = {name: round(result["mapped"][name] / value, 4)
                                            for name, value in result["device"].items()}
        return result

    def make_graphs(self):
        import torch

        self.torch = torch
        self.torch_stream = torch.cuda.Stream()
        self.stream = self.torch_stream.cuda_stream
        memory = torch.as_tensor(self.cache, device="cuda")
        memory.copy_(torch.zeros(1, dtype=torch.uint8, device="cuda"))
        options = dict(dtype=torch.bfloat16, device="cuda")
        self.q, self.out = (torch.randn(self.count, NUM_HEADS, HEAD_DIM, **options) for _ in "qo")
        torch.cuda.synchronize()
        self.graphs = {}
        for memory, batch in self.batches.items():
            batch.prepare(self.sequences, self.ones, stream=self.stream)
            with torch.cuda.stream(self.torch_stream):
                self.attend(batch)
                self.torch_stream.synchronize()
                self.graphs[memory] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[memory], stream=self.torch_stream):
                    self.attend(batch)

    def attend(self, batch):
        for layer in range(self.num_layers):
            self.cache.attend(layer, batch, self.q, out=self.out, stream=self.stream)

    def replay(self, memory):
        """Microseconds by layer."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.torch.cuda.stream(self.torch_stream):
            begin.record()
            self.graphs[memory].replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.num_layers


if __name__ == "__main__":
    main()
