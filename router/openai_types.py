"""OpenAI request bodies: raw bytes in, a checked `GenerationRequest` out, or an error that names the field.

Every field is in one of four places: understood (a struct field), accepted and ignored because it cannot
change the answer (`IGNORED_FIELDS`), accepted at the one value that asks for nothing (`HARMLESS_VALUES`),
or refused by name. A null is the same as a field that is absent.
"""

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidRequest
from common.request import SamplingParams
from router.chat_messages import checked_messages, json_type

IGNORED_FIELDS = frozenset(
    (
        "user",
        "store",
        "metadata",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
    )
)
HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}

MAX_N = 16
MAX_PROMPTS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
DEFAULT_COMPLETION_TOKENS = 16
INT64 = (-(1 << 63), (1 << 63) - 1)
INT32 = (-(1 << 31), (1 << 31) - 1)


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _CommonBody(msgspec.Struct, kw_only=True):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[str, float] = {}
    cache_salt: str | None = None
    priority: int = 0


class CompletionBody(_CommonBody, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None


class ChatBody(_CommonBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One HTTP request for tokens, checked against everything but the vocabulary and the context.

    Exactly one of ``prompts`` (completions) and ``messages`` (chat) is set. ``max_tokens`` None: as many
    as fit; ``sampling.max_tokens`` is filled in once the prompt's length is known.
    """

    model: str
    sampling: SamplingParams
    max_tokens: int | None
    prompts: tuple[str | list[int], ...] = ()
    messages: list[dict[str, str]] | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    cache_salt: str | None = None
    priority: int = 0

    @property
    def chat(self) -> bool:
        return self.messages is not None


T = TypeVar("T", bound=msgspec.Struct)


def parse_body(kind: type[T], raw: bytes) -> T:
    """JSON bytes to ``kind``; InvalidRequest says where it is wrong. Unknown fields are refused."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid JSON: it is not UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; no field needs more than a few levels") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {json_type(body)}")
    given = {key: value for key, value in body.items() if value is not None and key not in IGNORED_FIELDS}
    for name in given.keys() - set(kind.__struct_fields__):
        value = given.pop(name)
        if value not in HARMLESS_VALUES.get(name, ()):
            raise InvalidRequest(
                f"field {name!r} is not supported; remove it", param=name, code="unsupported_field"
            )
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), given) from None


def _wrong_type(said: str, given: Mapping[str, Any]) -> InvalidRequest:
    """msgspec's words with the field's name and value in front."""
    expected, _, path = said.partition(" - at `$.")
    field = re.match(r"\w+", path)
    if field is None:
        missing = re.search(r"required field `(\w+)`", said)
        name = missing and missing[1]
        return InvalidRequest(f"field {name!r} is missing" if name else said, param=name)
    value = reprlib.repr(given.get(field[0]))
    message = f"{field[0]} is {value}; {expected[:1].lower()}{expected[1:]}"
    where = path.rstrip("`")
    return InvalidRequest(message + (f" at {where}" if where != field[0] else ""), param=field[0])


def parse_completion(raw: bytes) -> GenerationRequest:
    body = parse_body(CompletionBody, raw)
    if body.logprobs is not None:
        _in_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return GenerationRequest(
        prompts=_prompts(body.prompt), **_common(body, max_tokens, body.logprobs, "max_tokens")
    )


def parse_chat(raw: bytes) -> GenerationRequest:
    body = parse_body(ChatBody, raw)
    if body.top_logprobs is not None:
        _in_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
        if not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InvalidRequest(
            "give max_completion_tokens or max_tokens, not both", param="max_completion_tokens"
        )
    by_new_name = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if by_new_name else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    name = "max_completion_tokens" if by_new_name else "max_tokens"
    return GenerationRequest(
        messages=checked_messages(body.messages), **_common(body, max_tokens, logprobs, name)
    )


def check_token_ids(token_ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for the first id that is no integer from 0 to ``vocab_size`` - 1."""
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            raise InvalidRequest(f"{param}[{position}] is {token_id!r}; expected a token id", param=param)
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}[{position}] is {token_id}, outside the vocabulary of {vocab_size} tokens",
                param=param,
            )


def _common(body: _CommonBody, max_tokens: int | None, logprobs: int | None, limit: str) -> dict[str, Any]:
    """The checked fields that both kinds of request share, as arguments of GenerationRequest."""
    if max_tokens is not None:
        _in_range(limit, max_tokens, 1, INT32[1])
    _in_range("n", body.n, 1, MAX_N)
    _in_range("priority", body.priority, *INT32)
    if body.cache_salt == "":
        raise InvalidRequest(
            "cache_salt is empty, which would part nothing; give a secret string, or leave the field out",
            param="cache_salt",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    return {
        "model": body.model,
        "sampling": _sampling(body, max_tokens, logprobs),
        "max_tokens": max_tokens,
        "n": body.n,
        "stream": body.stream,
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
    }


def _sampling(body: _CommonBody, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    _in_range("temperature", body.temperature, 0, 2)
    _in_range("top_p", body.top_p, 0, 1, above_low=True)
    _in_range("top_k", body.top_k, -1, INT32[1])  # -1 and 0: off
    _in_range("min_p", body.min_p, 0, 1)
    _in_range("presence_penalty", body.presence_penalty, -2, 2)
    _in_range("frequency_penalty", body.frequency_penalty, -2, 2)
    _in_range("repetition_penalty", body.repetition_penalty, 0, 10, above_low=True)
    if body.seed is not None:
        _in_range("seed", body.seed, *INT64)
    _in_range("min_tokens", body.min_tokens, 0, INT32[1] if max_tokens is None else max_tokens)
    if len(body.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(body.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    return SamplingParams(
        max_tokens=max_tokens or 0,
        temperature=body.temperature,
        top_k=max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias),
    )


def _in_range(name: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    if not (low < value if above_low else low <= value) or not value <= high:
        bound = f"above {low}" if above_low else f"at least {low}"
        raise InvalidRequest(f"{name} is {value}; it must be {bound} and at most {high}", param=name)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS}", param="stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"a stop string has {len(text)} characters; 1 to {MAX_STOP_CHARACTERS}", param="stop"
            )
    return stops


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias"
        )
    checked = {}
    for key, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise InvalidRequest(f"logit_bias key {key!r} is no token id", param="logit_bias")
        if not -100 <= value <= 100:
            raise InvalidRequest(f"logit_bias of token {key} is {value}; -100 to 100", param="logit_bias")
        checked[int(key)] = value
    return checked


def _prompts(prompt: str | list[Any]) -> tuple[str | list[int], ...]:
    """A string, token ids, or a list of either."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and not isinstance(prompt[0], str | list):
        prompts = [prompt]  # token ids; checked against the vocabulary later
    else:
        prompts = prompt
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompts)} prompts; at most {MAX_PROMPTS}", param="prompt")
    if not prompts or not all(prompts):
        raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
    for item in prompts:
        if not isinstance(item, str | list):
            raise InvalidRequest(f"prompt contains {item!r}; expected text or token ids", param="prompt")
    return tuple(prompts)
