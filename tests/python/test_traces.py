"""Trace files: formats found by their content, tokens made from hash ids, and what is wrong told with its line."""

import gzip
import json

import numpy as np
import pytest

from pagedkv.cli.traces import OWN_TOKENS, Trace, TraceError, read_trace
from trace_data import find_trace, make_bailian, make_mooncake, make_sharegpt, write_jsonl

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9,396,109"
MOONCAKE = json.dumps(make_mooncake(1000, 5)) + "\n"
SHAREGPT = json.dumps(make_sharegpt([1, 2, 3], [4, 5])) + "\n"


def get_lengths(trace):
    return [(request.prompt_length, request.output_length) for request in trace.requests]


# ---- formats


@pytest.mark.parametrize("name", ["trace", "trace.csv", "trace.jsonl"])
@pytest.mark.parametrize("text, format, lengths", [
    (MOONCAKE, "mooncake", [(1000, 5)]),
    (json.dumps(make_bailian(40, 5)), "bailian", [(40, 5)]),
    (SHAREGPT, "sharegpt", [(3, 2)]),
    ('{"request_id": "a", "input_toks": 7, "output_toks": 9, "arrival_time": 1.5}\n', "measured", [(7, 9)]),
    (AZURE, "azure", [(374, 44), (396, 109)]),
    ("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n", "lengths", [(3772, 54)]),
    ("prompt_tokens,output_tokens\n1,2\n", "lengths", [(1, 2)]),
    ("output_length,input_length\n1,2\n", "lengths", [(2, 1)]),
    ("id,prompt_len,output_len\n9,1,2\n", "lengths", [(1, 2)]),
    ("Prompt,Completion\n1,2\n", "lengths", [(1, 2)]),
    ("Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,x,1,2,3\n", "lengths", [(1, 2)]),
    ('"num_prompt_tokens","num_generated_tokens"\n"10", 20\n', "lengths", [(10, 20)]),
])
def test_format_is_found_by_content(tmp_path, name, text, format, lengths):
    path = tmp_path / name
    path.write_bytes(text.encode())
    trace = read_trace(path)
    assert (trace.format, get_lengths(trace)) == (format, lengths)


@pytest.mark.parametrize("prefix, line_end", [("\ufeff", "\n"), ("", "\r\n"), ("\n\n", "\n")])
def test_byte_order_mark_line_ends_and_blank_lines(tmp_path, prefix, line_end):
    path = tmp_path / "trace"
    path.write_bytes((prefix + (MOONCAKE + "\n" + MOONCAKE).replace("\n", line_end)).encode())
    assert get_lengths(read_trace(path)) == [(1000, 5)] * 2


def test_gzip(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(MOONCAKE.encode() * 3))
    assert len(read_trace(path)) == 3


def test_limit_reads_no_further(tmp_path):
    path = tmp_path / "trace"
    path.write_text(MOONCAKE * 3 + "broken\n")
    assert len(read_trace(path, limit=3)) == 3
    with pytest.raises(TraceError):
        read_trace(path, limit=4)


def test_zero_lengths_are_requests(tmp_path):
    path = tmp_path / "trace"
    path.write_text("prompt,output\n0,0\n")
    assert get_lengths(read_trace(path)) == [(0, 0)]
    assert len(read_trace(write_jsonl(path, [make_mooncake(0, 3)])).prompt_tokens(0)) == 0


# ---- tokens


def test_hash_ids_give_tokens(tmp_path):
    records = [make_mooncake(1300, 2, first=10, shared=2), make_mooncake(1025, 2, first=20, shared=2)]
    trace = read_trace(write_jsonl(tmp_path / "trace", records))
    first, second = trace.prompt_tokens(0), trace.prompt_tokens(1)
    assert first.dtype == np.int64 and len(first) == 1300 and len(second) == 1025
    assert first[:1024].tolist() == second[:1024].tolist() == list(range(1024))
    assert first[1024:].tolist() == [12 * 512 + i for i in range(276)]
    assert second[1024:].tolist() == [22 * 512]


def test_hash_block_sizes(tmp_path):
    path = write_jsonl(tmp_path / "bailian", [make_bailian(40, 5, first=7)])
    assert read_trace(path).prompt_tokens(0).tolist() == [7 * 16 + i for i in range(40)]
    path = write_jsonl(tmp_path / "mooncake", [make_mooncake(40, 5, first=7, block=8)])
    assert read_trace(path, hash_block_size=8).prompt_tokens(0).tolist() == [7 * 8 + i for i in range(40)]
    with pytest.raises(TraceError, match="5 hash_ids"):
        read_trace(path)
    path = write_jsonl(tmp_path / "one", [make_mooncake(40, 5, first=1)])
    assert read_trace(path, hash_block_size=1 << 40).prompt_tokens(0).tolist() == [(1 << 40) + i for i in range(40)]


