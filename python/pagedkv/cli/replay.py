"""Runs the requests of a trace through a cache, with continuous batching.

Every step is one `batch.prepare` over all running requests: those that were admitted in this step append the part of
their prompt that the prefix cache did not have, the others one output token. A request is admitted when it is the first
in the queue and its prompt fits beside what the running ones need for their next token. One whose prompt continues like
that of a request admitted in the same step waits for the next step, when it can share what that one writes. When the
pool is full, `victims` says whom to preempt; those wait at the front of the queue and come back as prompts that include
what they generated.

It always ends: of the running requests the earliest is never preempted, each fits into the pool alone, and after a
preemption nothing is admitted before a request has finished.

The state of the running requests is in parallel arrays, so that a step costs a few array operations whatever its size.
"""

import heapq
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

# New tokens of one step, unless the longest request has more: bounds the batch's tables, not the schedule.
STEP_TOKENS = 1 << 20


@dataclass
class ReplayResult:
    """Counts of one replay; README and `--help` say what each means."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    peak_blocks: int = 0
    max_concurrency: int = 0
    utilization: float = 0.0
    manager_ns: int = 0


class Replay:
    """One run. `output_lengths` are those of the trace, or zeros; `is_sharing` tells that the cache has prefix caching;
    `check` is an AttendCheck or None."""

    def __init__(self, trace, cache, output_lengths, concurrency, *, is_sharing=True, check=None, progress=None):
        from pagedkv import NeverFitsError, OutOfBlocksError

        # A step that all running requests together could never take is one for preemption, too.
        self._shortages = (OutOfBlocksError, NeverFitsError)
        self._trace = trace
        self._cache = cache
        self._block_size = block_size = cache.block_size
        self._num_blocks = cache.num_blocks
        self._concurrency = concurrency
        self._is_sharing = is_sharing
        self._check = check
        self._progress = progress
        self._output_lengths = output_lengths
        self._output_cursors = trace.output_cursors()
        lengths = trace.prompt_lengths + output_lengths
        self._fits = -(-lengths // block_size) <= self._num_blocks

        longest = int(lengths[self._fits].max()) if self._fits.any() else 1
        step_tokens = STEP_TOKENS if check is None else check.step_tokens
        self._step_tokens = max(longest, min(step_tokens, self._num_blocks * block_size))
        heads = {} if check is None else {"num_heads": check.num_heads}
        self._batch = cache.batch(max_sequences=concurrency, max_tokens=self._step_tokens + concurrency, **heads)

        self.is_admitted = np.zeros(len(trace), dtype=bool)  # at some time
        self._next = 0  # first request that was never in the queue's front
        self._preempted = []  # heap of requests that wait to come back; all of them are before _next
        self._num_generated = np.zeros(len(trace), dtype=np.int64)  # at the last preemption
        self._may_admit = True

        self._until_finish = 0  # steps until the first of the running requests has all of its output
        self._count = 0  # running requests: the first _count of each of the following
        self._sequences = []
        self._index = np.zeros(concurrency, dtype=np.int64)
        self._lengths = np.zeros(concurrency, dtype=np.int64)
        self._remaining = np.zeros(concurrency, dtype=np.int64)
        self._cursors = np.zeros(concurrency, dtype=np.int64)
        self._ones = np.ones(concurrency, dtype=np.int64)

        self.result = ReplayResult(requests=len(trace))

    def run(self):
        """Runs every request to its end and returns the counts."""
        result = self.result
        stored = 0  # filled slots of held blocks, a shared block counted once
        utilization = 0.0
        while self._has_waiting() or self._count:
            admitted = self._admit() if self._may_admit else []
            if not admitted and not self._count:
                continue  # all that waited were rejected
            preemptions = result.preemptions
            self._step(admitted)
            if admitted or result.preemptions != preemptions:
                stored = self._count_stored()
            else:
                stored += self._count
            held = self._num_blocks - self._cache.num_free_blocks
            if held:
                utilization += stored / (held * self._block_size)
            result.steps += 1
            result.peak_blocks = max(result.peak_blocks, held)
            result.max_concurrency = max(result.max_concurrency, self._count)
            if self._until_finish == 0:
                self._finish()
                stored = self._count_stored()
                if self._progress is not None:
                    self._progress.update(self._next - len(self._preempted) - self._count)
        result.utilization = utilization / result.steps if result.steps else 0.0
        self._batch.close()
        return result

    def _has_waiting(self):
        return bool(self._preempted) or self._next < len(self._trace)

    def _count_stored(self):
        """Only last blocks have unfilled slots, and no two requests share those."""
        held = self._num_blocks - self._cache.num_free_blocks
        return held * self._block_size - int((-self._lengths[: self._count] % self._block_size).sum())

    # ---- admission --------------------------------------------------------------------------------------------

    def _admit(self):
        """Opens requests from the front of the queue while they fit: [(index, sequence, tokens)]."""
        cache, block_size = self._cache, self._block_size
        admitted = []
        num_tokens = 0
        next_blocks = set()  # the first block that each of them writes and another could share
        # Blocks that this step takes: of the running requests those at the end of a block need one.
        needed = int(np.count_nonzero(self._lengths[: self._count] % block_size == 0))
        while self._has_waiting() and self._count + len(admitted) < self._concurrency:
            is_new = not self._preempted
            index = self._next if is_new else self._preempted[0]
            if not self._fits[index]:
                self._next += 1
                self.result.rejected += 1
                continue
            length = int(self._trace.prompt_lengths[index] + self._num_generated[index])
            if num_tokens + length > self._step_tokens:
                return admitted  # and the next step goes on from here
            tokens = self._get_tokens(index)
            start = perf_counter_ns()
            sequence = cache.open(tokens, tag=index)
            hit = sequence.num_cached_tokens
            more = -(-length // block_size) - hit // block_size
            is_room = needed + more <= cache.num_free_blocks
            next_block = self._get_next_block(tokens, hit)
            is_too_early = next_block is not None and next_block in next_blocks
            if not is_room or is_too_early:
                sequence.close()
            self.result.manager_ns += perf_counter_ns() - start
            if not is_room or is_too_early:
                self._may_admit = is_room  # in the next step, or when a request has finished
                return admitted
            next_blocks.add(next_block)
            needed += more
            num_tokens += length - hit
            admitted.append((index, sequence, tokens))
            if is_new:
                self._next += 1
            else:
                heapq.heappop(self._preempted)
            self._count_admitted(index, length, hit)
        self._may_admit = False  # until a request finishes
        return admitted

    def _get_next_block(self, tokens, hit):
        """The block after the hit, as a key; None if nobody can share it."""
        end = hit + self._block_size
        return (hit, tokens[hit:end].tobytes()) if self._is_sharing and end < len(tokens) else None

    def _count_admitted(self, index, length, hit):
        if self.is_admitted[index]:
            self.result.recomputed_tokens += length - hit
            return
        self.is_admitted[index] = True
        self.result.prompt_tokens += length
        self.result.hit_tokens += hit

    def _get_tokens(self, index):
        """The prompt, and what was generated before a preemption."""
        return self._get_first_tokens(index, int(self._trace.prompt_lengths[index] + self._num_generated[index]))

    def _get_first_tokens(self, index, length):
        """The first tokens of a request, prompt and output, [length]."""
        tokens = self._trace.prompt_tokens(index)
        generated = length - len(tokens)
        if generated <= 0:
            return tokens[:length]
        first = int(self._output_cursors[index])
        return np.concatenate([tokens, self._trace.tokens_at(np.arange(first, first + generated))])

    # ---- one step ---------------------------------------------------------------------------------------------

    def _step(self, admitted):
        while True:
            count = self._count
            sequences, counts = self._sequences, self._ones[:count]
            tokens = self._trace.tokens_at(self._cursors[:count])
            if admitted:
                sequences = sequences + [sequence for _, sequence, _ in admitted]
                rests = [tokens_of[sequence.length :] for _, sequence, tokens_of in admitted]
                counts = np.concatenate([counts, [len(rest) for rest in rests]]).astype(np.int64)
                tokens = np.concatenate([tokens, *rests])
            start = perf_counter_ns()
            try:
                self._batch.prepare(sequences, counts, tokens=tokens)
            except self._shortages:
                self.result.manager_ns += perf_counter_ns() - start
                if admitted or not self._preempt():
                    raise  # the counts of the library and of _admit or _preempt differ
                continue
            self.result.manager_ns += perf_counter_ns() - start
            break
        if self._check is not None:
            indices = np.concatenate([self._index[:count], [index for index, _, _ in admitted]]).astype(np.int64)
            self._check.step(self._cache, self._batch, tokens, indices, self._get_first_tokens)
        self._lengths[:count] += 1
        self._cursors[:count] += 1
        self._remaining[:count] -= 1
        self._until_finish -= 1
        self.result.output_tokens += count
        if admitted:
            self._start(admitted)

    def _start(self, admitted):
        """The admitted requests run from now on; their prompts are stored."""
        for index, sequence, tokens in admitted:
            slot = self._count
            generated = int(self._num_generated[index])
            self._sequences.append(sequence)
            self._index[slot] = index
            self._lengths[slot] = len(tokens)
            self._remaining[slot] = self._output_lengths[index] - generated
            self._cursors[slot] = self._output_cursors[index] + generated
            self._count += 1
        self._until_finish = int(self._remaining[: self._count].min())

    def _finish(self):
        """Closes the requests that have all of their output."""
        for slot in np.flatnonzero(self._remaining[: self._count] == 0)[::-1].tolist():
            self._close(slot)
        self._may_admit = True
        if self._count:
            self._until_finish = int(self._remaining[: self._count].min())

    def _close(self, slot):
        """Closes a running request; the last one takes its place in the arrays."""
        sequence = self._sequences[slot]
        start = perf_counter_ns()
        sequence.close()
        self.result.manager_ns += perf_counter_ns() - start
        self._count -= 1
        last = self._sequences.pop()
        if slot < self._count:
            self._sequences[slot] = last
            for array in (self._index, self._lengths, self._remaining, self._cursors):
                array[slot] = array[self._count]

    # ---- preemption -------------------------------------------------------------------------------------------

    def _preempt(self):
        """Closes running requests until the others have room for one token each; False if they have it already."""
        before = self.result.preemptions
        while True:
            needed = int(np.count_nonzero(self._lengths[: self._count] % self._block_size == 0))
            missing = needed - self._cache.num_free_blocks
            if missing <= 0:
                break
            slot = self._find_victim(missing)
            index = int(self._index[slot])
            self._num_generated[index] = self._output_lengths[index] - self._remaining[slot]
            heapq.heappush(self._preempted, index)
            self._close(slot)
            self.result.preemptions += 1
        self._may_admit = False
        self._until_finish = int(self._remaining[: self._count].min())
        return self.result.preemptions > before

    def _find_victim(self, missing):
        """The library's first choice that is not the earliest request. One at a time: a victim's own need goes too."""
        earliest = int(self._index[: self._count].min())
        start = perf_counter_ns()
        try:
            victims = self._cache.victims(missing)
        except self._shortages:  # more than all hold
            victims = []
        self.result.manager_ns += perf_counter_ns() - start
        for victim in victims:
            slot = self._sequences.index(victim)
            if self._index[slot] != earliest:
                return slot
        return int(np.argmax(self._index[: self._count]))
