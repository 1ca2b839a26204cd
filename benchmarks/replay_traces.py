"""Replays every trace of a folder, and the built-in workload, and writes the results with machine, commit and options.

    python benchmarks/replay_traces.py [FOLDER] [--output FILE]

FOLDER holds trace files as `pagedkv replay` reads them; without it, the built-in workload alone. Three modes:

  concurrent  continuous batching of up to 256 requests, in the default pool of 1,048,576 tokens
  sequential  one request at a time, prompts only, in the same pool
  unlimited   as sequential, in a pool that holds every prompt: what an endless prefix cache would give

unlimited runs only where sequential found any prefix. benchmarks/tables.py makes the tables of the README from the
newest file in benchmarks/results.
"""

import argparse
import datetime
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import pagedkv

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK_SIZE = 16
MODES = {
    "concurrent": ["--block-size", str(BLOCK_SIZE), "--concurrency", "256"],
    "sequential": ["--block-size", str(BLOCK_SIZE), "--concurrency", "1", "--no-output"],
}
SUFFIXES = (".jsonl", ".csv", ".jsonl.gz", ".csv.gz")
BUILT_IN = "built-in workload"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="folder of trace files")
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/replay-DATE.json")
    arguments = parser.parse_args()

    date = datetime.date.today().isoformat()
    output = arguments.output or ROOT / "benchmarks" / "results" / f"replay-{date}.json"
    report = {
        "date": date,
        "machine": describe_machine(),
        "version": pagedkv.version(),
        "commit": find_commit(),
        "modes": MODES,
        "runs": run_all(arguments.folder),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


def run_all(folder):
    runs = []
    for name in [BUILT_IN, *find_traces(folder)]:
        for mode, options in MODES.items():
            runs.append(run_replay(folder, name, mode, options))
        sequential = runs[-1]["result"]
        if sequential["hit_tokens"] > 0:
            # Every prompt takes its full blocks and at most one more.
            num_blocks = sequential["prompt_tokens"] // BLOCK_SIZE + sequential["requests"]
            options = [*MODES["sequential"], "--num-blocks", str(num_blocks)]
            runs.append(run_replay(folder, name, "unlimited", options))
    return runs


def find_traces(folder):
    if folder is None:
        return []
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(SUFFIXES))
    return names or sys.exit(f"{folder}: no trace files")


def run_replay(folder, name, mode, options):
    """One replay in a process of its own. Paths stay out of the result: it runs in the folder."""
    trace = [] if name == BUILT_IN else [name]
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "result.json")
        start, start_processor = time.perf_counter(), read_processor_time()
        done = subprocess.run([sys.executable, "-m", "pagedkv", "replay", *trace, *options, "--json", path],
                              cwd=folder if trace else None, stdout=subprocess.PIPE, text=True, check=True)
        seconds, processor_seconds = time.perf_counter() - start, read_processor_time() - start_processor
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
    print(f"{name}, {mode}: {seconds:.1f} s", file=sys.stderr)
    return {"trace": name, "mode": mode, "command": " ".join(["pagedkv", "replay", *trace, *options]),
            "command_seconds": round(seconds, 2), "processor_seconds": round(processor_seconds, 2),
            "printed": done.stdout.splitlines(), "result": result}


def read_processor_time():
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def describe_machine():
    device = pagedkv.device_info("host")
    kernel = os.uname()
    return {"processor": device["name"], "processors": os.cpu_count(), "memory_bytes": device["total_bytes"],
            "load": round(os.getloadavg()[0], 1),
            "system": f"{kernel.sysname} {kernel.machine}", "python": sys.version.split()[0]}


def make_parser(description, name):
    """The options of a benchmark that records NAME-DATE.json, on a machine that may have no repository."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="what is measured, where this is no repository")
    parser.add_argument("--output", type=pathlib.Path, help=f"default: benchmarks/results/{name}-DATE.json")
    return parser


def find_commit():
    """The commit of this checkout, with a + if what is installed may differ from it."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", "include", "libpagedkv", "python")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
