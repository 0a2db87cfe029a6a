"""Small things that tests need: random models, engines over them, requests."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from common.block_hash import BlockHasher
from common.engine.engine import Engine
from common.engine.methods import Method, multi_method
from common.engine.model_runner import ModelRunner
from common.engine.rules import SchedulerConfig
from common.engine.scheduler import Scheduler
from common.engine.stopping import StopChecker
from common.kv_cache.layout import build_layout
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.storage import KVStorage
from common.model.dense_attention import DenseAttention
from common.model.dense_recurrence import DenseRecurrence
from common.model.model_config import ModelConfig
from common.model.mtp import MtpConfig, MtpModules
from common.model.transformer import Transformer
from common.request import Request, SamplingParams

VOCAB = 64
EMBEDDING_SCALE, BLOCK_SCALE = 16.0, 4.0  # of the usual initial weights
_ids = itertools.count()


def model_config(num_layers: int = 3, window: int | None = 12) -> ModelConfig:
    """A Qwen3-shaped toy: layer 1 has a sliding window, the others are full."""
    layer_types = ["full_attention"] * num_layers
    if window is not None and num_layers > 1:
        layer_types[1] = "sliding_attention"
    return ModelConfig.from_json(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "max_position_embeddings": 512,
            "layer_types": layer_types,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "max_window_layers": 0,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "float32",
        }
    )


HYBRID_LAYERS = ("sliding_attention", "short_conv", "gated_delta_net", "full_attention")


def hybrid_config(
    layer_types: Sequence[str] = HYBRID_LAYERS, windows: Sequence[int] = (6,), **changes: int
) -> ModelConfig:
    """A toy of our own family; ``windows`` in turn for the sliding layers, ``changes`` to its config.json."""
    sizes = iter(windows)
    return ModelConfig.from_json(
        {
            "architectures": ["BatonHybridForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": len(layer_types),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "max_position_embeddings": 512,
            "layer_types": list(layer_types),
            "layer_windows": [next(sizes) if kind == "sliding_attention" else None for kind in layer_types],
            "conv_kernel": 4,
            "delta_heads": 2,
            "delta_key_dim": 8,
            "delta_value_dim": 12,
            **changes,
        }
    )


def random_trunk(
    seed: int = 0, window: int | None = 12, num_layers: int = 3, config: ModelConfig | None = None
) -> Transformer:
    """Sharp enough that greedy choices are no near-ties; of ``config``, else attention with a window."""
    generator = torch.Generator().manual_seed(seed)
    trunk = Transformer(config or model_config(num_layers, window), torch.float32)
    trunk.reset_parameters(generator)
    with torch.no_grad():
        for name, parameter in trunk.named_parameters():
            if parameter.dim() > 1 and not name.endswith("conv_weight"):
                parameter.mul_(BLOCK_SCALE if name.startswith("blocks") else EMBEDDING_SCALE)
    return trunk.eval().requires_grad_(False)


def random_modules(
    trunk: Transformer, num_modules: int, seed: int = 1, windows: Sequence[int | None] = ()
) -> MtpModules:
    """Modules whose drafts are right about .7 / .4 / .3 / .1 of the time, position by position.

    The trunk's next token depends mostly on the last one, and so does the modules' (the same last block over
    the token's embedding at its true scale).
    """
    config = MtpConfig(num_modules=num_modules, trunk_digest="random", windows=tuple(windows))
    modules = MtpModules(config, trunk, None, torch.float32)
    modules.init_from_trunk()
    generator = torch.Generator().manual_seed(seed)
    identity = torch.eye(trunk.config.hidden_size)
    with torch.no_grad():
        for m in range(num_modules):
            modules.module(m).hidden_norm.fill_(1.0)
            modules.module(m).proj.copy_(torch.cat((0.2 * identity, 0.05 * EMBEDDING_SCALE * identity), 1))
        for parameter in modules.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return modules.eval().requires_grad_(False)


def make_engine(
    trunk: Transformer,
    modules: MtpModules | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 64,
    threshold: int = 0,
    max_num_seqs: int = 16,
    prefix_caching: bool = True,
    num_modules: int | None = None,
    max_model_len: int = 256,
    state_block_size: int = 0,
    method: Method | None = None,
    drop_last_block: bool = False,
) -> tuple[Engine, KVStorage]:
    """``method``: another than one draft a module (then N modules have KV as it says)."""
    n = 0 if modules is None else modules.num_modules if num_modules is None else num_modules
    method = method or multi_method(n)
    n = method.num_modules
    config = trunk.config
    layout = build_layout(
        config.attention_windows,
        modules.config.windows[:n] if modules is not None else (),
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        recurrent_layers=config.recurrent_layers,
        state_block_size=state_block_size,
    )
    sizes = [num_blocks] * len(layout.groups)
    hasher = BlockHasher(block_size, 0 if drop_last_block else method.speculation.lookahead)
    num_unhashed = method.speculation.lookahead if drop_last_block else 0
    kv = KVCacheManager(layout, sizes, hasher, prefix_caching, drop_last_block, num_unhashed=num_unhashed)
    storage = KVStorage(layout, sizes)
    scheduler = Scheduler(
        SchedulerConfig(budget, max_num_seqs, max_model_len, method.speculation, threshold),
        kv,
        lambda r: StopChecker(r),
    )
    drafter = method.make(modules, storage, config.vocab_size)
    return Engine(scheduler, ModelRunner(trunk, storage, drafter, ())), storage


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
