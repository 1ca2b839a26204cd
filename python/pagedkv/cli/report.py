"""Results for people and for programs: the tables and the JSON."""

import json
import math
import os
import sys

from pagedkv.cli import CommandError


def check_json_path(path):
    """Finds out before the work whether the JSON can be written."""
    if path not in (None, "-"):
        check_output_path(path)


def check_output_path(path):
    """Finds out before the work whether a file can be written."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise CommandError(f"{path}: is a directory")
    if not os.path.isdir(folder):
        raise CommandError(f"{path}: no such directory: {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise CommandError(f"{path}: cannot be written")


def emit(result, json_path, format_text):
    """Prints the table and writes the JSON; the JSON alone if that goes to standard output."""
    if json_path == "-":
        print(_to_json(result))
        return
    print(format_text(result))
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(_to_json(result) + "\n")


def _to_json(result):
    return json.dumps(_make_finite(result), indent=2, allow_nan=False)


def _make_finite(value):
    """JSON has no infinity and no NaN: null."""
    if isinstance(value, dict):
        return {key: _make_finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_replay(result):
    """The table of a replay."""
    pool_tokens = result["num_blocks"] * result["block_size"]
    pool_bytes = result["num_blocks"] * result["block_bytes"]
    paged, contiguous = result["paged"], result["contiguous"]
    counts = [
        ("requests", format_count(result["requests"])),
        ("rejected", format_count(result["rejected"]), "can never fit" if result["rejected"] else ""),
        ("prompt tokens", format_count(result["prompt_tokens"])),
        ("prefix hits", format_count(result["hit_tokens"]), f"{format_percent(result['hit_rate'])} of prompt tokens"),
        ("output tokens", format_count(result["output_tokens"])),
        ("evictions", format_count(result["evictions"]), "blocks"),
        ("preemptions", format_count(result["preemptions"])),
        ("recomputed", format_count(result["recomputed_tokens"]), "tokens, after preemption"),
        ("peak blocks", format_count(result["peak_blocks"]),
         f"{format_percent(result['peak_blocks'] / result['num_blocks'])} of {format_count(result['num_blocks'])}"),
        ("steps", format_count(result["steps"])),
        ("manager per step", format_nanoseconds(result["manager_ns_per_step"])),
        ("manager per token", format_nanoseconds(result["manager_ns_per_token"]), "hits included"),
        ("time", f"{result['seconds']:.2f} s", f"{result['manager_seconds']:.2f} s of it in the manager"),
    ]
    if "attend" in result:
        attend = result["attend"]
        verdict = "correct" if attend["is_correct"] else f"WRONG, tolerance {attend['tolerance']:g}"
        rows = f"{format_count(attend['checked'])} rows: {verdict}"
        counts.append(("attend error", f"{attend['max_error']:.2g}", rows))
    is_limited = paged["max_concurrency"] == result["concurrency"]
    comparison = [
        ("", "paged", "contiguous"),
        ("requests held at once", format_count(paged["max_concurrency"]), format_count(contiguous["max_concurrency"]),
         "paged: as many as --concurrency allows" if is_limited else ""),
        ("utilization", format_percent(paged["utilization"]), format_percent(contiguous["utilization"])),
        ("waste", format_percent(1 - paged["utilization"]), format_percent(1 - contiguous["utilization"])),
    ]
    if contiguous["max_concurrency"] == 0:
        comparison[2:] = [("utilization", format_percent(paged["utilization"]), "-"),
                          ("waste", format_percent(1 - paged["utilization"]), "-")]
    return "\n".join([
        f"{result['trace']} ({result['format']}), {result['device']}: blocks of {result['block_size']} tokens, "
        f"{result['eviction']}" + ("" if result["prefix_caching"] else ", no prefix caching"),
        "",
        *format_rows(counts, 1),
        "",
        f"On the same memory, {format_count(pool_tokens)} tokens ({format_bytes(pool_bytes)}), beside contiguous "
        f"reservation of {format_count(contiguous['max_length'])} tokens a request:",
        "",
        *format_rows(comparison, 2),
    ])


def format_rows(rows, num_numbers):
    """A name, numbers to the right, and perhaps a note."""
    name_width = max(len(row[0]) for row in rows)
    widths = [max(len(row[1 + i]) for row in rows) for i in range(num_numbers)]
    lines = []
    for row in rows:
        numbers = [text.rjust(width) for text, width in zip(row[1:], widths)]
        lines.append("  " + "  ".join([row[0].ljust(name_width), *numbers, *row[1 + num_numbers:]]).rstrip())
    return lines


def format_count(value):
    return f"{value:,}"


def format_percent(share):
    return f"{100 * share:.2f} %"


def format_nanoseconds(value):
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.2f} ns"


def format_bytes(value):
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << shift:
            return f"{value / (1 << shift):.1f} {unit}"
    return f"{value} B"
