"""Times prepare() of a decode step of 256 sequences, beside FlashInfer's plan() in the same run where there is a GPU.

    python benchmarks/prepare_beside_plan.py [--commit HASH] [--output FILE]

Both make ready what the kernels of one step need: prepare() appends a token to every sequence, takes blocks and queues the
upload, once for each set of formats; plan() of each of FlashInfer's decode wrappers gets the same lengths and blocks. Times are
of the host, between the call and its return, with nothing else queued on the device; the fastest, the median and the 99th
percentile, in microseconds. uploaded_bytes is what prepare sends to the device in a step: the mean, and the largest.

What was done just before decides how much of a call's data and code is in the processor's caches, so there are four runs:

    again   the same call over and over, 40 times, then the next one 40 times, and so on in turn: what the machine gives
            to the process changes in the course of a run, and would else change in between
    cold    the same, and before every call 8 MiB of other memory are written
    turns   prepare and one plan by turns, as an engine with that plan does it once a step: a run for each plan
    round   all sets of formats, then all plans, and again from the start

Without a GPU prepare is measured alone, on the host backend, which sends nothing.
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

NUM_SEQUENCES, BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 256, 16, 32, 8, 128
LENGTHS = [512 + 29 * i % 1024 for i in range(NUM_SEQUENCES)]
NUM_ROUNDS, NUM_WARM_UPS = 400, 80
FORMATS = {"table": ("table",), "table, csr": ("table", "csr"), "table, csr, pointers": ("table", "csr", "pointers")}
clock = time.perf_counter_ns


def main():
    arguments = make_parser(__doc__, "prepare-beside-plan").parse_args()
    date = datetime.date.today().isoformat()
    device = "cuda" if pagedkv.cuda_info()["is_usable"] else "host"
    report = {"date": date, "machine": describe_machine(), "version": pagedkv.version(),
              "commit": arguments.commit or find_commit(), "num_sequences": NUM_SEQUENCES, "rounds": NUM_ROUNDS}
    other = np.zeros(8 << 20, np.uint8)

    def make(formats=FORMATS):
        engines = {name: Steps(device, FORMATS[name]) for name in formats}
        one = next(iter(engines.values()))
        report["device"] = one.cache.device
        return engines, make_planners(one) if device == "cuda" else {}

    def measure_turns():
        turns = {}
        for name in make(["table"])[1]:
            engines, planners = make(["table"])
            turns[name] = measure(engines, {name: planners[name]})
        return turns

    report["again"] = measure(*make(), in_a_row=40)
    report["cold"] = measure(*make(), lambda: other.__iadd__(1), in_a_row=40)
    report["turns"] = measure_turns()
    report["round"] = measure(*make())
    if report["again"]["plan"]:
        report["ratio_to_fastest_plan"] = {name: compare(report[name]) for name in ("again", "cold", "round")}
        report["ratio_to_fastest_plan"]["turns"] = min(
            (compare(row)["table"] | {"plan": plan} for plan, row in report["turns"].items()),
            key=lambda row: report["turns"][row["plan"]]["plan"][row["plan"]]["p50_us"])
    output = arguments.output or ROOT / "benchmarks" / "results" / f"prepare-beside-plan-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


def compare(rows):
    """{formats: share of the time of the plan that takes least}."""
    fastest = min(rows["plan"].values(), key=lambda row: row["p50_us"])
    return {name: {key: round(row[key] / fastest[key], 4) for key in ("fastest_us", "p50_us", "p99_us")}
            for name, row in rows["prepare"].items()}


class Steps:
    """What an engine has: a cache, its sequences, whose tokens are known, and a batch."""

    def __init__(self, device, formats):
        layout = pagedkv.Layout(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16",
                                block_size=BLOCK_SIZE)
        most = max(LENGTHS) + NUM_ROUNDS + NUM_WARM_UPS
        self.cache = pagedkv.Cache(layout, num_blocks=NUM_SEQUENCES * -(-most // BLOCK_SIZE), device=device)
        self.sequences, self.ones = [self.cache.open([]) for _ in LENGTHS], [1] * NUM_SEQUENCES
        self.batch = self.cache.batch(max_sequences=NUM_SEQUENCES, max_tokens=sum(LENGTHS), max_sequence_length=most,
                                      num_heads=NUM_HEADS, formats=formats)
        self.lengths = np.array(LENGTHS)
        self.batch.prepare(self.sequences, LENGTHS, tokens=np.arange(sum(LENGTHS)))
        self.tokens = np.arange(NUM_SEQUENCES, dtype=np.int64)

    def prepare(self):
        """Nanoseconds, and bytes sent."""
        start = clock()
        self.batch.prepare(self.sequences, self.ones, tokens=self.tokens)
        end = clock()
        self.lengths += 1
        return end - start, self.batch.uploaded_bytes


def measure(engines, planners, before=None, in_a_row=1):
    """{"prepare": {formats: row}, "plan": {name: row}} of rounds in which each is called so many times, of which the first
    eighth, behind something else, is not counted."""
    before = before or (lambda: None)
    times, sent = {name: [] for name in [*engines, *planners]}, {name: [] for name in engines}
    gc.collect()
    gc.disable()
    for first in range(0, NUM_WARM_UPS + NUM_ROUNDS, in_a_row):
        for name in times:
            for i in range(in_a_row):
                if name in engines:
                    before()
                    elapsed, num_bytes = engines[name].prepare()
                else:
                    elapsed, num_bytes = planners[name](before), None
                if first < NUM_WARM_UPS or i < in_a_row // 8:
                    continue
                times[name].append(elapsed)
                if name in sent:
                    sent[name].append(num_bytes)
    gc.enable()
    result = {"prepare": {}, "plan": {}}
    for name, all_times in times.items():
        kept = sorted(all_times)
        row = {"fastest_us": round(kept[0] / 1e3, 3), "p50_us": round(kept[len(kept) // 2] / 1e3, 3),
               "p99_us": round(kept[len(kept) * 99 // 100] / 1e3, 3)}
        if name in sent:
            row["uploaded_bytes"] = {"mean": round(statistics.fmean(sent[name]), 1),
                                     "largest": max(sent[name])}
        result["prepare" if name in sent else "plan"][name] = row
        print(name, row, file=sys.stderr)
    return result


def make_planners(steps):
    """Calls that plan one step of FlashInfer and give the nanoseconds, by name; none where it cannot be imported."""
    try:
        import flashinfer
        import torch
    except ImportError as error:
        print(f"without a peer: {error}", file=sys.stderr)
        return {}
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    most = sum(-(-(length + NUM_ROUNDS + NUM_WARM_UPS) // BLOCK_SIZE) for length in LENGTHS)

    def make(uses_tensor_cores, uses_graph):
        options = dict(use_tensor_cores=uses_tensor_cores)
        if uses_graph:
            options.update(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=torch.zeros(NUM_SEQUENCES + 1, dtype=torch.int32, device="cuda"),
                paged_kv_indices_buffer=torch.zeros(most, dtype=torch.int32, device="cuda"),
                paged_kv_last_page_len_buffer=torch.zeros(NUM_SEQUENCES, dtype=torch.int32, device="cuda"))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **options)

        def plan(before):
            # What an engine has to hand: lengths on the host, blocks on the device.
            used = -(-steps.lengths // BLOCK_SIZE)
            indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(used)]).astype(np.int32))
            last = torch.from_numpy(((steps.lengths - 1) % BLOCK_SIZE + 1).astype(np.int32))
            indices = torch.arange(int(indptr[-1]), dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()
            before()
            start = clock()
            wrapper.plan(indptr, indices, last, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
                         q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
            end = clock()
            torch.cuda.synchronize()
            return end - start

        return plan

    planners = {}
    for uses_tensor_cores in (False, True):
        for uses_graph in (False, True):
            kind = "tensor cores" if uses_tensor_cores else "CUDA cores"
            name = f"flashinfer {flashinfer.__version__}, {kind}{', graph' if uses_graph else ''}"
            plan = make(uses_tensor_cores, uses_graph)
            try:
                plan(lambda: None)
            except Exception as error:  # a version that has not this way
                print(f"{name}: {error}", file=sys.stderr)
                continue
            planners[name] = plan
    return planners


if __name__ == "__main__":
    main()
