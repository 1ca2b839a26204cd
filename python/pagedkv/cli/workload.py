"""The built-in workload: chat-like requests, made from a seed.

Conversations start one after another, each under one of a few system prompts. Every turn is a request: the whole
history, answers included, and a new message. Between two turns of a conversation other conversations arrive. So prompts
share system prompts widely and histories narrowly, and a cache that is not endless has to choose what to keep.
"""

import heapq

import numpy as np

from pagedkv.cli.traces import Request, Trace

VOCABULARY = 128256
MAX_CONTEXT = 16384  # tokens of prompt and answer; a conversation ends before it
NUM_SYSTEM_PROMPTS = 8
SYSTEM_PROMPT_LENGTHS = (200, 1600)
MEAN_TURNS = 4
THINK_TIMES = (300, 1500)  # arrivals between two turns of a conversation
MESSAGE = (70, 1.1)  # tokens: median, sigma of a log-normal
DOCUMENT = (1800, 0.7)  # pasted into one message in ten
ANSWER = (220, 0.8)


def make_chat(num_requests, seed=0):
    """A trace of num_requests chat turns; the same for the same numbers."""
    rng = np.random.default_rng(seed)
    systems = [_make_tokens(rng, int(rng.integers(*SYSTEM_PROMPT_LENGTHS))) for _ in range(NUM_SYSTEM_PROMPTS)]
    popularity = 1 / np.arange(1, NUM_SYSTEM_PROMPTS + 1)
    popularity /= popularity.sum()

    requests = []
    due = []  # heap of (arrival, number, history, turns left): conversations that go on
    number = 0
    now = 0
    while len(requests) < num_requests:
        if due and due[0][0] <= now:
            _, _, history, turns = heapq.heappop(due)
        else:
            history = systems[rng.choice(NUM_SYSTEM_PROMPTS, p=popularity)]
            turns = int(rng.geometric(1 / MEAN_TURNS))
        message = _draw_length(rng, *MESSAGE)
        if rng.random() < 0.1:
            message += _draw_length(rng, *DOCUMENT)
        message = min(message, MAX_CONTEXT // 4)
        answer = min(_draw_length(rng, *ANSWER), MAX_CONTEXT // 8)
        prompt = np.concatenate([history, _make_tokens(rng, message)])
        output = _make_tokens(rng, answer)
        requests.append(Request(len(prompt), answer, prompt=prompt, output=output))
        history = np.concatenate([prompt, output])
        if turns > 1 and len(history) < MAX_CONTEXT // 2:
            number += 1
            heapq.heappush(due, (now + int(rng.integers(*THINK_TIMES)), number, history, turns - 1))
        now += 1
    return Trace("built-in workload", "chat", requests)


def _draw_length(rng, median, sigma):
    return max(1, int(np.exp(np.log(median) + sigma * rng.standard_normal())))


def _make_tokens(rng, count):
    return rng.integers(0, VOCABULARY, count, dtype=np.int64)