def test_bailian_may_leave_out_the_partial_block(tmp_path):
    record = make_bailian(40, 5, first=7)
    record["hash_ids"].pop()
    tokens = read_trace(write_jsonl(tmp_path / "trace", [record, record]))
    first, second = tokens.prompt_tokens(0), tokens.prompt_tokens(1)
    assert len(first) == 40 and first[:32].tolist() == second[:32].tolist()
    assert not set(first[32:]) & set(second[32:]) and first[32:].min() >= OWN_TOKENS


def test_own_tokens_belong_to_one_request(tmp_path):
    path = tmp_path / "trace"
    path.write_text("prompt,output\n5,3\n4,2\n")
    trace = read_trace(path)
    cursors = trace.output_cursors()
    tokens = [trace.prompt_tokens(0), trace.tokens_at(cursors[0] + np.arange(3)),
              trace.prompt_tokens(1), trace.tokens_at(cursors[1] + np.arange(2))]
    everything = np.concatenate(tokens)
    assert len(set(everything.tolist())) == 14
    assert everything.min() >= OWN_TOKENS


def test_real_tokens_in_and_out(tmp_path):
    trace = read_trace(write_jsonl(tmp_path / "trace", [make_sharegpt([1, 2], [3]), make_sharegpt([4], [5, 6])]))
    assert trace.prompt_tokens(1).tolist() == [4]
    assert trace.tokens_at(trace.output_cursors()[1] + np.arange(2)).tolist() == [5, 6]
    assert trace.longest == 3


def test_tokens_are_pure(tmp_path):
    trace = read_trace(write_jsonl(tmp_path / "trace", [make_mooncake(700, 2)] * 2))
    assert np.array_equal(trace.prompt_tokens(0), trace.prompt_tokens(1))
    assert not np.array_equal(trace.tokens_at(trace.output_cursors()[0]), trace.tokens_at(trace.output_cursors()[1]))


# ---- what is wrong, and where


def change(record, **changes):
    return json.dumps({key: value for key, value in {**record, **changes}.items() if value is not ...})


MALFORMED_LINES = [
    (MOONCAKE, MOONCAKE[:40], "not valid JSON"),
    (MOONCAKE, "{", "not valid JSON"),
    (MOONCAKE, "null", "object"),
    (MOONCAKE, "[1, 2]", "object"),
    (MOONCAKE, "x" * 10000, "not valid JSON"),
    (MOONCAKE, "[" * 100000, "not valid JSON"),
    (MOONCAKE, "374,44", "not valid JSON"),
    (MOONCAKE, '{"input_length": ' + "1" * 5000 + "}", "not valid JSON|huge"),
    (MOONCAKE, change(make_mooncake(1000, 5), input_length=...), "input_length is missing"),
    (MOONCAKE, change(make_mooncake(1000, 5), output_length=...), "output_length is missing"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=...), "hash_ids is missing"),
    (MOONCAKE, change(make_mooncake(1000, 5), input_length="1000"), "input_length is \"1000\": not a whole number"),
    (MOONCAKE, change(make_mooncake(1000, 5), input_length=1000.0), "not a whole number"),
    (MOONCAKE, change(make_mooncake(1000, 5), input_length=True), "not a whole number"),
    (MOONCAKE, change(make_mooncake(1000, 5), input_length=None), "not a whole number"),
    (MOONCAKE, change(make_mooncake(1000, 5), input_length=float("nan")), "not a whole number"),
    (MOONCAKE, change(make_mooncake(1000, 5), input_length=-1), "negative"),
    (MOONCAKE, change(make_mooncake(1000, 5), output_length=-1), "output_length is -1: negative"),
    (MOONCAKE, change(make_mooncake(1000, 5), output_length=1 << 31), "larger than"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[0]), "1 hash_ids for an input_length of 1000: 2 needed"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[0, 1, 2]), "3 hash_ids"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[]), "0 hash_ids"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=7), "not a list"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[0, "1"]), "hash_ids holds \"1\""),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[0, 1.0]), "hash_ids holds 1.0"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[0, False]), "hash_ids holds false"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[0, -1]), "hash_ids holds -1"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[0, 1 << 62]), "hash_ids holds"),
    (MOONCAKE, change(make_mooncake(1000, 5), hash_ids=[0, 1 << 70]), "hash_ids holds"),
    (MOONCAKE, change(make_mooncake(1000, 5), timestamp="now"), "timestamp is \"now\""),
    (json.dumps(make_bailian(40, 5)) + "\n", change(make_bailian(40, 5), hash_ids=[1]), "1 hash_ids"),
    (SHAREGPT, change(make_sharegpt([1], [2]), input_tok_ids=...), "input_tok_ids is missing"),
    (SHAREGPT, change(make_sharegpt([1], [2]), output_tok_ids=...), "output_tok_ids is missing"),
    (SHAREGPT, change(make_sharegpt([1], [2]), input_tok_ids=[-5]), "input_tok_ids holds -5"),
    (SHAREGPT, change(make_sharegpt([1], [2]), input_tok_ids=[None]), "input_tok_ids holds null"),
    (SHAREGPT, change(make_sharegpt([1], [2]), input_toks=2), "input_toks is 2, but there are 1"),
    ('{"input_toks": 1, "output_toks": 1}\n', '{"input_toks": 1}', "output_toks is missing"),
    ("prompt,output\n", "1", "1 columns, but the header has 2"),
    ("prompt,output\n", "1,2,3", "3 columns"),
    ("prompt,output\n", "1,", "output is \"\": not a whole number"),
    ("prompt,output\n", "1,2.5", "output is \"2.5\""),
    ("prompt,output\n", "1,1_0", "not a whole number"),
    ("prompt,output\n", "1,\u0661", "not a whole number"),
    ("prompt,output\n", "-1,2", "prompt is -1: negative"),
    ("prompt,output\n", "1,99999999999", "larger than"),
    ("prompt,output\n", "1," + "9" * 5000, "not a whole number"),
    ("prompt,output\n", '"1,2', "not valid CSV"),
    (AZURE + "\n", "2023-11-16 18:15:46.68,374", "2 columns, but the header has 3"),
    (AZURE + "\n", MOONCAKE.strip(), "columns|not valid CSV"),
    (MOONCAKE, "\0\1\2", "NUL"),
]


