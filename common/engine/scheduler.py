"""Decides what every step computes, and applies what came of it. Plain Python, no torch.

A step serves, in this order: hand-overs that arrived (they need N-1 tokens and unblock a client), running
requests by priority and admission (a decode with its drafts, or the next chunk of a prompt), then waiting
requests while budget, seats and blocks last. When blocks run out the least important, youngest running
request is preempted: its blocks go, it waits, and is later recomputed from its known tokens (hits help).
"""

import sys
from collections.abc import Callable, Mapping, Sequence

from common.engine.batch import (
    RequestOutput,
    RequestUpdate,
    RunnerOutput,
    ScheduledBatch,
    ScheduledRequest,
    StepOutput,
    summary_of,
)
from common.engine.encoder_cache import EncoderCache
from common.engine.first_token import FirstToken
from common.engine.request_table import RequestTable
from common.engine.rules import SchedulerConfig, final_upto, is_pinned, next_share
from common.engine.stopping import StopChecker
from common.errors import CapacityError, InvalidRequest, PromptTooLong, ProtocolViolation
from common.kv_cache.manager import KVCacheManager
from common.request import FinishReason, Request, RequestState, SpecStats, TokenLogprob, sequences_of

# Encoder outputs are kept, or promised, for requests in these states.
_WITH_ENCODINGS = (RequestState.RECEIVING_KV, RequestState.READY, RequestState.RUNNING)


