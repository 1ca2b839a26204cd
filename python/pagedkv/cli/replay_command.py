"""`pagedkv replay`: from the arguments to the result."""

import time

import numpy as np

from pagedkv.cli import CommandError, EXIT_FAILED_CHECK, replay_recording, report
from pagedkv.cli.attend import AttendCheck, TOLERANCE
from pagedkv.cli.contiguous import simulate_contiguous
from pagedkv.cli.progress import make_progress
from pagedkv.cli.recording import is_recording
from pagedkv.cli.replay import Replay
from pagedkv.cli.traces import read_trace
from pagedkv.cli.workload import make_chat

NUM_REQUESTS = 4000
NUM_REQUESTS_ATTEND = 100
POOL_TOKENS = 1 << 20
POOL_TOKENS_ATTEND = 1 << 17


def run(arguments):
    """Replays, reports, and returns the exit status."""
    report.check_json_path(arguments.json)
    _check_arguments(arguments)
    if arguments.trace is not None and is_recording(arguments.trace):
        return replay_recording.run(arguments)
    arguments.eviction = arguments.eviction or "lru"
    arguments.block_size = arguments.block_size or 16
    arguments.concurrency = arguments.concurrency or 256
    arguments.num_layers = arguments.num_layers or 1
    trace = _load(arguments)
    result = _replay(arguments, trace)
    report.emit(result, arguments.json, report.format_replay)
    if arguments.attend and not result["attend"]["is_correct"]:
        return EXIT_FAILED_CHECK
    return 0


def _check_arguments(arguments):
    if arguments.trace is not None:
        for name in ("workload", "requests"):
            if getattr(arguments, name) is not None:
                raise CommandError(f"--{name} is for the built-in workload, not for a TRACE" +
                                   (" (--limit takes its first requests)" if name == "requests" else ""))
    if arguments.num_heads is not None and not arguments.attend:
        raise CommandError("--num-heads is for --attend")
    if arguments.attend and not arguments.device.startswith("host"):
        raise CommandError(f"--attend checks on the host: --device {arguments.device} is not supported with it")


def _load(arguments):
    if arguments.trace is not None:
        return read_trace(arguments.trace, arguments.limit, arguments.hash_block_size)
    count = arguments.requests or (NUM_REQUESTS_ATTEND if arguments.attend else NUM_REQUESTS)
    return make_chat(min(count, arguments.limit or count), arguments.seed)


def _make_cache(arguments, num_kv_heads, head_dim):
    from pagedkv import Cache, Layout

    layout = Layout(
        num_layers=arguments.num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim,
        dtype=arguments.dtype or ("float32" if arguments.attend else "float8_e4m3"), block_size=arguments.block_size)
    if arguments.memory is not None:
        size = {"memory": arguments.memory}
    else:
        tokens = POOL_TOKENS_ATTEND if arguments.attend else POOL_TOKENS
        size = {"num_blocks": arguments.num_blocks or -(-tokens // arguments.block_size)}
    return Cache(layout, device=arguments.device, prefix_caching=not arguments.no_prefix_caching,
                 eviction=arguments.eviction, **size)


def _replay(arguments, trace):
    """The result as the JSON has it."""
    num_kv_heads = arguments.num_kv_heads or (2 if arguments.attend else 1)
    head_dim = arguments.head_dim or (64 if arguments.attend else 8)
    num_heads = arguments.num_heads or 2 * num_kv_heads
    if num_heads % num_kv_heads != 0:
        raise CommandError(f"--num-heads {num_heads} is not a multiple of the {num_kv_heads} KV heads")
    output_lengths = np.zeros_like(trace.output_lengths) if arguments.no_output else trace.output_lengths
    concurrency = min(arguments.concurrency, len(trace))

    with _make_cache(arguments, num_kv_heads, head_dim) as cache:
        check = None
        if arguments.attend:
            check = AttendCheck(arguments.num_layers, num_kv_heads, head_dim, num_heads, arguments.seed)
            check.set_scales(cache)
        progress = make_progress(len(trace), "requests")
        start = time.perf_counter()
        try:
            replay = Replay(trace, cache, output_lengths, concurrency, is_sharing=not arguments.no_prefix_caching,
                            check=check, progress=progress)
            counts = replay.run()
        finally:
            if progress is not None:
                progress.close()
        seconds = time.perf_counter() - start
        stats = cache.stats()
        num_blocks = cache.num_blocks
        device = cache.device

    max_length = arguments.max_length or max(trace.longest, 1)
    is_admitted = replay.is_admitted
    contiguous = simulate_contiguous(trace.prompt_lengths[is_admitted], output_lengths[is_admitted],
                                     num_blocks * arguments.block_size, max_length, concurrency)
    num_tokens = counts.prompt_tokens + counts.output_tokens
    result = {
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "output_tokens": counts.output_tokens,
        "hit_tokens": counts.hit_tokens,
        "evictions": stats["evictions"],
        "rejected": counts.rejected,
        "preemptions": counts.preemptions,
        "peak_blocks": counts.peak_blocks,
        "utilization": counts.utilization,
        "manager_ns_per_step": counts.manager_ns / max(counts.steps, 1),
        "contiguous": {
            "max_concurrency": contiguous.max_concurrency,
            "utilization": contiguous.utilization,
            "rejected": contiguous.rejected,
            "max_length": max_length,
        },
        "paged": {"max_concurrency": counts.max_concurrency, "utilization": counts.utilization},
        "manager_ns_per_token": counts.manager_ns / max(num_tokens, 1),
        "hit_rate": counts.hit_tokens / max(counts.prompt_tokens, 1),
        "recomputed_tokens": counts.recomputed_tokens,
        "steps": counts.steps,
        "seconds": seconds,
        "manager_seconds": counts.manager_ns / 1e9,
        "trace": trace.name,
        "format": trace.format,
        "device": device,
        "block_size": arguments.block_size,
        "num_blocks": num_blocks,
        "block_bytes": stats["block_bytes"],
        "concurrency": arguments.concurrency,
        "eviction": arguments.eviction,
        "prefix_caching": not arguments.no_prefix_caching,
    }
    if check is not None:
        result["attend"] = {"is_correct": check.is_correct, "max_error": check.max_error, "tolerance": TOLERANCE,
                            "checked": check.num_checked}
    return result
