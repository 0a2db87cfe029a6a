"""OpenAI response bodies: completions and chat completions, whole and streamed, usage and errors.

Plain dictionaries, encoded by msgspec; a streamed chunk is one server-sent event.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.errors import BatonError
from common.messages import Finished
from common.request import SpecStats
from common.tokenizer import Tokenizer
from router.choice_text import Delta, ScoredToken

Json = dict[str, Any]

DONE_EVENT = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    return _encoder.encode(value)


def to_event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def error_body(error: BatonError) -> Json:
    return {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code,
        }
    }


@dataclass
class Usage:
    """What a request cost: prompts counted once each, outputs summed over all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    spec: SpecStats = field(default_factory=SpecStats)

    def add_prompt(self, num_prompt_tokens: int, ends: Sequence[Finished]) -> None:
        """One prompt whose sequences have all ended. What they share is reported by each: the largest."""
        self.prompt_tokens += num_prompt_tokens
        self.completion_tokens += sum(end.output_tokens for end in ends)
        self.cached_tokens += max(end.cached_tokens for end in ends)
        self.transferred_tokens += max(end.transferred_tokens for end in ends)
        self.transferred_bytes += max(end.transferred_bytes for end in ends)
        for end in ends:
            self.spec.num_drafts += end.num_drafts
            self.spec.num_draft_tokens += end.num_draft_tokens
            self.spec.num_accepted += end.num_accepted
            _add(self.spec.accepted_per_pos, end.accepted_per_pos)
            _add(self.spec.verified_per_pos, end.verified_per_pos)

    def to_json(self) -> Json:
        """The OpenAI shape; ``baton`` holds speculation and hand-over of this request."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "baton": {
                "num_drafts": self.spec.num_drafts,
                "num_draft_tokens": self.spec.num_draft_tokens,
                "num_accepted": self.spec.num_accepted,
                "accepted_per_pos": self.spec.accepted_per_pos,
                "verified_per_pos": self.spec.verified_per_pos,
                "transferred_tokens": self.transferred_tokens,
                "transferred_bytes": self.transferred_bytes,
            },
        }


def _add(totals: list[int], more: Sequence[int]) -> None:
    totals += [0] * (len(more) - len(totals))
    for position, count in enumerate(more):
        totals[position] += count


@dataclass(frozen=True)
class Shapes:
    """Bodies of one request's answer."""

    chat: bool
    request_id: str
    model: str
    created: int
    tokenizer: Tokenizer

    def chunk(self, delta: Delta, *, first: bool, null_usage: bool) -> Json:
        """A streamed chunk for one choice. ``first``: of this choice. ``null_usage``: usage follows later."""
        choice: Json = {"index": delta.index}
        if self.chat:
            message: Json = {"role": "assistant", "content": delta.text} if first else {}
            if delta.text and not first:
                message["content"] = delta.text
            choice["delta"] = message
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs(delta.scored)
        choice["finish_reason"] = delta.finish_reason
        body = self._head(".chunk" if self.chat else "") | {"choices": [choice]}
        return body | {"usage": None} if null_usage else body

    def usage_chunk(self, usage: Usage) -> Json:
        return self._head(".chunk" if self.chat else "") | {"choices": [], "usage": usage.to_json()}

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Json:
        """The answer in one piece, from all deltas of all choices in their order."""
        by_index: dict[int, list[Delta]] = {}
        for delta in deltas:
            by_index.setdefault(delta.index, []).append(delta)
        choices = [self._whole_choice(index, by_index[index]) for index in sorted(by_index)]
        return self._head("") | {"choices": choices, "usage": usage.to_json()}

    def _whole_choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        scored = [token for delta in deltas for token in delta.scored]
        choice: Json = {"index": index}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(scored)
        choice["finish_reason"] = deltas[-1].finish_reason
        return choice

    def _head(self, suffix: str) -> Json:
        kind = "chat.completion" if self.chat else "text_completion"
        return {"id": self.request_id, "object": kind + suffix, "created": self.created, "model": self.model}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        if not scored:
            return None
        text_of = self.tokenizer.token_text
        if self.chat:
            return {"content": [self._chat_logprob(token) for token in scored], "refusal": None}
        return {
            "tokens": [text_of(token.token_id) for token in scored],
            "token_logprobs": [token.logprob.logprob for token in scored],
            "top_logprobs": [{text_of(i): lp for i, lp in token.logprob.top} for token in scored],
            "text_offset": [token.offset for token in scored],
        }

    def _chat_logprob(self, token: ScoredToken) -> Json:
        entry = self._token_entry(token.token_id, token.logprob.logprob)
        return entry | {"top_logprobs": [self._token_entry(i, lp) for i, lp in token.logprob.top]}

    def _token_entry(self, token_id: int, logprob: float) -> Json:
        text, data = self.tokenizer.token_text(token_id), list(self.tokenizer.token_bytes(token_id))
        return {"token": text, "logprob": logprob, "bytes": data}
