"""Times attend of decode steps whose sequences share a prefix: a batch with shared_prefixes beside a plain one.

    python benchmarks/shared_prefixes.py [--quick] [--commit HASH] [--output FILE]

Needs PyTorch and a GPU. Sequences are forks of one (or, with several groups, of one for each group) that goes on with
tokens of its own; 32 query and 8 KV heads of 128 elements, bfloat16, blocks of 16 tokens. All layers are captured in one
CUDA graph and the figure is the median of its replays divided by their number, as in cuda_kernels.py. The result is
compared with one that shares nothing: more than 2 % of its size apart is an error.
"""

import datetime
import json
import sys

import cuda_kernels
import torch
from replay_traces import ROOT, find_commit, make_parser

import pagedkv

HEADS = (32, 8)
# sequences, groups of them, common tokens, tokens of each one's own
CASES = [(64, 1, 8192, 16), (64, 1, 8192, 64), (64, 1, 8192, 128), (64, 1, 8192, 1024), (64, 1, 2048, 128),
         (64, 16, 2048, 128), (256, 64, 2048, 128), (16, 1, 8192, 128), (8, 1, 8192, 128), (4, 1, 8192, 128),
         (16, 1, 2048, 128), (4, 1, 32768, 128), (64, 1, 1024, 128), (64, 1, 512, 128)]
LAYER_BYTES = 200 << 20  # of all layers together, at least: more than the L2 cache


class Case(cuda_kernels.Case):
    def __init__(self, num_sequences, num_groups, common, own):
        self.num_heads, self.num_kv_heads = HEADS
        self.dtype, self.element_bytes = "bfloat16", 2
        row_bytes = self.num_kv_heads * cuda_kernels.HEAD_DIM * 2 * self.element_bytes
        stored = num_groups * common + num_sequences * own
        self.num_layers = max(2, min(32, -(-LAYER_BYTES // (stored * row_bytes))))
        self.layout = pagedkv.Layout(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads,
                                     head_dim=cuda_kernels.HEAD_DIM, dtype=self.dtype, block_size=cuda_kernels.BLOCK_SIZE)
        size = cuda_kernels.BLOCK_SIZE
        num_blocks = num_groups * -(-common // size) + num_sequences * (-(-own // size) + 1)
        self.cache = pagedkv.Cache(self.layout, num_blocks=num_blocks, device="cuda", prefix_caching=False)
        self.shuffle(num_blocks)
        self.fill()
        roots = [self.cache.open([]) for _ in range(num_groups)]
        bounds = dict(max_sequences=num_sequences, max_tokens=max(num_groups * common, num_sequences * own))
        plain, shared = (self.cache.batch(**bounds, **options) for options in ({}, dict(shared_prefixes=True)))
        plain.prepare(roots, [common] * num_groups)
        self.sequences = [root.fork() for root in roots for _ in range(num_sequences // num_groups)]
        for root in roots:
            root.close()
        plain.prepare(self.sequences, [own - 2] * num_sequences)
        self.batches = {}
        for name, batch in (("plain", plain), ("shared", shared)):
            batch.prepare(self.sequences, [1] * num_sequences)
            self.batches[name] = batch
        self.num_shared_prefixes = shared.num_shared_prefixes
        self.q = torch.randn(num_sequences, self.num_heads, cuda_kernels.HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def calls(self, name):
        self.batch, self.out = self.batches[name], torch.full_like(self.q, float("nan"))
        return self.decode()

    def compute_alone(self):
        """What the last call of the shared batch gives without sharing."""
        out = torch.full_like(self.q, float("nan"))
        self.cache.attend(self.layer, self.batch, self.q, out=out, invariant=True, stream=cuda_kernels.stream())
        return out.float()

    def close(self):
        for sequence in self.sequences:
            sequence.close()
        for batch in self.batches.values():
            batch.close()


def main():
    parser = make_parser(__doc__, "shared-prefixes")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    arguments = parser.parse_args()
    date = datetime.date.today().isoformat()
    report = {"date": date, "version": pagedkv.version(), "commit": arguments.commit or find_commit(),
              "device": torch.cuda.get_device_name(), "heads": "32/8", "head_dim": cuda_kernels.HEAD_DIM,
              "block_size": cuda_kernels.BLOCK_SIZE, "dtype": "bfloat16", "replays": cuda_kernels.NUM_REPLAYS, "rows": []}
    for num_sequences, num_groups, common, own in CASES[:3 if arguments.quick else None]:
        case = Case(num_sequences, num_groups, common, own)
        row = {"sequences": num_sequences, "groups": num_groups, "common": common, "own": own, "layers": case.num_layers,
               "found": case.num_shared_prefixes}
        for name in ("plain", "shared"):
            row[f"{name}_us"] = cuda_kernels.time_graph(case.calls(name))
        shared, alone = case.result(), case.compute_alone()
        row["difference"] = float((shared - alone).abs().max() / alone.abs().max())
        if not row["difference"] < 0.02:
            raise SystemExit(f"{row}: results are apart")
        row["ratio"] = row["plain_us"] / row["shared_us"]
        report["rows"].append(row)
        print(row, file=sys.stderr)
        case.close()
    output = arguments.output or ROOT / "benchmarks" / "results" / f"shared-prefixes-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
