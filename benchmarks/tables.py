"""Makes the tables of README.md and docs/ from the newest results in benchmarks/results.

    python benchmarks/tables.py            show them
    python benchmarks/tables.py --write    and put them between <!-- table NAME --> and <!-- end table -->
"""

import argparse
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(
    r"(?P<begin><!-- table (?P<name>[a-z-]+) -->\n)(?P<body>.*?)(?P<end><!-- end table -->\n)", re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the documents")
    arguments = parser.parse_args()
    tables = make_tables()
    if not arguments.write:
        for name, text in tables.items():
            print(f"{name}\n\n{text}")
        return
    for path in documents():
        old = path.read_text(encoding="utf-8")
        new = MARKED.sub(lambda match: match["begin"] + tables[match["name"]] + match["end"], old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def make_tables():
    """Text by name, each ending in a line end."""
    replay = load_newest("replay")
    return {
        "replay-printed": make_printed(replay),
        "replay-concurrent": make_concurrent(replay),
        "replay-prefix": make_prefix(replay),
        "replay-conditions": make_conditions(replay),
        "host-kernels": "\n".join(map(make_host_kernels, load_each_processor("host-kernels"))),
        "manager-peers": make_manager_peers(load_newest("manager-peers")),
        "manager-growth": make_manager_growth(load_newest("manager-growth")),
        "stepping": make_stepping(load_newest("stepping")),
        "cuda-support": make_cuda_support(),
        "cuda-kernels": make_cuda_kernels(load_newest("cuda-kernels")),
        "transfer-pieces": make_transfer_pieces(load_newest("transfer-pieces")),
        "small-blocks": make_small_blocks(load_newest("tiers")),
    }


def load_newest(kind):
    """The results of the latest date: names are KIND-DATE.json."""
    path = sorted(RESULTS.glob(f"{kind}-[0-9]*.json"))[-1]
    report = json.loads(path.read_text(encoding="utf-8"))
    report["file"] = str(path.relative_to(ROOT))
    return report


def load_each_processor(kind):
    """The newest results of each processor."""
    reports = {}
    for path in sorted(RESULTS.glob(f"{kind}-[0-9]*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        reports[report["machine"]["processor"]] = {**report, "file": str(path.relative_to(ROOT))}
    return reports.values()


def make_printed(replay):
    """What the first set-up command prints."""
    [run] = [run for run in select(replay, "concurrent") if run["result"]["format"] == "chat"]
    return "\n".join(["```text", *run["printed"], "```"]) + "\n"


def make_concurrent(replay):
    header = ["trace", "requests", "prompt tokens", "output tokens", "prefix hits", "preemptions",
              "held at once, paged / contiguous", "utilization, paged / contiguous", "manager per token",
              "processor time"]
    rows = []
    for run in select(replay, "concurrent"):
        result = run["result"]
        paged, contiguous = result["paged"], result["contiguous"]
        rows.append([
            run["trace"], count(result["requests"]), count(result["prompt_tokens"]), count(result["output_tokens"]),
            percent(result["hit_rate"]), count(result["preemptions"]),
            f"{count(paged['max_concurrency'])} / {count(contiguous['max_concurrency'])}",
            f"{percent(paged['utilization'])} / {percent(contiguous['utilization'])}",
            f"{result['manager_ns_per_token']:.0f} ns", f"{run['processor_seconds']:.1f} s"])
    return format_table(header, rows)


def make_prefix(replay):
    header = ["trace", "prompt tokens", "hits, pool of 1,048,576 tokens", "evictions", "processor time",
              "hits, unlimited pool", "processor time"]
    unlimited = {run["trace"]: run for run in select(replay, "unlimited")}
    rows = []
    for run in select(replay, "sequential"):
        result = run["result"]
        row = [run["trace"], count(result["prompt_tokens"]), percent(result["hit_rate"]), count(result["evictions"]),
               f"{run['processor_seconds']:.1f} s"]
        if run["trace"] in unlimited:
            endless = unlimited[run["trace"]]
            row += [percent(endless["result"]["hit_rate"]), f"{endless['processor_seconds']:.1f} s"]
        else:
            row += ["-", "-"]
        rows.append(row)
    return format_table(header, rows)


def make_conditions(replay):
    machine = replay["machine"]
    slowest = max(run["command_seconds"] for run in replay["runs"])
    return (f"Measured on {replay['date']} with version {replay['version']}, commit {replay['commit']}, on "
            f"{machine['processors']} processors ({machine['processor']}), Python {machine['python']}, "
            f"with other work on the machine (load {machine['load']} before the first run): `{replay['file']}`. "
            f"By the clock, the slowest of these commands took {slowest:.1f} s.\n")


def make_host_kernels(report):
    ceilings = {ceiling["threads"]: ceiling for ceiling in report["ceilings"]}
    header = ["threads", "K and V", "instruction set", "decode", "of read", "PyTorch", "prefill", "of sgemm", "PyTorch",
              "write_kv"]
    rows = []
    for row in sorted(report["rows"], key=lambda row: (row["threads"], row["dtype"])):
        fastest = {name: rate["fastest"] for name, rate in row.items() if isinstance(rate, dict)}
        ceiling = ceilings[row["threads"]]
        torch_decode, torch_prefill = (f"{fastest[name]:.{digits}f}" if name in fastest else ""
                                       for name, digits in (("torch_decode_gb_per_s", 1),
                                                            ("torch_prefill_gflop_per_s", 0)))
        decode, prefill = fastest["decode_gb_per_s"], fastest["prefill_gflop_per_s"]
        rows.append([str(row["threads"]), row["dtype"], row["isa"], f"{decode:.1f} GB/s",
                     f"{decode / ceiling['read_gb_per_s']['fastest']:.0%}", torch_decode, f"{prefill:.0f} GFLOP/s",
                     f"{prefill / ceiling['sgemm_gflop_per_s']['fastest']:.0%}", torch_prefill,
                     f"{fastest['write_kv_gb_per_s']:.1f} GB/s"])
    machine = report["machine"]
    found = "; ".join(f"{threads} thread{'s' * (threads > 1)}: {ceiling['read_gb_per_s']['fastest']:.1f} GB/s read, "
                      f"{ceiling['sgemm_gflop_per_s']['fastest']:.0f} GFLOP/s of sgemm"
                      for threads, ceiling in ceilings.items())
    torch = f", beside PyTorch {report['torch']}" if report["torch"] else ""
    return (f"{format_table(header, rows)}\nOn {report['date']}, commit {report['commit']}, on a machine of "
            f"{machine['processors']} processors ({machine['processor']}){torch}, in one run: `{report['file']}`. "
            f"One thread by processor time, several by the clock. The machine gives with {found}; one thread copies "
            f"{report['copy_gb_per_s']['fastest']:.1f} GB/s, read and written.\n")


def make_manager_peers(report):
    header = ["operation", "pagedkv, p50 / p99", "best peer", "its p50 / p99", "ratio, p50 / p99 / mean"]
    rows = []
    for row in report["rows"]:
        ratio = row["ratio"]
        rows.append([row["name"], microseconds(row["ours"]), row["best_peer"], microseconds(row["best"]),
                     "void" if ratio["p50"] is None else " / ".join(f"{ratio[key]:.3f}" for key in ratio)])
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["peers"].items() if name != "pagedkv")
    return (f"{format_table(header, rows)}\nIn microseconds, on one core of {machine['processors']} ({machine['processor']}), "
            f"on {report['date']}, commit {report['commit']}, through the Python API, beside {versions}, in one run by turns, "
            f"with other work on the machine (load {machine['load']}): `{report['file']}`.\n")


def make_manager_growth(report):
    header = ["", "decode step, by sequence", "admission, by block", "release, by block", "memory, by block"]
    rows = [[f"pool of {count(row['num_blocks'])} blocks", *growth_cells(row),
             f"{row['bytes_per_block']} bytes" if row["bytes_per_block"] else "-"]
            for row in report["pool"]]
    rows += [[f"sequences of {count(row['length'])} tokens", *growth_cells(row), "-"] for row in report["sequence"]]
    machine = report["machine"]
    return (f"{format_table(header, rows)}\nOn {report['date']}, commit {report['commit']}, {machine['processors']} processors "
            f"({machine['processor']}), load {machine['load']}, through the Python API: `{report['file']}`. The memory is what "
            "became resident, tables of the batch and of the pool included.\n")


def make_stepping(report):
    header = ["sequences", "layers", "prepare in each step", "steps ahead", "ratio", "of which prepare", "advance",
              "get_advanced", "settle"]
    rows = [[str(row["num_sequences"]), str(row["layers"]), f"{row['by_host']['us_per_step']:.2f} us",
             f"{row['by_device']['us_per_step']:.2f} us", f"{row['ratio']:.2f}",
             *(f"{row['parts_us'][name]:.2f} us" for name in ("prepare", "advance", "get_advanced", "settle"))]
            for row in report["rows"]]
    return (f"{format_table(header, rows)}\nOn {report['date']}, commit {report['commit']}, device {report['device']}, by step, "
            f"with {report['steps_ahead']} steps ahead; the parts by call (`advance` is called for each step, the others once): "
            f"`{report['file']}`. With 0 layers only the tables are made.\n")


def growth_cells(row):
    return [f"{row[key]:.0f} ns" for key in ("decode_ns", "admit_ns", "release_ns")]


def microseconds(figures):
    return " / ".join(f"{figures[key]:.2f}" if figures[key] < 10 else f"{figures[key]:.1f}" if figures[key] < 100
                      else f"{figures[key]:,.0f}" for key in ("p50_us", "p99_us"))


def make_cuda_support():
    """From the table that the dispatch is made from."""
    source = (ROOT / "libpagedkv" / "backend" / "cuda" / "support_table.h").read_text(encoding="utf-8")
    values = dict(re.findall(r"constexpr \w+ (k\w+)\[\] = \{(.*?)\};", source))
    names = {name: ", ".join(value.strip().replace("PKV_", "").lower() for value in text.split(","))
             for name, text in values.items()}
    return format_table(["q, out", "K and V", "head_dim = v_head_dim", "products"], [
        [names["kQueryDtypes"], f"the same, {names['kWidenedDtypes']}", names["kHeadDims"], "tensor cores"],
        ["all others of the host's", "all of the host's", "each multiple of 8 up to 256", "CUDA cores"]])


def make_cuda_kernels(report):
    peer = report["peer"] or "no peer"
    header = ["case", "heads", "K and V", "pagedkv", "of the ceiling", peer, "time, pagedkv / peer"]
    has_dense = any("dense" in row for row in report["decode"])
    if has_dense:
        header += [f"{report['dense']}, no pages", "time, pagedkv / it"]
    rows = []
    for kind in ("decode", "prefill", "write_kv"):
        for row in report[kind]:
            own, others = row["pagedkv"], [row.get("peer"), *([row.get("dense")] if has_dense else [])]
            speed = (f"{100 * own['share_of_read_ceiling']:.0f} %" if "share_of_read_ceiling" in own
                     else f"{own['tflop_per_s']:.0f} TFLOP/s" if "tflop_per_s" in own
                     else f"{own['gb_per_s']:.0f} GB/s")
            cells = [f"{kind} {row['shape']}", row["heads"], row["dtype"], f"{own['us']:.1f} us", speed]
            for other in others:
                cells += [f"{other['us']:.1f} us", f"{own['us'] / other['us']:.2f}"] if other else ["-", "-"]
            rows.append(cells)
    return (f"{format_table(header, rows)}\nOn {report['date']}, commit {report['commit']}, {report['device']}, read ceiling "
            f"{report['read_gb_per_s']:.0f} GB/s: `{report['file']}`.\n")


def make_transfer_pieces(report):
    header = ["block", "copied to", "one call each", "one batched call", "the kernel",
              "beside: batched / kernel", "lost: batched / kernel"]
    rows = []
    for row in report["rows"]:
        batch, kernel = row["batch"], row["kernel"]
        beside, lost = ([("-" if way[key] is None else f"{way[key]:.{digits}f}") for way in (batch, kernel)]
                        for key, digits in (("beside_gb_per_s", 1), ("lost_us", 0)))
        rows.append([f"{row['block_bytes'] // 1024} KiB", row["to"],
                     *(f"{row[name]['gb_per_s']:.1f}" for name in ("calls", "batch", "kernel")),
                     " / ".join(beside), " / ".join(lost) + " us"])
    return (f"{format_table(header, rows)}\nOn {report['date']}, {report['device']}; one copy of all: "
            f"{report['one_copy_to_device_gb_per_s']} to the device, {report['one_copy_to_host_gb_per_s']} to the host: "
            f"`{report['file']}`.\n")


def make_small_blocks(report):
    header = ["block", "offload", "restore", "the copies alone, offload / restore"]
    rows = [[f"{row['block_bytes'] // 1024} KiB", f"{row['offload_gb_per_s']['fastest']:.1f}",
             f"{row['restore_gb_per_s']['fastest']:.1f}",
             f"{row['offload_transfer_gb_per_s']:.1f} / {row['restore_transfer_gb_per_s']:.1f}"]
            for row in report["small_blocks"]]
    return f"{format_table(header, rows)}\nOn {report['date']}: `{report['file']}`.\n"


def select(replay, mode):
    return [run for run in replay["runs"] if run["mode"] == mode]


def format_table(header, rows):
    """Markdown; the first column to the left, numbers to the right."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def count(value):
    return f"{value:,}"


def percent(share):
    return f"{100 * share:.2f} %"


if __name__ == "__main__":
    main()
