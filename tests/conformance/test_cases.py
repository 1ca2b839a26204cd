"""The neutral manager cases of the real data: small programs with every count after every step."""
import json

import numpy as np
import pytest

import pagedkv
from testdata import TEST_DATA

from .caches import make_cache

PATH = TEST_DATA and TEST_DATA / "cases" / "cases_public.json"
CASES = json.loads(PATH.read_text()) if PATH and PATH.is_file() else []
SHORTAGES = (pagedkv.OutOfBlocksError, pagedkv.NeverFitsError)


def expand(runs):
    tokens = []
    for run in runs:
        tokens += range(run["from"], run["to"]) if isinstance(run, dict) else [run[0]] * run[1]
    return np.array(tokens, np.int64)


class Runner:
    def __init__(self, device, case, way):
        self.cache = make_cache(device, case["num_blocks"], case["block_size"],
                                prefix_caching=case.get("caching", True))
        self.batch = self.cache.batch(max_sequences=4, max_tokens=4096)
        self.way, self.live, self.closed, self.salts = way, {}, {}, {}

    def append(self, seq, tokens):
        if self.way == "append":
            seq.append(tokens)
        else:
            self.batch.prepare([seq], [len(tokens)], tokens=tokens)

    def run_open(self, step):
        if step["id"] in self.live:
            return {"ok": False}
        tokens = expand(step["tokens"])
        salt = step.get("salt")
        namespace = 0 if salt is None else self.salts.setdefault(salt, len(self.salts) + 1)
        before = self.counts()
        seq = self.cache.open(tokens, namespace=namespace)
        hit = seq.num_cached_tokens
        shared = len(seq.blocks)
        try:
            self.append(seq, tokens[seq.length:])
        except SHORTAGES:
            seq.close()
            assert self.counts() == before
            return {"ok": False}
        self.live[step["id"]] = seq
        return {"ok": True, "hit_tokens": hit, "new_blocks": len(seq.blocks) - shared}

    def run_append(self, step):
        seq = self.live[step["id"]]
        before, copies = len(seq.blocks), self.cache.stats()["copies"]
        try:
            self.append(seq, expand(step["tokens"]))
        except SHORTAGES:
            return {"ok": False}
        copies = self.cache.stats()["copies"] - copies
        return {"ok": True, "new_blocks": len(seq.blocks) - before + copies, "copies": copies}

    def run_fork(self, step):
        parent = self.live[step["parent"]]
        try:
            child = parent.fork(length=step["pos"]) if "pos" in step else parent.fork()
        except pagedkv.InvalidArgumentError:
            return {"ok": False}
        self.live[step["id"]] = child
        return {"ok": True, "shared_blocks": len(child.blocks)}

    def run_truncate(self, step):
        seq = self.live[step["id"]]
        before = len(seq.blocks)
        try:
            seq.truncate(step["len"])
        except pagedkv.InvalidArgumentError:
            return {"ok": False}
        return {"ok": True, "dropped_blocks": before - len(seq.blocks)}

    def run_close(self, step):
        seq = self.live.pop(step["id"], None) or self.closed[step["id"]]
        self.closed[step["id"]] = seq
        try:
            seq.close()
        except pagedkv.NotFoundError:
            return {"ok": False}
        return {"ok": True}

    def run_reset(self, step):
        try:
            self.cache.reset()
        except pagedkv.PagedKVError:
            return {"ok": False}
        return {"ok": True}

    def counts(self):
        stats = self.cache.stats()
        return {"free": self.cache.num_free_blocks, "cached": self.cache.num_cached_blocks,
                "evictions": stats["evictions"], "copies_total": stats["copies"]}


def test_cases_are_there(test_data):
    """Skips, with the reason, where the data is absent; else the parameters of test_case were read from it."""
    assert CASES or not (test_data / "cases").is_dir()


@pytest.mark.parametrize("way", ["append", "prepare"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(device, case, way):
    runner = Runner(device, case, way)
    for number, step in enumerate(case["ops"]):
        before = runner.counts()
        actual = getattr(runner, "run_" + step["op"])(step)
        actual.update(runner.counts())
        runner.cache.check()
        expected = step["expect"]
        assert {key: actual.get(key) for key in expected} == expected, f"step {number}: {step}"
        if not actual["ok"]:
            assert runner.counts() == before, f"step {number} was refused and yet changed something"
