"""From a checked request to jobs: chat template, tokenize once, check against vocabulary and context.

The ids are forwarded as they are; nobody behind the router tokenizes again.
"""

import asyncio
import time
from dataclasses import dataclass

import msgspec

from common.errors import InvalidRequest, NoNodeAvailable, PromptTooLong
from common.metrics import Metrics
from common.request import SamplingParams
from common.tokenizer import Tokenizer
from router.config import RouterConfig
from router.node_hub import NodeHub
from router.openai_types import GenerationRequest, check_token_ids
from router.prefix_index import PrefixIndex

LONG_TEXT_CHARACTERS = 20_000  # tokenized on a thread: it would hold up every stream


@dataclass(frozen=True)
class Services:
    """What a walk uses."""

    config: RouterConfig
    tokenizer: Tokenizer
    hub: NodeHub
    index: PrefixIndex
    metrics: Metrics


@dataclass(frozen=True)
class Job:
    """One prompt, ready to be placed. ``n`` sequences share it; choices count from ``first_index``. The last
    ``num_outputs`` of its tokens are no prompt: the client has them already, and the rest is asked for."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    n: int
    first_index: int
    arrival_s: float  # time.monotonic()
    cache_salt: str | None = None
    priority: int = 0
    num_outputs: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_outputs


async def prepare(services: Services, request: GenerationRequest, request_id: str) -> list[Job]:
    """Token ids of every prompt. Raises InvalidRequest, PromptTooLong or NoNodeAvailable."""
    arrival_s = time.monotonic()
    nodes = [node for node in services.hub.nodes.values() if node.decodes]
    if not nodes:
        raise NoNodeAvailable("no decode node is connected to this router; start one, or try again later")
    vocab_size = min(node.register.vocab_size for node in nodes)
    context = max(node.register.max_model_len for node in nodes)
    check_token_ids(request.sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(list(request.sampling.logit_bias), vocab_size, "logit_bias")
    jobs = []
    for number, token_ids in enumerate(await _tokenize(services.tokenizer, request, vocab_size)):
        max_tokens = _max_tokens(len(token_ids), request.max_tokens, context)
        jobs.append(
            Job(
                request_id=f"{request_id}-{number}" if len(request.prompts) > 1 else request_id,
                token_ids=token_ids,
                sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens),
                n=request.n,
                first_index=number * request.n,
                arrival_s=arrival_s,
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
        )
    return jobs


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    if len(text) > LONG_TEXT_CHARACTERS:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    return tokenizer.encode(text, add_special_tokens)


async def _tokenize(tokenizer: Tokenizer, request: GenerationRequest, vocab_size: int) -> list[list[int]]:
    if request.messages is not None:
        text = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True)
        return [await encode(tokenizer, text, add_special_tokens=False)]
    prompts = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            token_ids = await encode(tokenizer, prompt)
        else:
            check_token_ids(prompt, vocab_size, "prompt")
            token_ids = prompt
        if not token_ids:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        prompts.append(token_ids)
    return prompts


def _max_tokens(num_prompt_tokens: int, wanted: int | None, context: int) -> int:
    room = context - num_prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; prompt and output together may have {context}. "
            "Shorten the prompt"
        )
    if wanted is not None and wanted > room:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {wanted}; together they may have "
            f"{context}. Shorten the prompt or lower max_tokens to {room}"
        )
    return room if wanted is None else wanted
