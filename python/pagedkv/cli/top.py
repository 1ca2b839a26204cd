"""`pagedkv top`: a live view of the caches of running processes, through the pages that they publish."""

import json
import os
import shutil
import sys
import time

from pagedkv.cli import CommandError, report
from pagedkv.cli.stats_page import find_pages, read_command

_BAR_WIDTH = 32
_STATES = ("held", "cached", "pending", "uncached")
_SHOW = "\x1b[?1049h\x1b[?25l"  # another screen, no cursor
_HIDE = "\x1b[?25h\x1b[?1049l"


def run(arguments):
    import pagedkv

    report.check_json_path(arguments.json)
    folder = pagedkv.get_stats_folder()
    watcher = Watcher(folder, arguments.pid, pagedkv.device_info)
    if not watcher.look()["caches"]:
        whose = "no process publishes" if arguments.pid is None else f"process {arguments.pid} publishes no"
        raise CommandError(f"{whose} statistics in {folder}: it calls cache.publish_stats()")
    if arguments.once:
        time.sleep(arguments.interval)
        report.emit(_require_caches(watcher.look()), arguments.json, lambda view: "\n".join(format_view(view)))
        return 0
    with Output(arguments.json) as output:
        while True:
            time.sleep(arguments.interval)
            output.write(_require_caches(watcher.look()))


def _require_caches(view):
    if not view["caches"]:
        raise CommandError("the process has ended, or publishes no longer")
    return view


class Watcher:
    """Reads all pages again and again; what happened in between is what counters have grown by."""

    def __init__(self, folder, process_id, ask_device):
        self._folder = folder
        self._process_id = process_id
        self._ask_device = ask_device
        self._last = {}  # key of a page -> (when, values)

    def look(self):
        now = time.monotonic()
        pages = find_pages(self._folder, self._process_id)
        view = {"time": time.time(), "folder": self._folder, "caches": [self._describe(page, now) for page in pages]}
        self._last = {page.key: (now, page.values) for page in pages}
        return view

    def _describe(self, page, now):
        values = page.values
        slots = values.get("held_blocks", 0) * page.block_size
        unused = values.get("unused_slots", -1)
        return {
            "pid": page.process_id,
            "command": read_command(page),
            "path": page.path,
            "device": page.device,
            "version": page.library_version,
            "layout": {"dtype": page.dtype, "block_size": page.block_size, "num_layers": page.num_layers,
                       "num_kv_heads": page.num_kv_heads, "head_dim": page.head_dim, "v_head_dim": page.v_head_dim},
            "eviction": page.eviction,
            "prefix_caching": page.prefix_caching,
            "stats": values,
            "hit_rate": _divide(values.get("hit_tokens", 0), values.get("queried_tokens", 0)),
            "unused_share": min(1.0, unused / slots) if unused >= 0 and slots > 0 else None,
            "interval": self._compare(page, now),
            "memory": self._find_memory(page),
        }

    def _compare(self, page, now):
        """Rates since the last look, or None at the first."""
        if page.key not in self._last:
            return None
        then, old = self._last[page.key]
        seconds = now - then
        grown = {name: page.values.get(name, 0) - old.get(name, 0) for name in page.values}
        return {
            "seconds": seconds,
            "hit_rate": _divide(grown.get("hit_tokens", 0), grown.get("queried_tokens", 0)),
            **{f"{name}_per_second": _divide(grown.get(counter, 0), seconds)
               for name, counter in (("tokens", "appended_tokens"), ("prepares", "prepares"), ("evictions", "evictions"),
                                     ("refusals", "refusals"), ("copied_bytes", "copied_bytes"),
                                     ("uploaded_bytes", "uploaded_bytes"))},
        }

    def _find_memory(self, page):
        """Of the host it is asked now. Of a GPU it is what the process saw last: asking would take a context there."""
        if page.device == "host":
            info = self._ask_device("host")
            return {"total_bytes": info["total_bytes"], "free_bytes": info["free_bytes"], "is_current": True}
        return {"total_bytes": page.values.get("device_total_bytes", 0),
                "free_bytes": page.values.get("device_free_bytes", 0), "is_current": False}


def _divide(a, b):
    return a / b if b > 0 else None


