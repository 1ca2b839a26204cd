"""`pagedkv top` and the pages that it reads, of child processes."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import pagedkv
from pagedkv.cli import main, stats_page

# Works on one block of tokens after another until it is told to end.
CHILD = textwrap.dedent("""
    import select, sys
    import pagedkv
    layout = pagedkv.Layout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16", block_size=4)
    cache = pagedkv.Cache(layout, num_blocks=64, device="host")
    held = cache.open(range(6))
    held.append(range(6))
    print(cache.publish_stats(), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        with cache.open(range(20)) as sequence:
            sequence.append(range(sequence.length, 20))
    print(cache.stats_text("json"), flush=True)
    if sys.stdin.readline() == "close\\n":
        cache.close()
        print("closed", flush=True)
    sys.stdin.readline()  # stays until it is killed
""")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_STATS_DIR", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def start():
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        process.page = process.stdout.readline().strip()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def child():
    with start() as process:
        yield process


def tell(process, line):
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline()


def run(capsys, *arguments):
    status = main(["top", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_page_says_what_stats_says(child):
    page = stats_page.read_page(child.page)
    assert (page.process_id, page.device, page.dtype, page.eviction) == (child.pid, "host", "bfloat16", "lru")
    assert (page.block_size, page.num_layers, page.num_kv_heads, page.head_dim, page.v_head_dim) == (4, 2, 2, 16, 16)
    assert page.library_version == pagedkv.version() and page.prefix_caching
    assert abs(page.created_at - time.time()) < 60
    assert not stats_page.is_stale(page)
    stats = json.loads(tell(child, "end"))
    values = stats_page.read_page(child.page).values
    assert set(values) < set(stats)
    assert values.pop("unused_slots") >= 0
    assert {name: stats[name] for name in values} == values


def test_sets_are_consistent_and_go_forward(child):
    last = 0
    for _ in range(500):
        values = stats_page.read_page(child.page).values
        assert sum(values[f"{state}_blocks"] for state in ("uncached", "cached", "held", "pending")) == 64
        assert values["appended_tokens"] >= last and values["hit_tokens"] <= values["queried_tokens"]
        last = values["appended_tokens"]


def test_once(capsys, child):
    status, out, err = run(capsys, "--once", "--interval", "0.2")
    assert (status, err) == (0, "")
    assert "1 cache" in out and f"\n{child.pid} {sys.executable} -c" in out
    assert "host, bfloat16, 2 layers of 2 heads of 16, 64 blocks of 4 tokens" in out
    for word in ("held", "cached", "uncached", "pending", "hit rate", "evictions", "refusals", "sequence", "high water",
                 "of held slots", "device"):
        assert word in out
    assert "\x1b" not in out


def test_once_json(capsys, child, tmp_path):
    status, out, _ = run(capsys, "--once", "--interval", "0.2", "--json", "-", "--pid", child.pid)
    view = json.loads(out)
    (cache,) = view["caches"]
    assert status == 0 and cache["pid"] == child.pid and cache["path"] == child.page
    assert cache["layout"] == {"dtype": "bfloat16", "block_size": 4, "num_layers": 2, "num_kv_heads": 2, "head_dim": 16,
                               "v_head_dim": 16}
    assert cache["stats"]["held_blocks"] >= 2 and cache["stats"]["num_sequences"] >= 1
    assert 0.5 < cache["hit_rate"] < 1 and 0.5 < cache["interval"]["hit_rate"] <= 0.8
    assert cache["interval"]["tokens_per_second"] > 10 and cache["interval"]["evictions_per_second"] == 0
    assert 0.2 <= cache["interval"]["seconds"] < 10
    assert cache["memory"]["is_current"] and 0 < cache["memory"]["free_bytes"] < cache["memory"]["total_bytes"]
    assert 0 <= cache["unused_share"] <= 1
    path = tmp_path / "top.json"
    status, out, _ = run(capsys, "--once", "--interval", "0.05", "--json", path)
    assert status == 0 and "hit rate" in out and json.loads(path.read_text())["caches"]


def test_a_line_for_each_refresh(child):
    command = [sys.executable, "-m", "pagedkv", "top", "--interval", "0.05", "--json", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        views = [json.loads(top.stdout.readline()) for _ in range(3)]
        top.send_signal(signal.SIGINT)
        _, err = top.communicate(timeout=20)
    assert (top.returncode, err) == (130, "")
    tokens = [view["caches"][0]["stats"]["appended_tokens"] for view in views]
    assert tokens == sorted(tokens) and tokens[0] < tokens[-1]


def test_ends_with_the_process(child):
    command = [sys.executable, "-m", "pagedkv", "top", "--interval", "0.05", "--pid", str(child.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert "1 cache" in top.stdout.readline()
        tell(child, "close")
        assert child.stdout.readline() == "closed\n"
        _, err = top.communicate(timeout=20)
    assert top.returncode == 2 and err.startswith("pagedkv: error: ") and err.count("\n") == 1


def test_screen(child):
    """On a terminal it draws on another screen and leaves nothing behind, on Ctrl-C too."""
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "pagedkv", "top", "--interval", "0.05"]
    top = subprocess.Popen(command, stdout=secondary, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"})
    os.close(secondary)
    text = b""
    deadline = time.monotonic() + 20
    while text.count(b"\x1b[H") < 3 and time.monotonic() < deadline:
        if select.select([primary], [], [], 1)[0]:
            text += os.read(primary, 65536)
    top.send_signal(signal.SIGINT)
    while True:
        try:
            part = os.read(primary, 65536)
        except OSError:
            break
        if not part:
            break
        text += part
    _, err = top.communicate(timeout=20)
    os.close(primary)
    assert (top.returncode, err) == (130, b"")
    assert text.startswith(b"\x1b[?1049h\x1b[?25l") and text.endswith(b"\x1b[?25h\x1b[?1049l")
    assert b"hit rate" in text


@pytest.mark.parametrize("arguments, message", [
    ([], "no process publishes statistics in"),
    (["--pid", "1"], "process 1 publishes no statistics in"),
    (["--pid", "x"], "'x'"),
    (["--pid", "0"], "'0'"),
    (["--interval", "0"], "'0'"),
    (["--interval", "nan"], "'nan'"),
    (["--once", "--json", "/nowhere/at.json"], "/nowhere"),
    (["--frobnicate"], "--frobnicate"),
])
def test_errors_are_one_line(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and err.startswith("pagedkv: error: ") and err.count("\n") == 1 and message in err


def test_what_a_killed_process_left_is_removed(child, folder):
    other = folder / "pkv-somebody"
    os.link(child.page, other)
    assert [page.process_id for page in stats_page.find_pages(folder)] == [child.pid, child.pid]
    child.kill()
    child.wait()
    assert stats_page.is_stale(stats_page.read_page(child.page))
    assert stats_page.find_pages(folder) == []
    assert not os.path.exists(child.page) and other.exists()  # the other name is not the library's


def test_a_later_process_of_the_same_number(child, folder):
    """A page whose process started at another time is not of the process that runs now."""
    page = stats_page.read_page(child.page)
    assert page.start_time > 0
    page.start_time += 1
    assert stats_page.is_stale(page)
    page.process_namespace += 1  # of another namespace nothing is known
    assert not stats_page.is_stale(page)


def test_other_files_are_passed_over(child, folder):
    whole = open(child.page, "rb").read()
    damaged = {
        "empty": b"", "short": whole[:100], "text": b"x" * 4096, "zeros": bytes(4096),
        "version": whole[:8] + (2).to_bytes(4, "little") + whole[12:],
        "names": whole[:48] + (5000).to_bytes(4, "little") + whole[52:],
        "many": whole[:40] + (2**31).to_bytes(4, "little") + whole[44:],
        "values": whole[:52] + (4090).to_bytes(4, "little") + whole[56:],
        "cut": whole[:2000],
    }
    values = int.from_bytes(whole[52:56], "little")
    damaged["writing"] = whole[:values] + (1).to_bytes(8, "little") + whole[values + 8 :]
    for name, text in damaged.items():
        (folder / f"pkv-{name}").write_bytes(text)
        with pytest.raises(stats_page.NoPageError, match=f"pkv-{name}"):
            stats_page.read_page(str(folder / f"pkv-{name}"))
    (folder / "pkv-folder").mkdir()
    os.mkfifo(folder / "pkv-fifo")
    (folder / "pkv-link").symlink_to(child.page)
    assert len(stats_page.find_pages(folder)) == 1
    assert len(list(folder.iterdir())) == len(damaged) + 4
    assert stats_page.find_pages(folder / "nowhere") == []


def test_several_processes(capsys):
    with start() as first, start() as second:
        status, out, _ = run(capsys, "--once", "--interval", "0.05", "--json", "-")
        assert status == 0
        assert [cache["pid"] for cache in json.loads(out)["caches"]] == sorted([first.pid, second.pid])
        _, out, _ = run(capsys, "--once", "--interval", "0.05", "--json", "-", "--pid", second.pid)
        assert [cache["pid"] for cache in json.loads(out)["caches"]] == [second.pid]


# ---- the calls


def test_publish(cache, folder, refuses):
    path = cache.publish_stats()
    assert path == str(folder / os.path.basename(path)) and os.path.basename(path).startswith(f"pkv-{os.getpid()}-")
    assert os.stat(path).st_mode & 0o777 == 0o600
    with refuses(cache, pagedkv.BusyError, path):
        cache.publish_stats()
    sequence = cache.open(np.arange(9))
    sequence.append(np.arange(9))
    assert stats_page.read_page(path).values["held_blocks"] == 3
    assert stats_page.read_page(path).values["unused_slots"] == 0
    cache.measure()
    assert stats_page.read_page(path).values["unused_slots"] == 3
    cache.unpublish_stats()
    cache.unpublish_stats()
    assert not os.path.exists(path)
    chosen = folder / "here"
    assert cache.publish_stats(chosen) == str(chosen)
    assert stats_page.read_page(str(chosen)).values["held_blocks"] == 3


def test_closing_removes_the_page(layout):
    cache = pagedkv.Cache(layout, num_blocks=4, device="host")
    path = cache.publish_stats()
    cache.close()
    assert not os.path.exists(path)
    for call in (cache.publish_stats, cache.unpublish_stats, cache.measure):
        with pytest.raises(pagedkv.InvalidArgumentError, match="closed"):
            call()
    other = pagedkv.Cache(layout, num_blocks=4, device="host")
    path = other.publish_stats()
    del other
    assert not os.path.exists(path)


@pytest.mark.parametrize("path", [1, 1.5, ["x"], "a\0b"])
def test_bad_paths(cache, refuses, path):
    with refuses(cache, text="path"):
        cache.publish_stats(path)


def test_a_folder_that_is_not_there(cache, refuses, monkeypatch):
    monkeypatch.setenv("PAGEDKV_STATS_DIR", "/nowhere")
    assert pagedkv.get_stats_folder() == "/nowhere"
    with refuses(cache, text="/nowhere"):
        cache.publish_stats()


def test_a_relative_path(cache, folder, monkeypatch):
    monkeypatch.chdir(folder)
    path = cache.publish_stats("page")
    monkeypatch.chdir("/")
    assert path == str(folder / "page")
    cache.unpublish_stats()
    assert not os.path.exists(path)


def test_measures(cache):
    empty = cache.measure()
    assert empty == {"held_blocks": 0, "unused_slots": 0, "unused_share": 0.0, "reserved_blocks": 0,
                     "free_tail_blocks": 16, "num_free_runs": 1, "longest_free_run": 16}
    sequence = cache.open(np.arange(6))
    sequence.append(np.arange(6))
    sequence.reserve(5)
    assert cache.measure()["unused_share"] == 0.5
    stats = cache.stats()
    assert (stats["unused_slots"], stats["free_tail_blocks"]) == (6, 13)
    assert 0 < stats["device_free_bytes"] <= stats["device_total_bytes"]


def test_pages_are_measured_now_and_then(cache):
    path = cache.publish_stats()
    sequence = cache.open([])
    sequence.append([1])
    assert stats_page.read_page(path).values["unused_slots"] == 0
    for _ in range(5000):
        cache.evict(0)
    assert stats_page.read_page(path).values["unused_slots"] == 3


# ---- ranges


def test_ranges(step):
    text = []
    pagedkv.set_range_callbacks(lambda name: text.append(name), lambda: text.append("-"))
    try:
        child = step.sequences[0].fork()
        child.append([7])
        step.cache.write_kv(0, step.batch, step.k, step.v)
        with pytest.raises(pagedkv.InvalidArgumentError):
            step.cache.attend(0, step.batch, step.q[:3])
        step.cache.attend(0, step.batch, step.q)
    finally:
        pagedkv.set_range_callbacks(None, None)
    step.cache.attend(0, step.batch, step.q)
    depth = 0
    for entry in text:
        depth += -1 if entry == "-" else 1
        assert 0 <= depth <= 2
    assert depth == 0
    assert "".join(text).replace("pagedkv.", " ").split("-")[0] == " prepare copy_blocks"
    assert [entry for entry in text if entry != "-"][2:] in (
        ["pagedkv.write_kv", "pagedkv.attend"], ["pagedkv.write_kv", "pagedkv.attend", "pagedkv.attend"])


def test_bad_callbacks():
    for pair in ((None, print), (print, None), (1, print), (print, "x")):
        with pytest.raises(pagedkv.InvalidArgumentError):
            pagedkv.set_range_callbacks(*pair)
    for path in ("/nowhere/at.so", __file__):
        with pytest.raises(pagedkv.UnsupportedError, match=os.path.basename(path)):
            pagedkv.enable_nvtx(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_callbacks_raise_is_unraisable(cache):
    def fail(*arguments):
        raise ValueError("from a callback")

    pagedkv.set_range_callbacks(fail, fail)
    try:
        cache.open([1]).append([1])
    finally:
        pagedkv.set_range_callbacks(None, None)
    assert cache.check()


def test_a_profiler_of_the_environment_that_is_none():
    code = ("import warnings\n"
            "with warnings.catch_warnings(record=True) as seen:\n"
            "    import pagedkv\n"
            "print(len(seen), seen[0].message)")
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, "NVTX_INJECTION64_PATH": "/nowhere.so"},
                           capture_output=True, text=True, check=True)
    assert found.stdout.startswith("1 NVTX_INJECTION64_PATH='/nowhere.so' is ignored")
