"""Random hybrid models, drafts of any quality over them, and checks against one uninterrupted pass."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from common.engine.draft_kv_oracle import draft_kv_max_diff
from common.engine.engine import Engine
from common.engine.state_oracle import state_max_diff
from common.kv_cache.storage import KVStorage
from common.model.mtp import MtpConfig, MtpModules
from common.model.transformer import Transformer
from common.model.weights import save_checkpoint, save_mtp, trunk_digest
from common.request import Request
from tests.builders import (
    HYBRID_LAYERS,
    VOCAB,
    greedy_tokens,
    hybrid_config,
    make_engine,
    random_modules,
    random_trunk,
)
from tests.builders_tokenizer import byte_level_tokenizer

LIMIT = 1e-4  # fp32
SEEN = 100 * LIMIT  # what a broken rule must at least show

Pair = tuple[Engine, KVStorage]
WINDOWS = (6, 9)
Rule = Callable[[int], bool]
"""Whether the draft for a position is to be the right one."""


@dataclass
class HybridModel:
    """Weights, what the trunk alone says, and engines that draft as told."""

    trunk: Transformer
    modules: MtpModules | None
    num_modules: int
    _truths: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def truth(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first ``count`` tokens after a prompt, by dense passes."""
        known = self._truths.get(tuple(prompt), [])
        if len(known) < count:
            known = known + greedy_tokens(self.trunk, [*prompt, *known], count - len(known))
            self._truths[tuple(prompt)] = known
        return known[:count]

    def engine(self, script: "Script | None" = None, **options: int | bool) -> Pair:
        choose = None if script is None else script.choose
        return make_engine(self.trunk, self.modules, choose=choose, **options)  # type: ignore[arg-type]

    def worst(self, pair: Pair, request: Request) -> float:
        """Largest difference of draft KV and states of a request that owns its blocks."""
        engine, storage = pair
        known, computed = request.token_ids, request.num_computed
        tables = engine.tables(request.request_id)
        worst = state_max_diff(self.trunk, storage, known, computed, tables)
        if self.modules is None:
            return worst
        diff = draft_kv_max_diff(self.trunk, self.modules, self.num_modules, storage, known, computed, tables)
        return max(worst, diff)


@dataclass
class Script:
    """What drafts are to be: by request id all its tokens to come, and which positions shall be right."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    right: Rule = lambda position: True

    def follow(self, model: HybridModel, request: Request) -> None:
        """Plans for a request that is about to be added; N tokens more than it will emit."""
        count = request.sampling.max_tokens + model.num_modules + 1
        prompt = request.token_ids[: request.num_prompt_tokens]
        self.tokens[request.request_id] = [*prompt, *model.truth(prompt, count)]

    def choose(self, request_id: str, position: int, token: int) -> int:
        """What the drafter proposes and reads instead of its own ``token``."""
        tokens = self.tokens.get(request_id)
        if tokens is None or position >= len(tokens):
            return token
        return tokens[position] if self.right(position) else (tokens[position] + 1) % VOCAB


def at_rate(rate: float, seed: int) -> Rule:
    """Right about so often; another opinion every time it is asked."""
    generator = random.Random(seed)
    return lambda position: generator.random() < rate


@cache
def hybrid_model(num_modules: int, layers: tuple[str, ...] = HYBRID_LAYERS) -> HybridModel:
    """Where the trunk has windows its modules have some too: one of the trunk's, and one of their own."""
    trunk = random_trunk(config=hybrid_config(layers, WINDOWS))
    if num_modules == 0:
        return HybridModel(trunk, None, 0)
    own = (None, WINDOWS[0], 11) if "sliding_attention" in layers else (None,)
    windows = [own[m % len(own)] for m in range(num_modules)]
    return HybridModel(trunk, random_modules(trunk, num_modules, windows=windows), num_modules)


def save_hybrid(
    folder: Path, module_windows: Sequence[int | None], layers: Sequence[str] = HYBRID_LAYERS
) -> None:
    """A checkpoint with tokenizer, and modules in ``mtp``; its state is larger than the KV of 8 tokens."""
    tokenizer = byte_level_tokenizer()
    config = hybrid_config(
        layers, vocab_size=tokenizer.get_vocab_size(), delta_heads=3, delta_key_dim=16, delta_value_dim=24
    )
    trunk = random_trunk(config=config)
    save_checkpoint(folder, trunk, torch.float32)
    tokenizer.save(str(folder / "tokenizer.json"))
    count = len(module_windows)
    told = MtpConfig(count, trunk_digest(folder), windows=tuple(module_windows))
    modules = MtpModules(told, trunk, None, torch.float32)
    modules.load_state_dict(random_modules(trunk, count, windows=module_windows).state_dict())
    save_mtp(folder / "mtp", modules, torch.float32)
