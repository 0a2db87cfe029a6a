"""`baton generate` without a router: one request on an engine in this process, step by step."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cli.answer import Answer, Shown
from cli.local_config import EngineConfig
from cli.options import config_from
from common.engine.build import BuiltEngine, build_engine
from common.errors import BatonError, InvalidRequest, PromptTooLong
from common.request import FinishReason, Request, SamplingParams
from common.tokenizer import Tokenizer


def generate(args: argparse.Namespace, prompt: str, sampling: Mapping[str, Any]) -> int:
    """Streams the answer as `cli.answer.ask` does; the exit code of the command."""
    config = config_from(args, EngineConfig)
    built = build_engine(config.model, config.engine, progress=lambda text: print(text, file=sys.stderr))
    token_ids = prompt_ids(built.tokenizer, prompt, raw=args.raw)
    room = built.max_model_len - len(token_ids)
    if not token_ids:
        raise InvalidRequest("the prompt is empty; give it at least one token of text", param="prompt")
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {len(token_ids)} tokens, model and pool hold {built.max_model_len} "
            "with the answer; shorten it or raise --kv-cache-mib"
        )
    params = SamplingParams(**{**sampling, "max_tokens": min(sampling["max_tokens"], room)})
    request = Request("generate", token_ids, params)
    start_s = time.perf_counter()
    shown = Shown()
    for piece in pieces(built, request):
        shown.add(piece)
    shown.end()
    answer = Answer(shown.text, shown.first_s - start_s, shown.last_s - shown.first_s, usage_of(request))
    print(answer.describe(), file=sys.stderr)
    return 0


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, raw: bool) -> list[int]:
    """The prompt as a chat message, or as plain text when ``raw`` or without a chat template."""
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(text, add_special_tokens=False)


def pieces(built: BuiltEngine, request: Request) -> Iterator[str]:
    """The answer's text as the engine's steps produce it."""
    detokenizer = built.tokenizer.detokenizer()
    built.engine.add(request)
    while built.engine.has_work:
        for update in built.engine.step().updates:
            yield detokenizer.push(update.new_tokens)
            if update.finish_reason is FinishReason.ERROR:
                raise BatonError("the engine gave the request up")
    yield detokenizer.flush()


def usage_of(request: Request) -> dict[str, Any]:
    """The request's figures in the shape of the HTTP API's usage object."""
    spec = request.spec
    return {
        "prompt_tokens": request.num_prompt_tokens,
        "completion_tokens": request.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": request.num_cached_tokens},
        "baton": {
            "num_drafts": spec.num_drafts,
            "num_draft_tokens": spec.num_draft_tokens,
            "num_accepted": spec.num_accepted,
            "accepted_per_pos": spec.accepted_per_pos,
            "verified_per_pos": spec.verified_per_pos,
        },
    }
