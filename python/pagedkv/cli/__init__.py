"""The command line: `pagedkv info`, `pagedkv replay`, `pagedkv lab` and `pagedkv top`.

Errors are one line on stderr and exit status 2; a check that fails (`replay --attend`, or of a
recording) is exit status 1; Ctrl-C is 130.
"""

import argparse
import os
import sys

from pagedkv.cli.traces import TraceError

EXIT_FAILED_CHECK = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


_POLICIES = ["lru", "lfu", "fifo", "slru", "s3fifo", "priority"]


class CommandError(Exception):
    """One line for the user."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage and leaving."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise CommandError(message)


def main(argv=None):
    """Runs one command; returns the exit status."""
    try:
        arguments = _make_parser().parse_args(argv)
        return _run(arguments)
    except CommandError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(arguments):
    try:
        from pagedkv import PagedKVError
    except ImportError as error:
        raise CommandError(f"the library cannot be loaded: {error}") from None
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has gone; nothing more is to be written, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED_CHECK
    except (TraceError, PagedKVError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise CommandError(f"{where}{error.strerror or error}") from None
    except MemoryError:
        raise CommandError("out of memory") from None


def _fail(message):
    print("pagedkv: error: " + " ".join(message.split()), file=sys.stderr)
    return EXIT_ERROR


def _make_parser():
    parser = _Parser(prog="pagedkv", description="A paged KV cache for LLM inference.")
    parser.add_argument("--version", action=_Version, help="show the version of the library and exit")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    _add_info(commands)
    _add_replay(commands)
    _add_lab(commands)
    _add_top(commands)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings, dest, help):
        super().__init__(option_strings, dest, nargs=0, help=help, default=argparse.SUPPRESS)

    def __call__(self, parser, namespace, values, option_string=None):
        import pagedkv

        print(f"pagedkv {pagedkv.version()}")
        parser.exit()


def _add_info(commands):
    text = "Versions, devices, and whether CUDA works here or why not."
    parser = commands.add_parser("info", help=text, description=text)
    _add_json(parser)
    parser.set_defaults(run=_run_info)


def _add_replay(commands):
    parser = commands.add_parser(
        "replay",
        help="Run a request trace through the library and compare with contiguous reservation.",
        description="Runs every request of a trace through the library with continuous batching, and tells what the "
        "cache did and what contiguous reservation at maximum length would have allowed on the same memory. A "
        "recording of calls (cache.trace_start) is made again call by call, and each must have the recorded outcome; "
        "with another --num-blocks or --eviction there is nothing to compare.",
        epilog="Traces: Mooncake and Qwen-Bailian hash_ids JSON lines, ShareGPT token-id JSON lines, Azure CSV, CSV of "
        "prompt and output lengths; plain or gzip; recordings of calls. The format is found by looking at the first "
        "line.")
    source = parser.add_argument_group("requests")
    source.add_argument("trace", metavar="TRACE", nargs="?", help="trace file; without it, the built-in workload")
    source.add_argument("--workload", choices=["chat"], help="built-in workload: multi-turn chat under shared system "
                        "prompts (default without TRACE)")
    source.add_argument("--requests", type=_positive, metavar="N", help="requests of the built-in workload (default "
                        "4000; 100 with --attend)")
    source.add_argument("--seed", type=_not_negative, default=0, metavar="N", help="of everything random (default 0)")
    source.add_argument("--limit", type=_positive, metavar="N", help="read only the first N requests")
    source.add_argument("--hash-block-size", type=_positive, metavar="N", help="tokens that a hash id stands for "
                        "(default: 512, or 16 for Qwen-Bailian)")
    source.add_argument("--no-output", action="store_true", help="prompts only; with --concurrency 1 each is released "
                        "before the next comes")
    source.add_argument("--concurrency", type=_positive, metavar="N", help="most requests that run at once (default "
                        "256)")

    cache = parser.add_argument_group("cache")
    cache.add_argument("--block-size", type=_positive, metavar="N", help="tokens of a block (default 16)")
    size = cache.add_mutually_exclusive_group()
    size.add_argument("--num-blocks", type=_positive, metavar="N", help="blocks of the pool (default: room for 1048576 "
                      "tokens; 131072 with --attend)")
    size.add_argument("--memory", type=_memory, metavar="SIZE", help="or memory of the pool: 512MiB, 20GiB, or 0.8 for "
                      "a share of free memory")
    cache.add_argument("--eviction", choices=_POLICIES, help="which cached block goes first (default lru)")
    cache.add_argument("--no-prefix-caching", action="store_true", help="share nothing between requests")
    cache.add_argument("--device", default="host", metavar="NAME", help="host, cuda, cuda:N or auto (default "
                       "%(default)s)")
    cache.add_argument("--max-length", type=_positive, metavar="N", help="tokens that contiguous reservation reserves "
                       "for each request (default: the trace's longest prompt + output)")

    model = parser.add_argument_group("model", "The manager's work does not depend on these; the defaults keep the "
                                      "pool small. Defaults in brackets are those with --attend.")
    model.add_argument("--attend", action="store_true", help="also write random K/V and attend, and check a sample of "
                       "the outputs against a dense reference; exit status 1 if one is wrong")
    model.add_argument("--num-layers", type=_positive, metavar="N", help="default 1 [1]")
    model.add_argument("--num-kv-heads", type=_positive, metavar="N", help="default 1 [2]")
    model.add_argument("--num-heads", type=_positive, metavar="N", help="query heads, for --attend (default: two for "
                       "each KV head)")
    model.add_argument("--head-dim", type=_positive, metavar="N", help="default 8 [64]")
    model.add_argument("--dtype", choices=["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int8"],
                       help="of stored K and V: default float8_e4m3 [float32]")
    _add_json(parser)
    parser.set_defaults(run=_run_replay)


def _add_lab(commands):
    parser = commands.add_parser(
        "lab",
        help="Run every eviction policy against a range of pool sizes.",
        description="Runs the prompts of a trace, one at a time, through a cache of every size with every eviction "
        "policy, and tells what part of their tokens each one found, beside the most that could be found (Belady's "
        "optimum, which knows the future).",
        epilog="Traces are those of `pagedkv replay`, recordings of calls included.")
    parser.add_argument("trace", metavar="TRACE", help="trace file")
    parser.add_argument("--limit", type=_positive, metavar="N", help="read only the first N requests")
    parser.add_argument("--hash-block-size", type=_positive, metavar="N", help="tokens that a hash id stands for "
                        "(default: 512, or 16 for Qwen-Bailian)")
    parser.add_argument("--block-size", type=_positive, metavar="N", help="tokens of a block (default: what a hash id "
                        "stands for; 16 where there are none)")
    parser.add_argument("--policies", type=_policies, default=_POLICIES, metavar="NAME,...", help="default: " +
                        ",".join(_POLICIES))
    parser.add_argument("--sizes", type=_sizes, metavar="N,...", help="blocks of the pools (default: up to 8 sizes, "
                        "each twice the one before; the last one never evicts)")
    parser.add_argument("--plot", metavar="FILE", help="draw the curves (.svg, .png; needs the extra \"plot\")")
    _add_json(parser)
    parser.set_defaults(run=_run_lab)


def _add_top(commands):
    parser = commands.add_parser(
        "top",
        help="Watch the caches of running processes.",
        description="A live view of the caches of running processes that publish their statistics "
        "(cache.publish_stats()). Reading them does not disturb the processes. Ends with Ctrl-C.",
        epilog="Pages are looked for where PAGEDKV_STATS_DIR says, else in /dev/shm; those that a process left behind "
        "when it was killed are removed. With --json there is an object a line for each refresh.")
    parser.add_argument("--pid", type=_positive, metavar="N", help="of this process only")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between refreshes, and what "
                        "rates are over (default 1)")
    parser.add_argument("--once", action="store_true", help="one interval, one result")
    _add_json(parser)
    parser.set_defaults(run=_run_top)


def _add_json(parser):
    parser.add_argument("--json", metavar="FILE", help="write the result there as JSON; - is standard output, and "
                        "then nothing else is printed")


def _positive(text):
    return _parse_integer(text, 1)


def _not_negative(text):
    return _parse_integer(text, 0)


def _parse_integer(text, smallest):
    try:
        value = int(text)
    except ValueError:
        value = smallest - 1
    if not smallest <= value < 1 << 62:
        raise argparse.ArgumentTypeError(f"a whole number of at least {smallest} is needed, not {text!r}")
    return value


def _seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"a number of seconds from 0.01 to 86400 is needed, not {text!r}")
    return value


def _policies(text):
    names = text.split(",")
    for name in names:
        if name not in _POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not a policy: {', '.join(_POLICIES)}")
    return list(dict.fromkeys(names))


def _sizes(text):
    return sorted({_positive(part) for part in text.split(",")})


def _memory(text):
    """A share of free memory if it is a number up to 1; everything else is for the library to parse."""
    try:
        share = float(text)
    except ValueError:
        return text
    return share if 0 < share <= 1 else text


def _run_info(arguments):
    from pagedkv.cli import info, report

    report.check_json_path(arguments.json)
    result = info.collect_info()
    report.emit(result, arguments.json, info.format_info)
    return 0


def _run_replay(arguments):
    from pagedkv.cli import replay_command

    return replay_command.run(arguments)


def _run_lab(arguments):
    from pagedkv.cli import lab_command

    return lab_command.run(arguments)


def _run_top(arguments):
    from pagedkv.cli import top

    return top.run(arguments)
