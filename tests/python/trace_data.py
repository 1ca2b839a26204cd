"""Trace files for tests: where the real ones are, and small ones of every format."""

import json

import numpy as np
import pytest

from testdata import TEST_DATA


def find_trace(name):
    """Path of a real trace; skips the test where the data is absent."""
    path = None if TEST_DATA is None else TEST_DATA / "traces" / name
    if path is None or not path.is_file():
        pytest.skip(f"no trace {name}: set PAGEDKV_TEST_DATA to the folder of the real data")
    return path


def make_mooncake(prompt, output, first=0, shared=0, block=512, **more):
    """A record whose first `shared` hash ids are 0, 1, ... and whose others count from `first`."""
    count = -(-prompt // block)
    ids = [i if i < shared else first + i for i in range(count)]
    return {"timestamp": 0, "input_length": prompt, "output_length": output, "hash_ids": ids, **more}


def make_bailian(prompt, output, first=0, shared=0, chat_id=0):
    return make_mooncake(prompt, output, first, shared, 16, chat_id=chat_id, parent_chat_id=-1, type="text", turn=1,
                         timestamp=0.5)


def make_sharegpt(prompt, output):
    return {"input_toks": len(prompt), "output_toks": len(output), "arrival_time_ns": 1,
            "input_tok_ids": list(prompt), "output_tok_ids": list(output)}


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_random_trace(rng, num_requests, longest_prompt, longest_output, vocabulary=2):
    """ShareGPT records with few different tokens, so that prompts share much."""
    return [
        make_sharegpt(rng.integers(0, vocabulary, rng.integers(1, longest_prompt + 1)).tolist(),
                      rng.integers(0, vocabulary, rng.integers(0, longest_output + 1)).tolist())
        for _ in range(num_requests)
    ]


def make_rng(seed):
    print(f"seed {seed}")
    return np.random.default_rng(seed)