@pytest.mark.parametrize("good, bad, message", MALFORMED_LINES)
def test_malformed_line(tmp_path, good, bad, message):
    path = tmp_path / "trace"
    path.write_bytes((good + bad + "\n" + good).encode())
    line = good.count("\n") + 1
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:{line}: ")
    assert "\n" not in text and len(text) < len(str(path)) + 200


@pytest.mark.parametrize("text, line, message", [
    (b"", 1, "empty"),
    (b"\n\n", 1, "empty"),
    (b"prompt,output\n", 1, "no request"),
    (b"hello\n", 1, "not a known trace"),
    (b"time,tokens\n", 1, "not a known trace"),
    (b"prompt,input,output\n1,2,3\n", 1, "more than one column of prompt"),
    (b'{"a": 1}\n', 1, "not a known trace"),
    (b'{"input_length": 5, "output_length": 5}\n', 1, "hash_ids is missing"),
    (b'[{"input_length": 5}]\n', 1, "object"),
    (b"\x80\x81\x82\n", 1, "UTF-8"),
    (MOONCAKE.encode() + b'{"caf\xe9": 1}\n', 2, "UTF-8"),
    (b"\x7fELF\2\1\1\0\0\0", 1, "NUL"),
    (gzip.compress(MOONCAKE.encode(), mtime=0)[:-12], 1, "damaged gzip"),
    (b"\x1f\x8bnot gzip at all", 1, "damaged gzip"),
])
def test_malformed_file(tmp_path, text, line, message):
    path = tmp_path / "trace"
    path.write_bytes(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


# ---- the real ones


@pytest.mark.parametrize("name, format, count, prompt_tokens, output_tokens, longest", [
    ("mooncake_conversation_trace.jsonl", "mooncake", 12031, 144793823, 4122048, 126527),
    ("mooncake_synthetic_trace.jsonl", "mooncake", 3993, 61194628, 595432, 191386),
    ("azure2023_code.csv", "azure", 8819, 18059974, 245896, 7841),
    ("azure2023_conv.csv", "azure", 19366, 22361870, 4088665, 14089),
    ("sharegpt_llama31_300_sps10.jsonl", "sharegpt", 300, 257239, None, 4765),
    ("sharegpt_llama31_300_vllm_measured.jsonl", "measured", 300, None, None, None),
    ("vidur_arxiv_summarization.csv", "lengths", 28257, 73131321, 8234948, 4096),
])
def test_real_trace(name, format, count, prompt_tokens, output_tokens, longest):
    trace = read_trace(find_trace(name))
    assert isinstance(trace, Trace)
    assert (trace.format, len(trace)) == (format, count)
    for value, expected in ((trace.prompt_lengths.sum(), prompt_tokens), (trace.output_lengths.sum(), output_tokens),
                            (trace.longest, longest)):
        assert expected is None or value == expected
    assert len(trace.prompt_tokens(count - 1)) == trace.prompt_lengths[-1]
