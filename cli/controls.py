"""Deliberately wrong variants of the drafter's rules: negative controls, and what other systems do.

They exist to show that the oracle sees the difference; nothing that serves uses them.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from common.engine.batch import ScheduledRequest, StepOutput
from common.engine.drafter import Verified
from common.engine.speculator import MtpSpeculator, Rows
from common.messages import PrefillRequest
from common.request import FinishReason, Request, SamplingParams
from prefill_node.node import Offer, PrefillNode


class WrongWaitingSlot(MtpSpeculator):
    """On P: the slot that waits for token L is written, from a token that is known to be wrong."""

    wrong_token = 0

    def rows(self, entry: ScheduledRequest, verified: Verified, hidden: Tensor) -> Rows:
        rows = super().rows(entry, verified, hidden)
        if not entry.samples:
            rows.next_ids[rows.last_known - rows.first :] = self.wrong_token
        return rows

    def pads(self, rows: Rows, m: int, samples: bool) -> np.ndarray:
        positions = np.arange(rows.first, rows.end)
        return (positions < rows.start) & (positions + m + 1 <= rows.exact_upto)


class NoFallback(MtpSpeculator):
    """On D: nothing below the cut is re-prefilled in the first step after a hand-over."""

    def first_row(self, entry: ScheduledRequest, exact_upto: int) -> int:
        if entry.start > 0 and not self.has_carry(entry.request_id):
            return entry.start
        return super().first_row(entry, exact_upto)


class FalseLookahead(PrefillNode):
    """P reads one wrong lookahead token: the first past the cut."""

    def make_request(self, message: PrefillRequest) -> Request:
        request = super().make_request(message)
        vocab_size = self.runtime.built.trunk.config.vocab_size
        request.token_ids = list(request.token_ids)
        request.token_ids[message.cut] = (request.token_ids[message.cut] + 1) % vocab_size
        return request


class CutPrompt(PrefillNode):
    """What others do: P gets the prompt only up to the cut, and guesses the tokens after it."""

    def make_request(self, message: PrefillRequest) -> Request:
        request = super().make_request(message)
        request.token_ids = list(message.token_ids[: message.cut])
        request.num_prompt_tokens = message.cut
        request.stop_at = None
        request.sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return request

    def _on_step(self, output: StepOutput, offers: list[Offer]) -> None:
        """What it samples is a guess of a token that is known: nobody is told."""
        updates = tuple(
            replace(update, new_tokens=(), finish_reason=update.finish_reason and FinishReason.CUT)
            for update in output.updates
        )
        row_bytes = self.runtime.built.carry_row_bytes
        offers = [replace(o, first=None, carry=o.carry and o.carry[-row_bytes:]) for o in offers]
        super()._on_step(replace(output, updates=updates), offers)
