"""The policy laboratory: against the library at full block size, against brute force, and by what must hold."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import pagedkv
from pagedkv.cli import lab, main
from pagedkv.cli.traces import Request, Trace
from trace_data import find_trace, make_bailian, make_mooncake, make_random_trace, make_rng, make_sharegpt, write_jsonl


def run_lab(capsys, path, *arguments):
    capsys.readouterr()
    status = main(["lab", str(path), "--json", "-", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return json.loads(captured.out)


def fail(capsys, *arguments):
    capsys.readouterr()
    assert main(["lab", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def find_available():
    """The policies of this build."""
    found = []
    for policy in lab.POLICIES:
        try:
            pagedkv.Cache(lab.make_layout(), num_blocks=1, device="host", eviction=policy).close()
        except pagedkv.UnsupportedError:
            continue
        found.append(policy)
    return found


AVAILABLE = find_available()


def make_trace(prompts, **more):
    requests = [Request(len(prompt), 0, prompt=np.array(prompt, dtype=np.int64), **more) for prompt in prompts]
    return Trace("made", "made", requests)


def make_prompts(rng, count, longest, vocabulary=2):
    return [rng.integers(0, vocabulary, rng.integers(0, longest + 1)).tolist() for _ in range(count)]


# ---- the accesses


def test_blocks_with_equal_histories_are_one():
    trace = make_trace([[1, 1, 1, 1, 9], [1, 1, 1, 1, 1, 1], [2, 1, 1, 1], [5]])
    accesses = lab.find_accesses(trace, 2)
    assert [accesses.blocks[a:b].tolist() for a, b in zip(accesses.offsets, accesses.offsets[1:])] == [
        [0, 1], [0, 1, 2], [3, 4], []]
    assert accesses.needed.tolist() == [3, 3, 2, 1]
    assert accesses.num_usable.tolist() == [2, 2, 1, 0]
    assert (accesses.num_blocks, accesses.footprint) == (5, 6)


def test_namespaces_share_nothing():
    trace = make_trace([[1, 1, 1]] * 2)
    trace.requests[1].namespace = 2**64 - 1
    assert lab.find_accesses(trace, 1).num_blocks == 6


def test_a_region_begins_with_the_block_it_starts_in():
    trace = make_trace([[1] * 8] * 3)
    trace.requests[1].regions = ((3, 7),)
    trace.requests[2].regions = ((3, 7), (6, 8))
    accesses = lab.find_accesses(trace, 2)
    assert accesses.blocks.reshape(3, 4).tolist() == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 4, 5, 7]]


def test_lengths_alone_share_nothing():
    trace = Trace("made", "measured", [Request(40, 1), Request(32, 1), Request(3, 1)])
    accesses = lab.find_accesses(trace)
    assert accesses.block_size == 16
    assert sorted(accesses.blocks.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("block_size", [None, 256, 128, 48])
def test_hash_ids_are_as_good_as_tokens(capsys, tmp_path, block_size):
    """Blocks found by the ids alone are those found by the tokens that the ids stand for."""
    rng = make_rng(5)
    records = [make_mooncake(int(rng.integers(1, 3000)), 1, first=1000 * i, shared=int(rng.integers(0, 6)))
               for i in range(40)]
    from pagedkv.cli.traces import read_trace

    trace = read_trace(write_jsonl(tmp_path / "t.jsonl", records))
    by_tokens = make_trace([trace.prompt_tokens(i) for i in range(len(trace))])
    ids, tokens = lab.find_accesses(trace, block_size), lab.find_accesses(by_tokens, block_size or 512)
    assert ids.block_size == (block_size or 512)
    assert ids.offsets.tolist() == tokens.offsets.tolist()
    pairs = set(zip(ids.blocks.tolist(), tokens.blocks.tolist()))
    assert len(pairs) == ids.num_blocks == tokens.num_blocks


# ---- the policies


@pytest.mark.parametrize("policy", AVAILABLE)
@pytest.mark.parametrize("seed", range(4))
def test_small_caches_stand_for_large_ones(capsys, tmp_path, policy, seed):
    """Blocks of one token for blocks of many: hits and evictions are those of `replay` at the real block size."""
    rng = make_rng(seed)
    path = write_jsonl(tmp_path / "t.jsonl", make_random_trace(rng, 150, 90, 0))
    block_size = int(rng.integers(2, 6))
    result = run_lab(capsys, path, "--policies", policy, "--block-size", block_size, "--sizes", "20,30,60,500")
    assert result["sizes"] == [20, 30, 60, 500]
    for i, size in enumerate(result["sizes"]):
        capsys.readouterr()
        assert main(["replay", str(path), "--json", "-", "--concurrency", "1", "--no-output", "--num-blocks", str(size),
                     "--block-size", str(block_size), "--eviction", policy]) == 0
        full = json.loads(capsys.readouterr().out)
        curve = result["policies"][policy]
        assert (curve["hit_tokens"][i], curve["evictions"][i]) == (full["hit_tokens"], full["evictions"])
        assert result["rejected"][i] == full["rejected"]
        assert curve["hit_rate"][i] == curve["hit_tokens"][i] / result["prompt_tokens"]


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_is_better_than_the_optimum(seed):
    rng = make_rng(seed)
    accesses = lab.find_accesses(make_trace(make_prompts(rng, 300, 24, 3)), int(rng.integers(1, 4)))
    sizes = sorted({*lab.choose_sizes(accesses), *range(1, 40, 6)})
    optimal = lab.run_optimal(accesses, sizes)
    for policy in AVAILABLE:
        curve = lab.run_policy(accesses, policy, sizes)
        assert all(hits <= best for hits, best in zip(curve.hit_tokens, optimal.hit_tokens)), policy
        assert curve.hit_tokens[-1] == optimal.hit_tokens[-1]  # nothing is evicted there
        assert curve.evictions[-1] == 0


def find_best(accesses, size):
    """The most hits of all ways to choose what is kept, in blocks."""
    best = {frozenset(): 0}  # what is kept after a request -> most hits so far
    for index in range(len(accesses)):
        needed, usable = int(accesses.needed[index]), int(accesses.num_usable[index])
        if needed > size:
            continue
        own = accesses.blocks[accesses.offsets[index] : accesses.offsets[index + 1]].tolist()
        following = {}
        for kept, hits in best.items():
            for block in own[:usable]:
                if block not in kept:
                    break
                hits += 1
            others = sorted(kept - set(own))
            # Whatever is dropped could be dropped later as well, but for what must make room now.
            for choice in choose(others, min(len(others), size - needed)):
                state = frozenset(choice) | set(own)
                following[state] = max(following.get(state, 0), hits)
        best = following
    return max(best.values())


def choose(items, count):
    from itertools import combinations

    return combinations(items, count)


@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_is_that_of_brute_force(seed):
    rng = make_rng(seed)
    accesses = lab.find_accesses(make_trace(make_prompts(rng, 9, 6, 2)), int(rng.integers(1, 3)))
    for size in (2, 3, 4, 6):
        assert lab.run_optimal(accesses, [size]).hit_tokens == [find_best(accesses, size) * accesses.block_size]


def test_next_use_skips_requests_that_do_not_run():
    accesses = lab.find_accesses(make_trace([[1, 1, 0], [1] * 9, [1, 1, 2], [1]]), 1)
    runs = accesses.needed <= 4
    assert runs.tolist() == [True, False, True, True]
    first = lab.find_next_use(accesses, runs)[:3].tolist()
    assert first == [2, 2, lab.NEVER]
    assert lab.find_next_use(accesses, np.ones(4, dtype=bool))[:3].tolist() == [1, 1, lab.NEVER]


# ---- the command


def test_default_sizes_end_where_nothing_is_evicted(capsys, tmp_path):
    records = [make_mooncake(5120, 1, shared=shared, first=100 * (i + 1)) for i, shared in enumerate((0, 5, 9, 10) * 8)]
    result = run_lab(capsys, write_jsonl(tmp_path / "t.jsonl", records), "--policies", "lru")
    assert len(result["sizes"]) == 8
    assert result["sizes"][-1] == result["different_blocks"] + 1
    assert result["block_size"] == 512
    assert result["policies"]["lru"]["evictions"][-1] == 0
    assert result["policies"]["lru"]["hit_tokens"][-1] == result["optimal"]["hit_tokens"][-1]
    assert result["rejected"][0] == 32


@pytest.mark.parametrize("records,block_size", [
    ([make_bailian(100, 5, shared=3)] * 3, 16), ([make_sharegpt([1] * 40, [2])] * 3, 16),
    ([{"input_toks": 100, "output_toks": 1}] * 3, 16)])
def test_every_format(capsys, tmp_path, records, block_size):
    result = run_lab(capsys, write_jsonl(tmp_path / "t.jsonl", records), "--policies", "lru")
    assert (result["requests"], result["block_size"]) == (3, block_size)


def test_table(capsys, tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [make_mooncake(5120, 1, shared=5, first=100 * i) for i in range(1, 9)])
    assert main(["lab", str(path), "--policies", "lru", "--sizes", "4,100", "--limit", "6"]) == 0
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.split("\n")]
    assert ["blocks", "tokens", "lru", "optimal", "rejected"] in rows
    assert ["4", "2,048", "0.00", "%", "0.00", "%", "6", "requests"] in rows
    assert ["100", "51,200", "41.67", "%", "41.67", "%"] in rows  # 5 of 6 requests hit 5 of 10 blocks
    assert captured.err == ""


def test_errors_are_one_line(capsys, tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [make_mooncake(600, 1)])
    assert "'mru' is not a policy" in fail(capsys, path, "--policies", "lru,mru")
    assert "whole number" in fail(capsys, path, "--sizes", "4,x")
    assert "No such file" in fail(capsys, tmp_path / "none.jsonl")
    assert "TRACE" in fail(capsys)
    assert "no such directory" in fail(capsys, path, "--json", tmp_path / "none" / "x.json")


def test_an_unsupported_policy_is_an_error(capsys, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "t.jsonl", [make_mooncake(600, 1)])

    def refuse(*arguments, eviction, **options):
        raise pagedkv.UnsupportedError(f"eviction {eviction} is not available", 7)

    monkeypatch.setattr(pagedkv, "Cache", refuse)
    assert "eviction lfu is not available" in fail(capsys, path, "--policies", "lfu")


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = write_jsonl(tmp_path / "t.jsonl", [make_mooncake(5120, 1, shared=5, first=100 * i) for i in range(1, 9)])
    texts = []
    for name in ("a.svg", "b.svg", "c.png"):
        assert main(["lab", str(path), "--policies", "lru", "--plot", str(tmp_path / name)]) == 0
        texts.append((tmp_path / name).read_bytes())
    assert texts[0].startswith(b"<?xml") and texts[0] == texts[1]
    assert texts[2].startswith(b"\x89PNG")
    assert "a figure's name ends in" in fail(capsys, path, "--plot", tmp_path / "a.txt")
    assert "no such directory" in fail(capsys, path, "--plot", tmp_path / "none" / "a.svg")


def test_plot_without_matplotlib(capsys, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "t.jsonl", [make_mooncake(600, 1)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pagedkv[plot]" in fail(capsys, path, "--plot", tmp_path / "a.svg")


def test_mooncake(capsys):
    path = find_trace("mooncake_conversation_trace.jsonl")
    result = run_lab(capsys, path, "--policies", "lru", "--limit", 2000)
    lru, optimal = result["policies"]["lru"]["hit_rate"], result["optimal"]["hit_rate"]
    assert sorted(lru) == lru and sorted(optimal) == optimal
    assert lru[-1] == optimal[-1] > 0.2


def test_help_names_the_policies():
    command = [sys.executable, "-m", "pagedkv", "lab", "--help"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}).stdout
    assert all(policy in text for policy in lab.POLICIES)
    assert pathlib.Path(sys.executable).exists()