class Output:
    """Where the views go: a screen, plain text, or JSON, an object a line."""

    def __init__(self, json_path):
        self._json_path = json_path
        self._file = None
        self._is_screen = json_path != "-" and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._is_first = True

    def __enter__(self):
        if self._json_path not in (None, "-"):
            self._file = open(self._json_path, "w", encoding="utf-8")
        if self._is_screen:
            sys.stdout.write(_SHOW)
        return self

    def __exit__(self, *exception):
        if self._is_screen:
            sys.stdout.write(_HIDE)
            sys.stdout.flush()
        if self._file is not None:
            self._file.close()

    def write(self, view):
        line = json.dumps(view, allow_nan=False)
        if self._file is not None:
            print(line, file=self._file, flush=True)
        if self._json_path == "-":
            print(line, flush=True)
        elif self._is_screen:
            size = shutil.get_terminal_size()
            lines = format_view(view)[: size.lines - 1]
            sys.stdout.write("\x1b[H" + "".join(f"{line[: size.columns]}\x1b[K\n" for line in lines) + "\x1b[J")
            sys.stdout.flush()
        else:
            print(("" if self._is_first else "\n") + "\n".join(format_view(view)), flush=True)
        self._is_first = False


def format_view(view):
    """Lines of text for all caches."""
    can_draw = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    lines = [time.strftime("%H:%M:%S", time.localtime(view["time"])) + f", {_count(len(view['caches']), 'cache')}"]
    for cache in view["caches"]:
        lines += ["", *_format_cache(cache, "█·" if can_draw else "#.")]
    return lines


def _format_cache(cache, marks):
    stats, layout, interval = cache["stats"], cache["layout"], cache["interval"] or {}
    num_blocks = stats.get("num_blocks", 0)
    state = ", FAILED: a device error left it unusable" if stats.get("is_failed") else ""
    memory = cache["memory"]
    bytes_of_pool = num_blocks * stats.get("block_bytes", 0)
    peak = stats.get("peak_held_blocks", 0)
    rows = [
        ("hit rate", f"{_percent(cache['hit_rate'])} in all, {_percent(interval.get('hit_rate'))} now"),
        ("tokens", f"{_rate(interval.get('tokens_per_second'))}, {_rate(interval.get('prepares_per_second'))} in steps, "
                   f"{report.format_count(stats.get('appended_tokens', 0))} in all"),
        ("evictions", f"{_rate(interval.get('evictions_per_second'))}, {report.format_count(stats.get('evictions', 0))} "
                      f"in all"),
        ("refusals", f"{_rate(interval.get('refusals_per_second'))}, {report.format_count(stats.get('refusals', 0))} "
                     "in all"),
        ("held by", f"{_count(stats.get('num_sequences', 0), 'sequence')}, {_count(stats.get('num_pins', 0), 'pin')}; "
                    f"{_count(stats.get('num_namespaces', 0), 'namespace')}"),
        ("high water", f"{report.format_count(peak)} blocks, {_percent(_divide(peak, num_blocks))}"),
        ("idle", f"{_percent(cache['unused_share'])} of held slots; the last "
                 f"{report.format_count(max(0, stats.get('free_tail_blocks', 0)))} blocks are free"),
        ("moved", f"{report.format_bytes(stats.get('copied_bytes', 0))} copied, "
                  f"{report.format_bytes(stats.get('uploaded_bytes', 0))} of tables uploaded"),
        ("device", f"{report.format_bytes(memory['free_bytes'])} of {report.format_bytes(memory['total_bytes'])} free"
                   + ("" if memory["is_current"] else ", as the process saw it last")),
    ]
    return [
        f"{cache['pid']} {cache['command']}".rstrip() + state,
        f"{cache['device']}, {layout['dtype']}, {layout['num_layers']} layers of {layout['num_kv_heads']} heads of "
        f"{layout['head_dim']}, {report.format_count(num_blocks)} blocks of {layout['block_size']} tokens "
        f"({report.format_bytes(bytes_of_pool)}), {cache['eviction']}",
        *[_format_state(state, stats.get(f"{state}_blocks", 0), num_blocks, marks) for state in _STATES],
        *report.format_rows(rows, 0),
    ]


def _format_state(name, count, total, marks):
    share = count / total if total > 0 else 0.0
    # A few blocks of many still show.
    width = min(_BAR_WIDTH, max(round(share * _BAR_WIDTH), 1 if count > 0 else 0))
    bar = marks[0] * width + marks[1] * (_BAR_WIDTH - width)
    return f"  {name:<10}  {bar} {report.format_count(count):>12}  {100 * share:6.2f} %"


def _percent(share):
    return "-" if share is None else report.format_percent(share)


def _rate(value):
    return "-/s" if value is None else f"{value:,.0f}/s" if value >= 10 or value == 0 else f"{value:.1f}/s"


def _count(number, noun):
    return f"{report.format_count(number)} {noun}" + ("" if number == 1 else "s")
