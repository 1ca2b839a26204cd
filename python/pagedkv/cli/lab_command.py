"""`pagedkv lab`: from the arguments to the result."""

import time

from pagedkv.cli import CommandError, lab, report
from pagedkv.cli.progress import make_progress
from pagedkv.cli.recording import is_recording, read_recorded_requests
from pagedkv.cli.traces import read_trace


def run(arguments):
    """Runs every policy, reports, and returns the exit status."""
    report.check_json_path(arguments.json)
    if arguments.plot is not None:
        from pagedkv.cli import lab_plot

        lab_plot.check_plot(arguments.plot)
    if is_recording(arguments.trace):
        if arguments.hash_block_size is not None:
            raise CommandError("--hash-block-size is for traces with hash ids, not for a recording")
        trace = read_recorded_requests(arguments.trace, arguments.limit)
    else:
        trace = read_trace(arguments.trace, arguments.limit, arguments.hash_block_size)
    _check_policies(arguments.policies)
    result = _measure(trace, arguments)
    report.emit(result, arguments.json, format_lab)
    if arguments.plot is not None:
        lab_plot.draw(result, arguments.plot)
    return 0


def _check_policies(policies):
    """A policy that this library does not have is an error, before any work."""
    from pagedkv import Cache

    for policy in policies:
        Cache(lab.make_layout(), num_blocks=1, device="host", eviction=policy).close()


def _measure(trace, arguments):
    """The result as the JSON has it."""
    start = time.perf_counter()
    accesses = lab.find_accesses(trace, arguments.block_size)
    sizes = arguments.sizes or lab.choose_sizes(accesses)
    num_fitting = sum(int((accesses.needed <= size).sum()) for size in sizes)
    progress = make_progress(len(trace) * len(arguments.policies) + num_fitting, "requests")
    done = 0

    def advance():
        nonlocal done
        done += 1
        if done % 64 == 0:
            progress.update(done)

    try:
        watch = advance if progress is not None else None
        curves = {policy: lab.run_policy(accesses, policy, sizes, watch) for policy in arguments.policies}
        optimal = lab.run_optimal(accesses, sizes, watch)
    finally:
        if progress is not None:
            progress.close()
    prompt_tokens = int(accesses.lengths.sum())

    def describe(curve):
        return {"hit_rate": [hits / max(prompt_tokens, 1) for hits in curve.hit_tokens],
                "hit_tokens": curve.hit_tokens, "evictions": curve.evictions}

    return {
        "trace": trace.name,
        "format": trace.format,
        "requests": len(trace),
        "prompt_tokens": prompt_tokens,
        "block_size": accesses.block_size,
        "different_blocks": accesses.num_blocks,
        "sizes": sizes,
        "rejected": [int((accesses.needed > size).sum()) for size in sizes],
        "policies": {policy: describe(curve) for policy, curve in curves.items()},
        "optimal": describe(optimal),
        "seconds": time.perf_counter() - start,
    }


def format_lab(result):
    """The table: a row for each size, a column for each policy."""
    names = list(result["policies"])
    curves = [result["policies"][name]["hit_rate"] for name in names] + [result["optimal"]["hit_rate"]]
    rows = [("blocks", "tokens", *names, "optimal", "rejected" if any(result["rejected"]) else "")]
    for i, size in enumerate(result["sizes"]):
        rejected = result["rejected"][i]
        rows.append((f"{size:,}", f"{size * result['block_size']:,}", *(f"{100 * curve[i]:.2f} %" for curve in curves),
                     f"{rejected:,} requests" if rejected else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        numbers = [text.rjust(width) for text, width in zip(row, widths)]
        lines.append("  " + "  ".join([*numbers, row[-1]]).rstrip())
    return "\n".join([
        f"{result['trace']} ({result['format']}): {result['requests']:,} requests, {result['prompt_tokens']:,} prompt "
        f"tokens, {result['different_blocks']:,} different blocks of {result['block_size']} tokens",
        "",
        "Prompt tokens found in the cache, by pool size and eviction policy:",
        "",
        *lines,
        "",
        f"{result['seconds']:.2f} s; optimal: Belady's, which knows the future",
    ])
