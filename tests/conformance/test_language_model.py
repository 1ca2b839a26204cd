"""A real language model through the cache: the greedy tokens of every stored prompt, all run in one batch.

The model and its expected tokens are real data; its numpy reference has a hook where attention goes, and computes
everything else. K and V are float32, so the tokens must be the same to the last one.
"""
import importlib.util
import json

import numpy as np
import pytest

import pagedkv

from . import arrays

END_OF_TEXT = 1
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def stories(test_data):
    folder = test_data / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no stories260K model in {test_data / 'models'}")
    spec = importlib.util.spec_from_file_location("reference_llama2c", folder / "reference_llama2c.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Model(folder / "stories260K.bin")
    return model, json.loads((folder / "expected_stories260K.json").read_text())


class Engine:
    """Computes the new tokens of many sequences together, attention through the cache."""

    def __init__(self, device, model, block_size, num_blocks):
        self.model, self.arrays = model, arrays.for_device(device)
        layout = pagedkv.Layout(num_layers=model.L, num_kv_heads=model.nkv, head_dim=model.hd, dtype="float32",
                                block_size=block_size)
        self.cache = pagedkv.Cache(layout, num_blocks=num_blocks, device=device)
        self.arrays.fill_blocks(self.cache, 0xFF)  # NaN
        self.batch = self.cache.batch(max_sequences=64, max_tokens=4096, num_heads=model.nh)

    def step(self, work, **options):
        """work: list of (sequence, tokens). Returns the logits of every new token, one array per sequence."""
        model, flat = self.model, np.array([token for _, tokens in work for token in tokens], np.int64)
        self.batch.prepare([seq for seq, _ in work], [len(tokens) for _, tokens in work], tokens=flat, **options)
        positions = np.array(self.batch.positions)
        count, x = len(flat), model.emb[flat]
        for layer in range(model.L):
            h = model.rms(x, model.ra[layer])
            q = model.rope((h @ model.wq[layer].T).reshape(count, model.nh, model.hd), positions)
            k = model.rope((h @ model.wk[layer].T).reshape(count, model.nkv, model.hd), positions)
            v = (h @ model.wv[layer].T).reshape(count, model.nkv, model.hd)
            self.cache.write_kv(layer, self.batch, self.arrays.put(k), self.arrays.put(v))
            out = self.arrays.put(np.full(q.shape, np.nan, np.float32))
            self.cache.attend(layer, self.batch, self.arrays.put(q), out=out)
            x = model.finish(layer, x, self.arrays.get(out).reshape(count, model.D))
        logits = model.rms(x, model.rn) @ model.cls.T
        return np.split(logits, np.cumsum([len(tokens) for _, tokens in work])[:-1])


class Story:
    """A prompt on its way: text so far, and the sequence that holds all of it but the last token."""

    def __init__(self, engine, entry, tag, most_new=None):
        self.engine, self.entry, self.tag = engine, entry, tag
        num_new = 200 if entry["prompt"] == "" else 160  # as the expected tokens were made
        self.limit = min(len(entry["prompt_tokens"]) + (most_new or num_new), engine.model.S)
        self.text, self.is_done = list(entry["prompt_tokens"]), False
        self.seq = None
        self.reopen()

    def reopen(self):
        if self.seq is not None:
            self.seq.close()
        self.seq = self.engine.cache.open(np.array(self.text, np.int64), tag=self.tag)

    def pending(self):
        """Tokens that are known and not yet in the cache."""
        return self.text[self.seq.length:]

    def accept(self, token):
        if token != END_OF_TEXT:
            self.text.append(token)
        self.is_done = token == END_OF_TEXT or len(self.text) >= self.limit


def run_step(stories):
    """One greedy token of every story that is not done."""
    active = [story for story in stories if not story.is_done]
    if active:
        logits = active[0].engine.step([(story.seq, story.pending()) for story in active])
        for story, rows in zip(active, logits):
            story.accept(int(rows[-1].argmax()))


def run_speculative_step(stories, rng):
    """Drafts, some right and some wrong, are computed with the pending tokens; the wrong tail is cut off."""
    active = [story for story in stories if not story.is_done]
    if not active:
        return
    engine, work, drafts = active[0].engine, [], []
    for story in active:
        expected = story.entry["tokens"][len(story.text): len(story.text) + NUM_DRAFTS]
        draft = [token if rng.random() < 0.6 else int(rng.integers(2, engine.model.V)) for token in expected]
        work.append((story.seq, story.pending() + draft))
        drafts.append(draft)
    logits = engine.step(work, register=False)
    for story, (_, tokens), draft, rows in zip(active, work, drafts, logits):
        num_known = len(tokens) - len(draft)
        before = story.seq.length - len(tokens)
        num_accepted = 0
        for number in range(len(draft) + 1):
            token = int(rows[num_known - 1 + number].argmax())
            story.accept(token)
            if story.is_done or number == len(draft) or token != draft[number]:
                break
            num_accepted += 1
        story.seq.truncate(before + num_known + num_accepted)
        story.seq.commit(np.array(tokens[: num_known + num_accepted], np.int64))


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_same_greedy_tokens_as_the_reference(device, stories, block_size):
    model, expected = stories
    rng = np.random.default_rng(block_size)
    engine = Engine(device, model, block_size, num_blocks=3200 // block_size + 64)
    running = [Story(engine, entry, tag) for tag, entry in enumerate(expected)]
    forks = []
    for number in range(10_000):
        if all(story.is_done for story in running + forks):
            break
        if number % 7 == 3:
            run_speculative_step(running + forks, rng)
        else:
            run_step(running + forks)
        if number == 12:  # in the middle of the way, most of them in the middle of a block
            for story in running[1::3]:
                fork = Story.__new__(Story)
                fork.__dict__.update(story.__dict__, text=list(story.text), seq=story.seq.fork())
                forks.append(fork)
        if number in (20, 45):
            hits = engine.cache.stats()["hit_tokens"]
            victims = {victim.tag for victim in engine.cache.victims(1)}
            for story in running:
                if story.tag in victims or story.tag % 4 == 2:  # preempted, and computed again where not found again
                    story.reopen()
            assert engine.cache.stats()["hit_tokens"] > hits
        if number % 20 == 0:
            engine.cache.check()
    for story in running + forks:
        assert story.text == story.entry["tokens"], story.entry["prompt"]
        assert story.seq.length >= len(story.text) - 1
        story.seq.close()
    assert len(forks) == 3 and (engine.cache.stats()["copies"] > 0) == (block_size > 1)
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_preempted_for_want_of_blocks(device, stories):
    """A pool too small for all: when a step does not fit, the victims that the cache names are put back and resumed
    later, from what is left of their blocks."""
    model, expected = stories
    engine = Engine(device, model, 16, num_blocks=18)
    waiting = [Story(engine, entry, tag, most_new=50) for tag, entry in enumerate(expected)]
    for story in waiting:
        story.seq.close()
    running, done, num_preempted = [], [], 0
    while waiting or running:
        if waiting and (not running or engine.cache.num_free_blocks >= 5):
            story = waiting.pop(0)
            story.seq = None
            story.reopen()
            running.append(story)
        try:
            run_step(running)
        except pagedkv.OutOfBlocksError as error:
            victims = {victim.tag for victim in engine.cache.victims(error.needed - error.available)}
            assert victims
            for story in [story for story in running if story.tag in victims]:
                story.seq.close()
                running.remove(story)
                waiting.insert(0, story)
                num_preempted += 1
        for story in [story for story in running if story.is_done]:
            story.seq.close()
            running.remove(story)
            done.append(story)
        engine.cache.check()
    assert num_preempted > 0 and len(done) == len(expected)
    for story in done:
        assert story.text == story.entry["tokens"][: story.limit], story.entry["prompt"]
