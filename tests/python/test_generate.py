"""examples/generate.py and its model: on a small random model always, on the real one where its weights are there."""

import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conformance import arrays
from tiny_model import VOCABULARY, write_tiny_model

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import generate  # noqa: E402
import smollm2  # noqa: E402

PROMPTS = ("hello there", "tell me", "1 + 1 is 2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(path, tensors that were written, reader)"""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tensors = write_tiny_model(path)
    return path, tensors, smollm2.Reader(path)


@pytest.fixture(scope="module")
def real(smollm2_weights):
    return smollm2.Reader(smollm2_weights)


def test_reader_gives_what_was_written(tiny):
    _, tensors, reader = tiny
    for name, values in tensors.items():
        np.testing.assert_array_equal(reader.read(name), values, err_msg=name)
    assert reader.metadata["tokenizer.ggml.tokens"] == VOCABULARY and reader.metadata["llama.block_count"] == 2


def test_tokenizer(tiny):
    tokenizer = smollm2.Tokenizer(tiny[2].metadata)
    names = lambda text: [VOCABULARY[token] for token in tokenizer.encode(text)]  # noqa: E731
    assert names("hello t") == ["hell", "o", "Ġt"]
    assert names("a  12b") == ["a", "Ġ", "Ġ", "1", "2", "b"]
    assert len(names("<|im_end|>")) == len("<|im_end|>")
    text = "naïve ½ x² _it's_\n\n 日本語 🎉\t12,345  \n"
    assert b"".join(map(tokenizer.decode, tokenizer.encode(text))).decode() == text
    chat = tokenizer.encode_chat("hello", "t")
    assert chat[0] == 0 and chat.count(0) == 3 and chat.count(1) == 2
    assert b"".join(map(tokenizer.decode, chat)) == b"system\nhello\nuser\nt\nassistant\n"


def compute_next(model, tokens):
    """The likeliest next token, with attention as one would write it down."""
    def attend(layer, q, k, v):
        group = model.num_heads // model.num_kv_heads
        k, v = (np.repeat(x, group, axis=1).astype(np.float64) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(model.head_dim)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v).astype(np.float32)

    return int(model.forward(np.array(tokens), np.arange(len(tokens)), attend, [-1])[0].argmax())


def run(model, tokenizer, stories, max_tokens, device, block_size=16):
    arrays.for_device(device)  # skips where the example has no way to the device's memory
    engine = generate.Engine(model, stories, device=device, dtype="float32", block_size=block_size, max_tokens=max_tokens)
    times = generate.generate(engine, tokenizer, generate.make_chooser(0, None))
    engine.cache.check()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    return engine, times


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_generates_as_without_a_cache(device, tiny, block_size):
    tokenizer, model = smollm2.Tokenizer(tiny[2].metadata), smollm2.Model(tiny[2])
    prompts = [tokenizer.encode_chat("hello, the tiny model", prompt) for prompt in PROMPTS]
    stories = [generate.Story(number, "", list(prompt)) for number, prompt in enumerate(prompts)]
    engine, times = run(model, tokenizer, stories, 7, device, block_size)
    for prompt, story in zip(prompts, stories):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 7 and (token := compute_next(model, tokens)) != tokenizer.end:
            tokens.append(token)
        assert story.tokens == tokens and story.is_done
    num_prompt = sum(map(len, prompts))
    hits = [story.num_cached_tokens for story in stories]
    assert hits[0] == 0 and min(hits[1:]) >= 16
    first_step_decodes = 1  # the first story's second token is computed beside the other prompts
    assert times["prompt"][1] == num_prompt - sum(hits) + first_step_decodes
    assert f"prefix hits  {sum(hits)} of {num_prompt} prompt tokens" in generate.describe(engine, times)


def start(*arguments, device="host"):
    arrays.for_device(device)
    return subprocess.run([sys.executable, EXAMPLES / "generate.py", "--device", device, *map(str, arguments)],
                          capture_output=True, text=True, encoding="utf-8", stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3"])
def test_program(device, tiny, dtype):
    done = start("--model", tiny[0], "--dtype", dtype, "--max-tokens", 4, "--prompt", "hello", "--prompt", "tell",
                 "--temperature", 0.8, "--seed", 3, device=device)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "[1] hello\n" in done.stdout and "[2] tell\n" in done.stdout
    assert f"device       {device}" in done.stdout and f"K and V as {dtype}" in done.stdout and "prefix hits" in done.stdout


@pytest.mark.parametrize("arguments, text", [
    (["--model", "/nowhere/model.gguf"], "No such file"),
    (["--model", __file__], "is not a GGUF file"),
    (["--max-tokens", "0"], "must be positive"),
    (["--dtype", "int3"], "invalid choice"),
])
def test_program_says_what_is_wrong(tiny, arguments, text):
    done = start(*([] if "--model" in arguments else ["--model", tiny[0]]), *arguments)
    assert done.returncode == 2 and text in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_program_refuses_what_is_too_long(tiny):
    done = start("--model", tiny[0], "--max-tokens", 600)
    assert done.returncode == 2 and "made for 512" in done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_screen_redraws_a_line_a_story(monkeypatch):
    monkeypatch.setattr(generate.shutil, "get_terminal_size", lambda: os.terminal_size((20, 5)))
    stories = [generate.Story(number, f"prompt {number}", []) for number in (1, 2)]
    terminal = Terminal()
    screen = generate.Screen(stories, terminal)
    stories[0].add_bytes("a café".encode()[:-1])  # half a character waits for the other half
    screen.update()
    assert terminal.getvalue() == "[1] a caf\n[2] \n"
    stories[0].add_bytes("é and many words".encode()[1:])
    screen.update()
    assert terminal.getvalue().endswith("\x1b[2A\x1b[J[1] …d many words\n[2] \n")
    assert all(len(line) < 20 for line in terminal.getvalue().splitlines() if "\x1b" not in line)
    screen.finish()
    assert terminal.getvalue().endswith("[1] prompt 1\na café and many words\n\n[2] prompt 2\n\n\n")


def test_screen_streams_one_story():
    story, terminal = generate.Story(1, "prompt", []), Terminal()
    screen = generate.Screen([story], terminal)
    for word in (b"one ", b"two\n", b"three"):
        story.add_bytes(word)
        screen.update()
    screen.finish()
    assert terminal.getvalue() == "one two\nthree\n\n"


def test_screen_prints_the_end_alone_into_a_file():
    stories, file = [generate.Story(1, "prompt", [])], io.StringIO()
    screen = generate.Screen(stories, file)
    stories[0].add_bytes(b"text")
    screen.update()
    assert file.getvalue() == ""
    screen.finish()
    assert file.getvalue() == "[1] prompt\ntext\n\n"


# -- the real model ------------------------------------------------------------------------------------------------


def test_real_tokens_of_prompts(test_data, real):
    tokenizer = smollm2.Tokenizer(real.metadata)
    folder = test_data / "prompts"
    lines = [(folder / name).read_text(encoding="utf-8").splitlines()
             for name in ("mt_bench_question.jsonl", "mt_bench_turn1_smollm2_tokens.jsonl")]
    for question, stored in zip(*(map(json.loads, part) for part in lines)):
        assert question["question_id"] == stored["question_id"]
        tokens = tokenizer.encode_chat(generate.SYSTEM_PROMPT, question["turns"][0])
        assert tokens == stored["tokens"], question["turns"][0]


def test_real_model_generates_the_expected_tokens(device, test_data, real):
    expected = json.loads((test_data / "models" / "smollm2-135m" / "expected_smollm2.json").read_text())
    tokenizer, model = smollm2.Tokenizer(real.metadata), smollm2.Model(real)
    stories = [generate.Story(number, "", list(entry["prompt_tokens"])) for number, entry in enumerate(expected)]
    run(model, tokenizer, stories, 12, device)
    for entry, story in zip(expected, stories):
        assert story.tokens == entry["prompt_tokens"] + entry["tokens"][:12]
        assert entry["text"].startswith(story.text)


def test_real_program(device, smollm2_weights):
    done = start("--model", smollm2_weights, "--max-tokens", 8, "--prompt", "What is the capital of France?",
                 "--prompt", "What is 2 + 2?", "--dtype", "bfloat16", device=device)
    assert done.returncode == 0, done.stderr
    assert "[1] What is the capital of France?\nThe capital of France is Paris." in done.stdout
