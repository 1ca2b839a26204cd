"""Recordings of calls: replayed, each call does what it did; a changed one is found; other pools and policies run."""

import json
import subprocess
import sys

import numpy as np
import pytest

import pagedkv
from fuzz.test_manager import Driver
from pagedkv.cli import lab, main
from pagedkv.cli.recording import CALLS, Recording, read_recorded_requests
from trace_data import make_random_trace, make_rng, write_jsonl


def replay(capsys, path, *arguments, status=0):
    capsys.readouterr()
    result = main(["replay", str(path), "--json", "-", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (result, captured.err) == (status, "")
    return json.loads(captured.out)


def fail(capsys, *arguments):
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calls.pkvtrace"


def record_random_calls(path, seed, num_calls=150):
    """Returns what the cache says at the end."""
    driver = Driver("host", seed)
    driver.cache.trace_start(path)
    for _ in range(num_calls):
        driver.run()
    stats = driver.cache.stats()
    driver.cache.trace_stop()
    return stats


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(capsys, path, seed):
    stats = record_random_calls(path, seed)
    assert stats["is_tracing"]
    result = replay(capsys, path)
    assert result["verified"] is True and result["is_complete"] and result["first_difference"] is None
    for key in ("hit_tokens", "evictions", "copies", "appended_tokens", "num_blocks"):
        assert result[key] == stats[key]
    assert (result["prompt_tokens"], result["peak_blocks"]) == (stats["queried_tokens"], stats["peak_held_blocks"])
    assert (result["skipped_calls"], result["diverged_calls"], result["rejected"]) == (0, 0, 0)


def test_every_recorded_call_is_read(path):
    names = {}
    for seed in range(8):
        record_random_calls(path, seed)
        for record in Recording(path):
            names.setdefault(record.name, set()).add(record.status)
    assert {"open", "append", "prepare", "fork", "truncate", "commit", "discard", "reserve", "rematch", "evict", "close",
            "reset", "batch", "end", "prepare_ahead", "settle"} <= names.keys()
    assert names["prepare"] == {0, 4, 5} and 6 in names["reset"]


def test_resizes(capsys, path):
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    rng = make_rng(4)
    cache = pagedkv.Cache(layout, num_blocks=16, device="host", max_num_blocks=32, eviction="s3fifo")
    cache.resize(12)
    cache.trace_start(path)
    open_now = []
    for _ in range(200):
        try:
            if rng.integers(3) == 0:
                cache.resize(int(rng.integers(4, 33)), move=bool(rng.integers(2)))
            elif rng.integers(2) and open_now:
                open_now.pop(rng.integers(len(open_now))).close()
            else:
                prompt = rng.integers(0, 2, rng.integers(1, 24))
                open_now.append(cache.open(prompt))
                open_now[-1].append(prompt[open_now[-1].length:])
        except (pagedkv.OutOfBlocksError, pagedkv.BusyError):
            pass
    stats = cache.stats()
    cache.trace_stop()
    statuses = {record.status for record in Recording(path) if record.name == "resize"}
    assert statuses == {0, 4, 6} and stats["moved_blocks"] > 0
    result = replay(capsys, path)
    assert result["verified"] is True and result["num_blocks"] == stats["num_blocks"]
    assert result["evictions"] == stats["evictions"]
    other = replay(capsys, path, "--num-blocks", 64)  # stays at the size asked for
    assert other["verified"] is None and other["num_blocks"] == 64 and other["skipped_calls"] > 10
    assert replay(capsys, path, "--eviction", "lru")["num_blocks"] == stats["num_blocks"]


def test_a_difference_is_found(capsys, path):
    """A byte of a token, changed in the file: the hit that depends on it is gone."""
    with make_cache() as cache:
        cache.trace_start(path)
        for _ in range(2):
            with cache.open([70, 71, 72, 73, 74]) as sequence:
                sequence.append(np.arange(70 + sequence.length, 75))
        cache.trace_stop()
    assert replay(capsys, path)["verified"] is True
    data = bytearray(path.read_bytes())
    place = data.rindex(bytes([70, 71, 72, 73, 74]))
    data[place] = 60
    path.write_bytes(data)
    result = replay(capsys, path, status=1)
    assert result["verified"] is False
    assert "open: gave 4 in the recording, 0 here" in result["first_difference"]
    assert main(["replay", str(path)]) == 1
    assert "DIFFERENT: call 4 (byte " in capsys.readouterr().out


def make_cache(num_blocks=16, **more):
    layout = pagedkv.Layout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float16", block_size=4)
    return pagedkv.Cache(layout, num_blocks=num_blocks, device="host", **more)


def test_the_header_has_the_options(path):
    layout = pagedkv.Layout(num_layers=3, num_kv_heads=5, head_dim=24, v_head_dim=16, dtype="int8", block_size=7,
                            order="head_token", kv_scales="token_head")
    with pagedkv.Cache(layout, memory="100KiB", device="host", prefix_caching=False) as cache:
        cache.trace_start(path)
        cache.trace_stop()
        recording = Recording(path)
        expected = {"block_size": 7, "num_layers": 3, "num_kv_heads": 5, "head_dim": 24, "v_head_dim": 16, "dtype": 6,
                    "order": 1, "kv_scales": 1, "num_blocks": cache.num_blocks, "prefix_caching": 2, "eviction": 0}
        assert {key: recording.options[key] for key in expected} == expected
        assert (recording.device, recording.library_version) == ("host", pagedkv.version())
    assert [record.name for record in recording] == ["end"] and recording.is_complete


def test_tokens_take_few_bytes(path):
    with make_cache(600) as cache:
        cache.trace_start(path)
        for shift, width in ((0, 2), (100000, 4), (2**40, 8)):
            before = path.stat().st_size
            cache.open(np.arange(1000) + shift).close()
            cache.trace_stop()
            assert path.stat().st_size - before in range(1000 * width, 1000 * width + 130)
            cache.trace_start(path)


def test_a_file_that_is_cut_off(capsys, path):
    record_random_calls(path, 3)
    data = path.read_bytes()
    whole = len(list(Recording(path)))
    for size in (len(data) - 1, len(data) // 2, len(data) // 2 + 1, len(data) // 2 + 2):
        path.write_bytes(data[:size])
        result = replay(capsys, path)
        assert result["verified"] is True and not result["is_complete"]
        assert len(list(Recording(path))) < whole
    assert main(["replay", str(path)]) == 0
    assert "cut off" in capsys.readouterr().out
    path.write_bytes(data[:30])
    assert "the file ends inside the header" in fail(capsys, "replay", path)


def test_damaged_files_are_refused(capsys, path):
    record_random_calls(path, 3, 20)
    data = path.read_bytes()
    start = next(iter(Recording(path))).offset
    path.write_bytes(data[:start] + b"\xee" + data[start + 1 :])
    assert f"byte {start}: a record of kind 238, unknown" in fail(capsys, "replay", path)
    path.write_bytes(data[:8] + b"\x09" + data[9:])
    assert "version 9 of the format" in fail(capsys, "replay", path)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_no_crash(capsys, path, seed):
    record_random_calls(path, seed, 60)
    data = bytearray(path.read_bytes())
    rng = make_rng(seed)
    start = next(iter(Recording(path))).offset
    for place in rng.integers(start, len(data), 3):
        data[place] = int(rng.integers(0, 256))
    path.write_bytes(data)
    command = [sys.executable, "-m", "pagedkv", "replay", str(path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode in (0, 1, 2) and "Traceback" not in process.stderr, process.stderr


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_larger", [True, False])
def test_another_pool(capsys, path, seed, is_larger):
    stats = record_random_calls(path, seed)
    num_blocks = 200 if is_larger else stats["num_blocks"] // 2
    result = replay(capsys, path, "--num-blocks", num_blocks)
    assert result["verified"] is None and result["num_blocks"] == num_blocks
    if is_larger:
        assert result["evictions"] <= stats["evictions"]
        assert result["rejected"] == 0


def test_more_blocks_find_more(capsys, path):
    """A recording of a pool that is too small, in larger ones: the hits are those of requests that ran there."""
    rng = make_rng(1)
    prompts = [rng.integers(0, 2, rng.integers(8, 60)) for _ in range(200)]

    def run(cache):
        for prompt in prompts:
            with cache.open(prompt) as sequence:
                sequence.append(prompt[sequence.length :])
                sequence.append([-1, -1])
        return cache.stats()

    with make_cache(18) as cache:
        cache.trace_start(path)
        run(cache)
        cache.trace_stop()
    for num_blocks in (20, 40, 400):
        with make_cache(num_blocks) as cache:
            expected = run(cache)
        result = replay(capsys, path, "--num-blocks", num_blocks)
        assert (result["hit_tokens"], result["evictions"]) == (expected["hit_tokens"], expected["evictions"])
        assert (result["diverged_calls"], result["rejected"]) == (0, 0)
    assert replay(capsys, path, "--num-blocks", 18)["verified"] is True
    assert replay(capsys, path, "--eviction", "lru")["verified"] is True


def test_replay_of_a_replay(capsys, path, tmp_path, monkeypatch):
    """What the built-in replay of a request trace does to its cache, recorded."""
    trace = write_jsonl(tmp_path / "t.jsonl", make_random_trace(make_rng(2), 60, 40, 12))
    made = pagedkv.Cache

    def make(*arguments, **options):
        cache = made(*arguments, **options)
        cache.trace_start(path)
        return cache

    monkeypatch.setattr(pagedkv, "Cache", make)
    expected = replay(capsys, trace, "--num-blocks", 60, "--block-size", 3, "--concurrency", 7)
    monkeypatch.undo()
    result = replay(capsys, path)
    assert result["verified"] is True and result["is_complete"]
    assert (result["evictions"], result["steps"], result["peak_blocks"]) == tuple(
        expected[key] for key in ("evictions", "steps", "peak_blocks"))


def test_the_laboratory_takes_a_recording(capsys, path):
    prompts = [[1] * 9, [1] * 9, [2] * 5]
    with make_cache() as cache:
        cache.trace_start(path)
        for prompt in prompts:
            with cache.open(prompt, namespace=3, priority=2) as sequence:
                sequence.append(prompt[sequence.length :])
        cache.open([1] * 9).close()
        cache.trace_stop()
    trace = read_recorded_requests(path)
    assert [request.prompt.tolist() for request in trace.requests] == [*prompts, [1] * 9]
    assert [request.namespace for request in trace.requests] == [3, 3, 3, 0]
    assert lab.find_accesses(trace, 4).num_blocks == 5
    capsys.readouterr()
    assert main(["lab", str(path), "--policies", "lru", "--json", "-", "--block-size", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["format"], result["requests"], result["optimal"]["hit_tokens"][-1]) == ("recording", 4, 8)
    assert "not for a recording" in fail(capsys, "lab", path, "--hash-block-size", 4)


def test_prefixes_namespaces_and_retention(capsys, path):
    """Each of the calls about prefixes and namespaces, those that are refused too."""
    with make_cache(12, eviction="slru") as cache:
        cache.trace_start(path)
        cache.set_quota(7, 6)
        shared = list(range(8))
        with cache.open(shared, namespace=7, salts=[(4, 9)], priority=2, tag=5) as sequence:
            sequence.append([*shared, 1])
            sequence.retain(0, 4, priority=3)
        assert cache.touch([*shared, 2], namespace=7, salts=[(4, 9)]) == 8
        pin = cache.pin(shared, namespace=7, salts=[(4, 9)])
        with pytest.raises(pagedkv.NotFoundError):
            cache.pin([5, 5, 5, 5, 5])
        with pytest.raises(pagedkv.NeverFitsError):
            with cache.open([], namespace=7) as sequence:
                sequence.append([1] * 40)
        again = cache.open([*shared, 3], namespace=7, salts=[(4, 9)])
        assert again.num_cached_tokens == 8
        pin.unpin()
        again.close()
        assert cache.invalidate(9) == 1
        cache.set_quota(7, 0)
        cache.pin(shared[:4], namespace=7)
        cache.reset()
        cache.trace_stop()
    found = [(record.name, record.status) for record in Recording(path)]
    for call in ("touch", "pin", "unpin", "invalidate", "set_quota", "set_retention"):
        assert (call, 0) in found
    assert ("pin", 2) in found and ("append", 5) in found
    result = replay(capsys, path)
    assert result["verified"] is True and result["eviction"] == "slru"
    assert replay(capsys, path, "--eviction", "fifo")["verified"] is None
    assert replay(capsys, path, "--num-blocks", 100)["diverged_calls"] == 0


def test_options_of_request_traces_are_refused(capsys, path):
    record_random_calls(path, 0, 5)
    for option in (["--limit", 3], ["--no-output"], ["--attend"], ["--block-size", 8], ["--concurrency", 2]):
        assert f"{option[0]} is for a request trace" in fail(capsys, "replay", path, *option)


def test_start_and_stop(path, refuses):
    with make_cache() as cache:
        with refuses(cache, text="not being recorded"):
            cache.trace_stop()
        with refuses(cache, text="path must be a path"):
            cache.trace_start(3)
        with refuses(cache, text="NUL"):
            cache.trace_start("a\0b")
        with refuses(cache, text="No such file"):
            cache.trace_start(path / "none" / "x")
        cache.trace_start(str(path))
        with refuses(cache, pagedkv.BusyError, "already"):
            cache.trace_start(path)
        sequence = cache.open([1])
        cache.trace_stop()
        with refuses(cache, pagedkv.BusyError, "open"):
            cache.trace_start(path)
        sequence.close()


def test_stale_ids_and_failed_calls_are_recorded(capsys, path):
    with make_cache(4) as cache:
        batch = cache.batch(2, 64)
        cache.trace_start(path)
        sequence = cache.open([1, 2])
        with pytest.raises(pagedkv.OutOfBlocksError):
            other = cache.open([])
            other.append([1] * 12)
            sequence.append([1] * 8)
        with pytest.raises(pagedkv.NeverFitsError):
            batch.prepare([sequence], [60])
        with pytest.raises(pagedkv.InvalidArgumentError):
            sequence.truncate(5)
        cache.trace_stop()
    statuses = [(record.name, record.status) for record in Recording(path)]
    assert statuses == [("open", 0), ("open", 0), ("append", 0), ("append", 4), ("batch", 0), ("prepare", 5),
                        ("truncate", 1), ("close", 0), ("end", 0)] or statuses[-2][0] == "truncate"
    result = replay(capsys, path)
    assert result["verified"] is True and result["refused_calls"] == 3


def test_the_table_of_calls_is_that_of_the_document(request):
    """docs/trace-formats.md names every kind of record with its number."""
    text = (request.config.rootpath / "docs" / "trace-formats.md").read_text()
    for code, (name, _, _) in CALLS.items():
        assert f"| {code} | `{name}` |" in text


def test_a_loaded_snapshot_ends_a_replay(capsys, path, tmp_path):
    with make_cache() as cache:
        with cache.open(range(9)) as sequence:
            sequence.append(range(9))
        cache.save(tmp_path / "prefixes")
        cache.reset()
        cache.trace_start(path)
        with pytest.raises(pagedkv.PagedKVError):
            cache.load(tmp_path / "none")
        cache.trace_stop()
        assert replay(capsys, path)["skipped_calls"] == 1
        cache.trace_start(path)
        assert cache.load(tmp_path / "prefixes") == 2
        cache.trace_stop()
    assert "a snapshot was loaded here" in fail(capsys, "replay", path)
