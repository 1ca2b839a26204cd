"""Replays: sequential ones against a small model of the prefix cache, concurrent ones by what must always hold."""

import json
from collections import OrderedDict

import pytest

from pagedkv.cli import main
from trace_data import (
    find_trace, make_bailian, make_mooncake, make_random_trace, make_rng, make_sharegpt, write_jsonl)


def replay(capsys, path, *arguments):
    capsys.readouterr()
    status = main(["replay", str(path), "--json", "-", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return json.loads(captured.out)


SEQUENTIAL = ("--concurrency", 1, "--no-output")


# ---- sequential: one request at a time, prompts only


def replay_in_model(prompts, block_size, num_blocks):
    """Hits, evictions, rejected and peak of an LRU prefix cache that has one sequence at a time."""
    cached = OrderedDict()  # prefix of whole blocks: least recently released first
    num_uncached = num_blocks
    hits = evictions = rejected = peak = 0
    for prompt in map(tuple, prompts):
        needed = -(-len(prompt) // block_size)
        if needed > num_blocks:
            rejected += 1
            continue
        num_hit = 0
        while (num_hit + 1) * block_size < len(prompt) and prompt[: (num_hit + 1) * block_size] in cached:
            num_hit += 1
            del cached[prompt[: num_hit * block_size]]
        hits += num_hit * block_size
        more = needed - num_hit
        num_evicted = max(0, more - num_uncached)
        for _ in range(num_evicted):
            cached.popitem(last=False)
        evictions += num_evicted
        num_uncached -= more - num_evicted
        peak = max(peak, needed)
        for i in range(needed, 0, -1):  # released last to first
            end = i * block_size
            if end <= len(prompt) and prompt[:end] not in cached:
                cached[prompt[:end]] = True
            else:
                num_uncached += 1
    return {"hit_tokens": hits, "evictions": evictions, "rejected": rejected, "peak_blocks": peak}


@pytest.mark.parametrize("seed", range(12))
def test_sequential_equals_the_model(capsys, tmp_path, seed):
    rng = make_rng(seed)
    records = make_random_trace(rng, 200, 30, 3)
    path = write_jsonl(tmp_path / "trace", records)
    block_size, num_blocks = int(rng.integers(1, 8)), int(rng.integers(1, 40))
    result = replay(capsys, path, *SEQUENTIAL, "--block-size", block_size, "--num-blocks", num_blocks)
    prompts = [record["input_tok_ids"] for record in records]
    expected = replay_in_model(prompts, block_size, num_blocks)
    assert {key: result[key] for key in expected} == expected
    fitting = [len(prompt) for prompt in prompts if -(-len(prompt) // block_size) <= num_blocks]
    assert result["prompt_tokens"] == sum(fitting) and result["output_tokens"] == 0
    assert result["steps"] == len(fitting) and result["preemptions"] == 0
    shares = [length / (-(-length // block_size) * block_size) for length in fitting]
    assert result["utilization"] == pytest.approx(sum(shares) / max(len(shares), 1))
    assert result["paged"]["max_concurrency"] == min(len(fitting), 1)


@pytest.mark.parametrize("make, block", [(make_mooncake, 512), (make_bailian, 16)])
def test_shared_hash_ids_are_hits(capsys, tmp_path, make, block):
    # Three blocks shared; the fourth id is partial in both and differs.
    path = write_jsonl(tmp_path / "trace", [make(3 * block + 5, 2, 100, 3), make(3 * block + 5, 2, 200, 3)])
    assert replay(capsys, path, *SEQUENTIAL)["hit_tokens"] == 3 * block
    assert replay(capsys, path, *SEQUENTIAL, "--no-prefix-caching")["hit_tokens"] == 0
    # Concurrent: the second waits for the step after the first.
    assert replay(capsys, path)["hit_tokens"] == 3 * block


def test_one_token_is_left_to_compute(capsys, tmp_path):
    path = write_jsonl(tmp_path / "trace", [make_mooncake(1024, 2, 0, 2)] * 2)
    assert replay(capsys, path, *SEQUENTIAL)["hit_tokens"] == 1008
    assert replay(capsys, path, *SEQUENTIAL, "--block-size", 512)["hit_tokens"] == 512


@pytest.mark.parametrize("text", [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n1,500,5\n2,500,5\n", "prompt,output\n99,9\n99,9\n"])
def test_lengths_share_nothing(capsys, tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    assert replay(capsys, path)["hit_tokens"] == replay(capsys, path, *SEQUENTIAL)["hit_tokens"] == 0


# ---- concurrent


def check_always(result, records, block_size, num_blocks, concurrency):
    lengths = [(len(r["input_tok_ids"]), len(r["output_tok_ids"])) for r in records]
    fitting = [(p, o) for p, o in lengths if -(-(p + o) // block_size) <= num_blocks]
    assert result["requests"] == len(records)
    assert result["rejected"] == len(lengths) - len(fitting)
    assert result["prompt_tokens"] == sum(p for p, _ in fitting)
    assert result["output_tokens"] == sum(o for _, o in fitting)
    assert 0 <= result["hit_tokens"] <= result["prompt_tokens"]
    assert result["hit_tokens"] % block_size == 0
    assert 0 <= result["peak_blocks"] <= num_blocks
    assert 0 <= result["utilization"] <= 1 and 0 <= result["contiguous"]["utilization"] <= 1
    assert result["paged"]["max_concurrency"] <= min(concurrency, len(records))
    assert (result["recomputed_tokens"] > 0) <= (result["preemptions"] > 0)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_tiny_pools_end_and_count_right(capsys, tmp_path, seed, caching):
    rng = make_rng(seed)
    records = make_random_trace(rng, 120, 20, 40, vocabulary=int(rng.integers(1, 4)))
    path = write_jsonl(tmp_path / "trace", records)
    block_size, num_blocks = int(rng.integers(1, 6)), int(rng.integers(1, 60))
    concurrency = int(rng.integers(1, 20))
    result = replay(capsys, path, "--block-size", block_size, "--num-blocks", num_blocks, "--concurrency", concurrency,
                    *([] if caching else ["--no-prefix-caching"]))
    check_always(result, records, block_size, num_blocks, concurrency)
    if not caching:
        assert result["hit_tokens"] == result["evictions"] == 0


def test_full_pool_preempts_and_ends(capsys, tmp_path):
    # Four requests of one full block each fill the pool; then each wants another at once.
    path = tmp_path / "trace"
    path.write_text("prompt,output\n" + "4,9\n" * 4)
    result = replay(capsys, path, "--block-size", 4, "--num-blocks", 4)
    assert result["output_tokens"] == 36 and result["rejected"] == 0
    assert result["preemptions"] >= 3 and result["peak_blocks"] == 4
    assert result["paged"]["max_concurrency"] == 4


def test_never_fits_is_rejected(capsys, tmp_path):
    path = tmp_path / "trace"
    path.write_text("prompt,output\n10,6\n10,7\n2147483647,2147483647\n17,0\n3,0\n")
    result = replay(capsys, path, "--num-blocks", 1)
    assert (result["requests"], result["rejected"], result["prompt_tokens"]) == (5, 3, 13)
    result = replay(capsys, path, "--num-blocks", 1, "--no-output")
    assert (result["requests"], result["rejected"], result["prompt_tokens"]) == (5, 2, 23)


def test_all_rejected(capsys, tmp_path):
    path = tmp_path / "trace"
    path.write_text("prompt,output\n100,6\n")
    result = replay(capsys, path, "--num-blocks", 1)
    assert (result["rejected"], result["steps"], result["peak_blocks"]) == (1, 0, 0)
    assert result["contiguous"]["max_concurrency"] == result["paged"]["max_concurrency"] == 0
    assert main(["replay", str(path), "--num-blocks", "1"]) == 0


def test_empty_prompts_and_outputs(capsys, tmp_path):
    path = tmp_path / "trace"
    path.write_text("prompt,output\n0,0\n0,3\n5,0\n0,0\n")
    result = replay(capsys, path)
    assert (result["prompt_tokens"], result["output_tokens"], result["rejected"]) == (5, 3, 0)


def test_requests_run_together(capsys, tmp_path):
    path = tmp_path / "trace"
    path.write_text("prompt,output\n" + "20,10\n" * 8)
    result = replay(capsys, path)
    assert (result["steps"], result["peak_blocks"], result["paged"]["max_concurrency"]) == (11, 16, 8)
    # Two blocks each: 20 to 30 tokens of 32 slots.
    assert result["utilization"] == pytest.approx(25 / 32)
    assert result["contiguous"] == {"max_concurrency": 1048576 // 30, "utilization": pytest.approx(25 / 30),
                                    "rejected": 0, "max_length": 30}
    result = replay(capsys, path, "--concurrency", 3)
    assert (result["steps"], result["paged"]["max_concurrency"]) == (33, 3)
    result = replay(capsys, path, "--num-blocks", 10, "--max-length", 40)
    assert result["contiguous"]["max_concurrency"] == 4 and result["paged"]["max_concurrency"] == 5


def test_shared_blocks_count_once(capsys, tmp_path):
    records = [make_sharegpt([*range(32), 100 + i], [1] * 20) for i in range(4)]
    path = write_jsonl(tmp_path / "trace", records)
    result = replay(capsys, path)
    assert result["hit_tokens"] == 3 * 32
    assert result["peak_blocks"] == 2 + 4 * 2
    assert 0.5 < result["utilization"] <= 1


def test_output_is_found_by_the_next_turn(capsys, tmp_path):
    first = make_sharegpt(range(20), range(100, 128))
    second = make_sharegpt([*range(20), *range(100, 128), 7], [8])
    path = write_jsonl(tmp_path / "trace", [first, second])
    assert replay(capsys, path, "--concurrency", 1)["hit_tokens"] == 48


def test_memory_sizes_the_pool(capsys, tmp_path):
    path = tmp_path / "trace"
    path.write_text("prompt,output\n20,10\n")
    result = replay(capsys, path, "--memory", "1MiB", "--head-dim", 8, "--dtype", "float8_e4m3")
    assert result["num_blocks"] == (1 << 20) // result["block_bytes"]


def test_builtin_workload(capsys):
    arguments = ["replay", "--requests", "300", "--num-blocks", "1500", "--json", "-"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["format"] == "chat" and first["requests"] == 300
    assert first["hit_tokens"] > 0 and first["evictions"] > 0
    assert first["paged"]["max_concurrency"] > first["contiguous"]["max_concurrency"]
    assert first["paged"]["utilization"] > 0.9 > first["contiguous"]["utilization"]
    assert main([*arguments, "--seed", "1"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["prompt_tokens"] != first["prompt_tokens"]
    assert main(arguments) == 0
    again = json.loads(capsys.readouterr().out)
    same = [key for key in first if "second" not in key and "_ns_" not in key]
    assert [first[key] for key in same] == [again[key] for key in same]


# ---- attention


@pytest.mark.parametrize("arguments", [
    (),
    ("--dtype", "float16", "--num-layers", 2, "--num-heads", 6),
    ("--dtype", "bfloat16", "--block-size", 5),
    ("--dtype", "float8_e4m3", "--head-dim", 72),
    ("--dtype", "float8_e5m2", "--num-kv-heads", 1),
    ("--dtype", "int8", "--head-dim", 16, "--num-kv-heads", 3, "--num-heads", 3),
])
def test_attend_is_right(capsys, tmp_path, arguments):
    rng = make_rng(5)
    path = write_jsonl(tmp_path / "trace", make_random_trace(rng, 30, 60, 12))
    result = replay(capsys, path, "--attend", "--concurrency", 6, "--num-blocks", 160, "--block-size", 4,
                    *arguments)
    assert result["attend"]["is_correct"] and result["attend"]["checked"] > 30
    assert result["attend"]["max_error"] < 1e-4
    assert result["hit_tokens"] > 0


def test_attend_is_right_after_preemption(capsys, tmp_path):
    rng = make_rng(6)
    path = write_jsonl(tmp_path / "trace", make_random_trace(rng, 40, 30, 40))
    result = replay(capsys, path, "--attend", "--concurrency", 12, "--num-blocks", 50, "--block-size", 4)
    assert result["attend"]["is_correct"]
    assert result["preemptions"] > 0 and result["recomputed_tokens"] > 0 and result["hit_tokens"] > 0


def test_attend_finds_wrong_output(capsys, tmp_path, monkeypatch):
    path = tmp_path / "trace"
    path.write_text("prompt,output\n20,10\n")
    monkeypatch.setattr("pagedkv.cli.attend.AttendCheck._make_kv", _make_other_kv)
    assert main(["replay", str(path), "--attend"]) == 1
    assert "WRONG" in capsys.readouterr().out


def _make_other_kv(self, tokens, positions, layer):
    shape = (len(tokens), self._num_kv_heads, self._head_dim)
    return tuple(self._rng.standard_normal((2, *shape), dtype="float32"))


# ---- real traces


@pytest.mark.parametrize("name", [
    "mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl", "azure2023_code.csv", "azure2023_conv.csv",
    "sharegpt_llama31_300_sps10.jsonl", "sharegpt_llama31_300_vllm_measured.jsonl", "vidur_arxiv_summarization.csv"])
def test_real_trace_in_both_modes(capsys, name):
    path = find_trace(name)
    for mode in ((), SEQUENTIAL):
        result = replay(capsys, path, "--limit", 60, *mode)
        assert result["requests"] == 60 and result["rejected"] == 0
        assert (result["output_tokens"] > 0) == (mode == ())


def test_sharegpt_hits_of_an_infinite_cache(capsys):
    result = replay(capsys, find_trace("sharegpt_llama31_300_sps10.jsonl"), *SEQUENTIAL)
    assert result["prompt_tokens"] == 257239
    assert 100 * result["hit_tokens"] / 257239 == pytest.approx(7.588, abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name, hit_tokens", [
    ("mooncake_conversation_trace.jsonl", 54063104), ("mooncake_synthetic_trace.jsonl", 39802880)])
def test_mooncake_hits_of_an_infinite_cache(capsys, name, hit_tokens):
    result = replay(capsys, find_trace(name), *SEQUENTIAL, "--block-size", 512, "--num-blocks", 200000)
    assert result["hit_tokens"] == hit_tokens and result["evictions"] == 0