class Scheduler:
    """Owns every Request and, through the KV manager, every block."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        stop_checker: Callable[[Request], StopChecker],
    ) -> None:
        self.config = config
        self.kv = kv
        self.encoders = EncoderCache(
            config.encoder_cache_tokens, config.max_encoder_tokens, config.speculation.lookahead
        )
        self._make_stop_checker = stop_checker
        self._stop_checkers: dict[str, StopChecker] = {}
        self.requests = RequestTable()
        self.on_finish: Callable[[Request], None] | None = None  # sees a request just before its blocks go
        self._carry: dict[str, bytes] = {}  # hand-over's hidden rows until the step that uses them
        self._forgotten: list[str] = []
        self._preempted: list[str] = []
        self.stats = SpecStats()
        self._untold: list[RequestUpdate] = []  # what happened between two steps
        self.limit = self._longest()  # prompt and output, as the pools were at the start

    # ---- requests come and go ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues an ordinary request (on P: one with `stop_at` and `hold_blocks`)."""
        self._admit(request)
        self._take_in(request, RequestState.WAITING)

    def reserve(self, request: Request, cut: int) -> int:
        """Hand-over on D: local hits kept, the rest of the prompt's blocks reserved.

        Returns ``first_missing``: positions from there on must be received. Raises CapacityError, owning
        nothing, when the blocks (and one more for every running request) are not free now.
        """
        self._admit(request)
        hit = self.kv.match(request, cut)
        self.kv.adopt(request, hit)
        # Should the carry row be lost, D starts at L-N: window blocks are kept (and shipped) from there on.
        start = min(cut, max(0, request.num_tokens - self.config.tail))
        headroom = self.requests.num_seated
        seats = self._seats - headroom
        room = self.kv.fits(request, request.num_tokens + 1, headroom, self.config.max_num_batched_tokens)
        room = room and seats > 0 and self.encoders.admit(request, hit)
        if not room or not self.kv.allocate_span(request, start, request.num_tokens):
            self.encoders.release(request)
            self.kv.free(request)
            raise CapacityError(
                f"no room to reserve {request.num_tokens} tokens "
                f"({self.kv.pools[0].num_free} blocks of {self.kv.block_size} free, {seats} seats)"
            )
        self._count_hit(request, hit)
        self._take_in(request, RequestState.RECEIVING_KV)
        return hit

    def wanted(self, request_id: str, cut: int) -> dict[int, dict[int, int]]:
        """{KV group: {block position: block}} that a hand-over up to ``cut`` must fill; {} when unknown."""
        request = self._receiving(request_id)
        if request is None:
            return {}
        return self.kv.wanted(request, cut)

    def kv_arrived(
        self, request_id: str, upto: int, carry: bytes | None, first: FirstToken | None = None
    ) -> None:
        """Positions below ``upto`` are in place, and the recurrent state there; ``first`` is token L where P
        sampled it. Without its carry rows the last N known tokens are recomputed (with recurrent layers from
        the last state checkpoint on, or as after a failed transfer): exact too (02-exactness 4)."""
        request = self._receiving(request_id)
        if request is None:
            return
        ended = None if first is None else self._append_first(request, first)
        start = self._start_of(request, upto, carry is not None)
        if ended is None and start is None:
            self._fail(request, upto)
            return
        request.num_computed = max(start or 0, request.num_computed)
        if ended is not None:
            self.kv.register_final(request, final_upto(request, self.config.speculation.lookahead))
            self._finish(request, ended)
            return
        if carry is not None and request.num_computed == upto:
            self._carry[request_id] = carry
        self.requests.move(request, RequestState.READY)

    def _start_of(self, request: Request, upto: int, has_carry: bool) -> int | None:
        """Where a request starts that received its KV below ``upto``; None: nowhere, it begins again."""
        safe = request.num_tokens - self.config.tail  # needs no rows, and leaves logits to compute
        if upto <= safe or (has_carry and upto < request.num_tokens):
            return upto
        return self.kv.restart_point(request, safe)

    def _append_first(self, request: Request, first: FirstToken) -> FinishReason | None:
        """Takes token L over from P, as a step would have brought it; whether it ends the request."""
        tokens, reason = self._stop_checkers[request.request_id].append((first.token_id,), self.limit)
        # Drafts of an unseeded request are verified with what they were drawn from, which stayed on P.
        request.drafts = first.drafts[: self.config.speculation.num_drafts] if request.sampling.fixed else ()
        logprobs = None if first.logprob is None else (first.logprob,)
        self._untold.append(self._update(request, tokens, logprobs, reason))
        return reason

    def kv_failed(self, request_id: str, final_upto: int, quarantined: Mapping[int, Sequence[int]]) -> None:
        """The transfer ended early. Received final blocks go into the cache, the rest is freed, and the
        request starts again as an ordinary one: what was kept is found as a hit."""
        request = self._receiving(request_id)
        if request is None:
            return
        self.kv.quarantine(request, quarantined)
        self._fail(request, final_upto)

    def kv_quiet(self, blocks: Mapping[int, Sequence[int]]) -> None:
        """Blocks in quarantine can be used again: old owner the transfer, new owner the pool."""
        self.kv.release_quarantine(blocks)

    def _fail(self, request: Request, final_upto: int) -> None:
        self.kv.register_final(request, min(final_upto, max(0, request.num_tokens - self.config.tail)))
        self._restart(request)

    def release(self, request_id: str) -> None:
        """P's hold is over. Unknown ids are ignored: release and abort may cross."""
        request = self.requests.get(request_id)
        if request is not None and request.state is RequestState.HELD:
            self._finish(request, request.finish_reason or FinishReason.CUT)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state; its blocks are free on return. False for an unknown id."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    def _admit(self, request: Request) -> None:
        """Raises InvalidRequest or PromptTooLong for one that can never be served here."""
        if request.request_id in self.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use")
        if "#" in request.request_id:
            raise InvalidRequest(f"request id {request.request_id!r} has a '#', which names forked sequences")
        if not request.token_ids:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        limit = self._longest()
        room = request.num_tokens + (0 if request.stop_at is not None else 1)
        if room > limit:
            raise PromptTooLong(
                f"prompt has {request.num_tokens} tokens, this node serves at most {limit} with its output "
                f"(the model's limit is {self.config.max_model_len}, the KV pool may hold less); "
                "shorten the prompt"
            )
        if is_pinned(request) and request.end > self.kv.max_pinned_tokens:
            raise PromptTooLong(
                f"a prefill of {request.end} tokens holds all its blocks, and a KV group here has blocks "
                f"for {self.kv.max_pinned_tokens}; shorten the prompt or raise kv_cache_mib"
            )
        self.encoders.check(request)

    def _take_in(self, request: Request, state: RequestState) -> None:
        self.requests.move(request, state)
        self._stop_checkers[request.request_id] = self._make_stop_checker(request)

    def _longest(self) -> int:
        """Longest sequence that the model allows and the pools, as they are now, can hold alone."""
        config = self.config
        return min(
            config.max_model_len,
            self.kv.max_request_tokens(config.max_num_batched_tokens, config.max_model_len),
        )

    def _receiving(self, request_id: str) -> Request | None:
        request = self.requests.get(request_id)
        if request is None:
            return None  # aborted meanwhile
        if request.state is not RequestState.RECEIVING_KV:
            raise ProtocolViolation(f"KV arrived for {request!r}, which receives none")
        return request

    def _restart(self, request: Request) -> None:
        """Frees everything computed; known tokens stay, and it waits again."""
        self.encoders.release(request)
        self.kv.free(request)
        request.num_computed = 0
        request.drafts = ()
        self._carry.pop(request.request_id, None)
        self._forgotten.append(request.request_id)
        self.requests.move(request, RequestState.WAITING)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Old owner of the blocks: the request. New owner: the pool's free list."""
        if self.on_finish is not None and reason is not FinishReason.ABORT:
            self.on_finish(request)
        self.encoders.release(request)
        self.kv.free(request)
        request.finish_reason = reason
        request.drafts = ()
        self._carry.pop(request.request_id, None)
        self._forgotten.append(request.request_id)
        del self._stop_checkers[request.request_id]
        self.requests.move(request, RequestState.FINISHED)

    # ---- one step ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests.waiting or self.requests.num_seated or self._untold)

    def schedule(self) -> ScheduledBatch:
        """The next step's work; may be empty. Owns the blocks that the step writes."""
        entries: dict[str, ScheduledRequest] = {}
        budget = self.config.max_num_batched_tokens
        self.encoders.begin_step()
        # Arrived hand-overs first, then by priority; the sort keeps the order of admission.
        order = [*self.requests.ready, *sorted(self.requests.running, key=lambda r: r.priority)]
        for request in order:
            if budget <= 0:
                break
            if request.state in (RequestState.WAITING, RequestState.FINISHED):
                continue  # preempted a moment ago, or given up
            num_new, drafts = self._share(request, budget)
            if num_new <= 0:
                continue
            if request.state is RequestState.READY:  # one that finds no budget stays ready: first next time
                self.requests.move(request, RequestState.RUNNING)
            upto = self._slots_upto(request, num_new, len(drafts))
            if not self._make_room(request, upto, order, entries):
                continue
            entries[request.request_id] = self._entry(request, num_new, drafts)
            budget -= num_new + len(drafts)
        seats = self._seats
        for request in list(self.requests.waiting):
            if budget <= 0 or self._preempted or self.requests.num_seated >= seats:
                break
            num_new = self._start(request, budget)
            if num_new <= 0:
                break
            entries[request.request_id] = self._entry(request, num_new, ())
            budget -= num_new
        forgotten, self._forgotten = tuple(self._forgotten), []
        return ScheduledBatch(
            tuple(entries.values()), self.kv.take_copies(), forgotten, self.encoders.take_freed()
        )

    def _share(self, request: Request, budget: int) -> tuple[int, tuple[int, ...]]:
        """`next_share`, as far as encoder outputs are there or can be made."""
        num_new, drafts = next_share(request, budget, self.config, self.limit)
        allowed = self.encoders.limit(request, num_new)
        return (num_new, drafts) if allowed == num_new else (allowed, ())

    @property
    def _seats(self) -> int:
        return self.config.max_num_seqs - self.requests.num_receiving

    def _slots_upto(self, request: Request, num_new: int, num_drafts: int) -> int:
        """One past the last slot that a step writes, drafting past T included."""
        end = request.num_computed + num_new + num_drafts
        if request.num_computed + num_new < request.num_tokens:
            return end  # nothing is sampled, so nothing is drafted
        limit = min(self.limit, self.kv.max_pinned_tokens) if is_pinned(request) else self.limit
        return max(end, min(end + self.config.speculation.num_slots, limit))

    def _make_room(
        self, request: Request, upto: int, order: Sequence[Request], entries: Mapping[str, ScheduledRequest]
    ) -> bool:
        """Allocates up to ``upto``, preempting the last ones in ``order`` that are not in this step yet."""
        while not self.kv.allocate(request, upto):
            victim = next(
                (
                    r
                    for r in reversed(order)
                    if r.state is RequestState.RUNNING and r.request_id not in entries and not is_pinned(r)
                ),
                request,
            )
            if victim is request and self._alone(request):
                self._give_up(request)
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _alone(self, request: Request) -> bool:
        """Nothing else will ever give blocks back: starting again would end at the same place."""
        return self.requests.num_with_blocks == 1 and request.state is RequestState.RUNNING

    def _give_up(self, request: Request) -> None:
        """The pool has shrunk below what this request needs (quarantined blocks): it ends with an error."""
        update = RequestUpdate(
            request.request_id, finish_reason=FinishReason.ERROR, summary=summary_of(request)
        )
        self._finish(request, FinishReason.ERROR)
        self._untold.append(update)

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self._restart(request)
        self._preempted.append(request.request_id)

    def _start(self, request: Request, budget: int) -> int:
        """Admits a waiting request if its whole prompt has room now; returns its first chunk, 0 for no."""
        if not request.tables:
            hit = self.kv.match(request)
            self.kv.adopt(request, hit)
        headroom = self.requests.num_seated
        num_new = 0
        if self.encoders.admit(request, request.num_computed):
            num_new, _ = self._share(request, budget)
        fits = self.kv.fits(request, request.end + 1, headroom, self.config.max_num_batched_tokens)
        alone = self.requests.num_with_blocks == 0
        num_placed = request.end - request.num_computed if is_pinned(request) else num_new
        upto = self._slots_upto(request, num_placed, 0)
        if num_new <= 0 or not (fits or alone) or not self.kv.allocate(request, upto):
            self.encoders.release(request)
            self.kv.free(request)
            request.num_computed = 0
            return 0
        self.requests.move(request, RequestState.RUNNING)
        if request.num_output_tokens == 0:
            self._count_hit(request, request.num_computed)
        return num_new

    def _count_hit(self, request: Request, hit: int) -> None:
        request.num_cached_tokens = hit
        self.kv.stats.record(request.num_tokens, hit)

    def _entry(self, request: Request, num_new: int, drafts: tuple[int, ...]) -> ScheduledRequest:
        samples = request.num_computed + num_new == request.num_tokens
        return ScheduledRequest(
            request_id=request.request_id,
            known=request.token_ids,
            start=request.num_computed,
            num_new=num_new,
            drafts=drafts,
            samples=samples,
            tables=request.tables,
            sampling=request.sampling,
            num_prompt=request.num_prompt_tokens,
            handover_carry=self._carry.pop(request.request_id, None),
            encode=self.encoders.take(request, num_new),
        )

    # ---- what came of it --------------------------------------------------------------------------------

    def apply(self, batch: ScheduledBatch, output: RunnerOutput) -> StepOutput:
        """Appends tokens, ends requests, registers final blocks. Call before the next `schedule`."""
        self.kv.copies_done(batch.copies)
        updates, self._untold = self._untold, []
        forked: list[tuple[str, str]] = []
        for entry, result in zip(batch.entries, output.outputs, strict=True):
            request = self.requests.get(entry.request_id)
            if request is None or request.state is not RequestState.RUNNING:
                continue  # aborted while the step ran
            if entry.samples and request.num_sequences > 1:
                forked += [(request.request_id, child.request_id) for child in self._fork(request, entry)]
            updates.append(self._apply_one(request, entry, result))
        preempted, self._preempted = tuple(self._preempted), []
        num_tokens = sum(e.end - e.start for e in batch.entries)
        return StepOutput(tuple(updates), tuple(forked), num_tokens, preempted)

    def _apply_one(self, request: Request, entry: ScheduledRequest, result: RequestOutput) -> RequestUpdate:
        request.num_computed = entry.start + entry.num_new + result.num_accepted
        tokens: tuple[int, ...] = ()
        reason: FinishReason | None = None
        if entry.samples:
            checker = self._stop_checkers[request.request_id]
            # How long a prefill's sequence may get is for the node to say where it goes on.
            limit = self.limit if request.stop_at is None else sys.maxsize
            tokens, reason = checker.append(result.tokens, limit)
            verified, accepted = len(entry.drafts), result.num_accepted
            if len(tokens) < len(result.tokens):  # nothing past the end counts, verified or not
                verified, accepted = min(verified, len(tokens)), min(accepted, len(tokens))
            for stats in (request.spec, self.stats):
                stats.record(verified, accepted)
            request.num_computed = min(request.num_computed, request.num_tokens)
            request.drafts = result.next_drafts
        if reason is None and request.stop_at == request.num_computed:
            reason = FinishReason.CUT
        self.kv.register_final(request, final_upto(request, self.config.speculation.lookahead))
        update = self._update(request, tokens, result.logprobs, reason)
        self.encoders.advance(request)
        if reason is not None:
            if request.hold_blocks:
                # Old owner: the running request. New owner: the hold, until `release` or `abort`.
                self.encoders.release(request)
                request.finish_reason = reason
                self.requests.move(request, RequestState.HELD)
            else:
                self._finish(request, reason)
        else:
            self.kv.free_skipped(request)
        return update

    def _update(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        reason: FinishReason | None,
    ) -> RequestUpdate:
        """The news that ``tokens``, just appended, are; ``logprobs`` may be of some more."""
        return RequestUpdate(
            request.request_id,
            new_tokens=tokens,
            offset=request.num_output_tokens - len(tokens),
            logprobs=logprobs[: len(tokens)] if logprobs is not None else None,
            drafts=request.drafts,
            final_upto=final_upto(request, self.config.speculation.lookahead),
            num_computed=request.num_computed,
            finish_reason=reason,
            stop_string=request.stop_string,
            summary=None if reason is None else summary_of(request),
        )

    def _fork(self, parent: Request, entry: ScheduledRequest) -> list[Request]:
        """Starts sequences 1..n-1 of ``parent``, whose prompt has just been computed.

        Slots below L-N depend on the prompt only: those blocks are shared. What a child recomputes itself
        (and the block it lies in) starts there, or at the cut with the hand-over's row.
        """
        children = []
        prompt_len = parent.num_tokens
        shared = max(0, prompt_len - self.config.tail)
        start = max(entry.start, shared)
        for child in sequences_of(parent):
            seat = self.requests.num_seated < self._seats and self.encoders.admit(child, shared)
            if seat and self.kv.fork(parent, child, shared, start):
                self._take_in(child, RequestState.RUNNING)
                if start > shared and entry.handover_carry is not None:
                    self._carry[child.request_id] = entry.handover_carry
            else:
                self.encoders.release(child)
                self._take_in(child, RequestState.WAITING)
            children.append(child)
        parent.num_sequences = 1
        return children

    # ---- checks -----------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Queues hold what their names say, and every block has exactly its owners."""
        self.requests.check_invariants()
        assert self.requests.num_seated <= self._seats, "more requests than seats"
        for request in self.requests.values():
            assert 0 <= request.num_computed <= request.num_tokens, f"{request!r} computed too much"
            assert len(request.drafts) <= self.config.speculation.num_drafts
        seated = {r.request_id for r in self.requests.values() if r.state in _WITH_ENCODINGS}
        self.encoders.check_invariants(seated)
        self.kv.check_invariants(self.requests.values())
