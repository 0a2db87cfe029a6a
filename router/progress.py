"""How far the answer of one job is: the tokens of every sequence, their text, their times, their ends.

It outlives the nodes that make the answer. In the hand-over `carry` the first token comes from P and again
from D; whoever is first counts, the other must agree, and a node that goes on from here is given it.
"""

import dataclasses
import time

from common.errors import NodeFailed
from common.messages import Finished, TokenChunk
from common.metrics import Metrics
from router.choice_text import ChoiceText, Delta
from router.openai_responses import Usage
from router.prepare import Job, Services


class Contradicted(NodeFailed):
    """A node told another token than the client has: it is well, but its answer cannot go on."""


class Progress:
    def __init__(self, services: Services, job: Job) -> None:
        self._job = job
        self._choices = [
            ChoiceText(job.first_index + i, services.tokenizer, job.sampling) for i in range(job.n)
        ]
        self._tokens: list[list[int]] = [[] for _ in range(job.n)]
        self._timing = _Timing(services.metrics, job)
        self._ends: list[Finished] = []

    @property
    def complete(self) -> bool:
        return len(self._ends) == self._job.n

    @property
    def num_tokens(self) -> int:
        """Of the longest sequence."""
        return max(map(len, self._tokens))

    def rest(self) -> Job:
        """What is still to be asked for, where there is one sequence."""
        told = self._tokens[0] if self._job.n == 1 else []
        return dataclasses.replace(self._job, token_ids=[*self._job.token_ids, *told], num_outputs=len(told))

    def expects(self, end: Finished) -> bool:
        return end.index < self._job.n and not self._choices[end.index].finished

    def take(self, chunk: TokenChunk) -> Delta | None:
        """Text of what is new in ``chunk``. Raises Contradicted, or NodeFailed where tokens are missing."""
        known = self._tokens[chunk.index]
        told = known[chunk.offset :]
        if chunk.offset > len(known):
            raise NodeFailed(
                f"tokens {len(known)} to {chunk.offset - 1} of request {chunk.request_id} are missing"
            )
        if tuple(told[: len(chunk.token_ids)]) != chunk.token_ids[: len(told)]:
            raise Contradicted(
                f"request {chunk.request_id}: the client has {told}, now it is {list(chunk.token_ids)}"
            )
        fresh = chunk.token_ids[len(told) :]
        if not fresh:
            return None
        known += fresh
        self._timing.tokens(chunk.index, len(fresh))
        logprobs = None if chunk.logprobs is None else chunk.logprobs[len(told) :]
        return self._choices[chunk.index].push(fresh, logprobs)

    def end(self, end: Finished) -> Delta:
        self._ends.append(end)
        return self._choices[end.index].finish(end.reason, end.stop_string)

    def account(self, usage: Usage) -> None:
        """Once everything has ended."""
        usage.add_prompt(len(self._job.token_ids), self._ends)
        self._timing.finished(self._ends)


class _Timing:
    """Latency and token metrics of one job."""

    def __init__(self, metrics: Metrics, job: Job) -> None:
        self._metrics = metrics
        self._job = job
        self._last_s: dict[int, float] = {}

    def tokens(self, index: int, count: int) -> None:
        now = time.monotonic()
        last = self._last_s.get(index)
        if last is None and not self._last_s:
            self._metrics.histogram("time_to_first_token_seconds").observe(now - self._job.arrival_s)
        if last is not None and count:
            # An accepted run arrives at once: its tokens share the time since the last one.
            for _ in range(count):
                self._metrics.histogram("inter_token_latency_seconds").observe((now - last) / count)
        self._last_s[index] = now

    def finished(self, ends: list[Finished]) -> None:
        metrics = self._metrics
        metrics.histogram("e2e_request_latency_seconds").observe(time.monotonic() - self._job.arrival_s)
        metrics.counter("prompt_tokens").inc(len(self._job.token_ids))
        metrics.counter("generation_tokens").inc(sum(end.output_tokens for end in ends))
        metrics.counter("router_cached_tokens_delivered").inc(max(end.cached_tokens for end in ends))
