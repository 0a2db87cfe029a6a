"""Small things that tests need: requests, runs to their end, what the trunk alone says."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from cli.schedules.bare_engine import make_engine
from cli.schedules.random_models import (
    EMBEDDING_SCALE,
    HYBRID_LAYERS,
    VOCAB,
    hybrid_config,
    model_config,
    random_modules,
    random_trunk,
)
from common.engine.engine import Engine
from common.model.dense_attention import DenseAttention
from common.model.dense_recurrence import DenseRecurrence
from common.model.transformer import Transformer
from common.request import Request, SamplingParams

__all__ = [
    "EMBEDDING_SCALE",
    "HYBRID_LAYERS",
    "VOCAB",
    "hybrid_config",
    "make_engine",
    "model_config",
    "random_modules",
    "random_trunk",
]
_ids = itertools.count()


def make_request(
    token_ids: Sequence[int],
    max_tokens: int = 16,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    request_id: str | None = None,
    stop_at: int | None = None,
    hold_blocks: bool = False,
    num_sequences: int = 1,
    **sampling: object,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, **sampling)  # type: ignore[arg-type]
    return Request(
        request_id or f"r{next(_ids)}",
        list(token_ids),
        params,
        stop_at=stop_at,
        hold_blocks=hold_blocks,
        num_sequences=num_sequences,
        arrival_time_s=float(next(_ids)),
    )


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def greedy_tokens(trunk: Transformer, prompt: Sequence[int], count: int) -> list[int]:
    """What the trunk alone says, one dense pass a token."""
    ids = list(prompt)
    for _ in range(count):
        dense = DenseAttention(trunk.config.layer_windows)
        hidden = trunk(torch.tensor([ids]), torch.arange(len(ids))[None], dense, DenseRecurrence())
        ids.append(int(trunk.logits(hidden[0, -1]).argmax()))
    return ids[len(prompt) :]


def run_to_end(engine: Engine, request: Request, max_steps: int = 500) -> list[int]:
    """Adds a request and steps until nothing runs; its output tokens."""
    engine.add(request)
    drain(engine, max_steps)
    return request.token_ids[request.num_prompt_tokens :]


def drain(engine: Engine, max_steps: int = 500) -> None:
    for _ in range(max_steps):
        if not engine.has_work:
            return
        engine.step()
        engine.check_invariants()
    raise AssertionError(f"still working after {max_steps} steps")


REPOSITORY = Path(__file__).resolve().parent.parent
