"""The built-in workload: the same for the same seed, and shaped like chat."""

import numpy as np

from pagedkv.cli.workload import MAX_CONTEXT, make_chat


def test_same_seed_same_requests():
    first, second, other = make_chat(50, 3), make_chat(50, 3), make_chat(50, 4)
    assert all(np.array_equal(first.prompt_tokens(i), second.prompt_tokens(i)) for i in range(50))
    assert not all(np.array_equal(first.prompt_tokens(i), other.prompt_tokens(i)) for i in range(50))


def test_fewer_requests_are_the_first_ones():
    few, many = make_chat(20, 1), make_chat(500, 1)
    assert all(np.array_equal(few.prompt_tokens(i), many.prompt_tokens(i)) for i in range(20))


def test_turns_continue_and_system_prompts_repeat():
    trace = make_chat(1500, 0)
    assert trace.longest <= MAX_CONTEXT
    assert trace.prompt_lengths.min() > 0 and trace.output_lengths.min() > 0
    ends = {}
    num_continued = 0
    for index, request in enumerate(trace.requests):
        prompt = trace.prompt_tokens(index)
        history = np.concatenate([prompt, request.output])
        num_continued += any(
            len(prompt) > length and prompt[:length].tobytes() in texts for length, texts in ends.items())
        ends.setdefault(len(history), set()).add(history.tobytes())
    assert num_continued > 300
    assert len({trace.prompt_tokens(i)[:100].tobytes() for i in range(1500)}) == 8
