"""Builds an engine from options: loads trunk and modules, lays out and allocates KV, wires the parts."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.block_hash import BlockHasher
from common.config import EngineOptions, ModelOptions
from common.engine.engine import Engine
from common.engine.methods import check_dropped_block, choose_method
from common.engine.model_runner import ModelRunner
from common.engine.rules import SchedulerConfig
from common.engine.scheduler import Scheduler
from common.engine.stopping import StopChecker
from common.kv_cache.layout import DTYPE_BYTES, KVLayout, build_layout
from common.kv_cache.manager import KVCacheManager, pool_sizes
from common.kv_cache.storage import KVStorage
from common.model.mtp import MtpModules
from common.model.registry import ModelFiles, resolve_model
from common.model.transformer import Transformer
from common.model.weights import load_mtp, load_transformer, to_dtype, trunk_digest
from common.request import Request
from common.tokenizer import Tokenizer


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what its node tells others about it."""

    engine: Engine
    files: ModelFiles
    tokenizer: Tokenizer
    storage: KVStorage
    trunk: Transformer
    modules: MtpModules | None
    num_modules: int  # N in use
    fingerprint: dict[str, str]  # what a pair must agree on, by name

    @property
    def layout(self) -> KVLayout:
        return self.storage.layout

    @property
    def carry_row_bytes(self) -> int:
        """One hidden row of the trunk, as a hand-over ships it."""
        return self.trunk.config.hidden_size * DTYPE_BYTES[self.layout.kv_groups[0].dtype]

    @property
    def max_model_len(self) -> int:
        """Prompt and output; the pool's limit included."""
        return self.engine.scheduler.limit


def build_engine(
    model: ModelOptions, options: EngineOptions, *, progress: Callable[[str], None] | None = None
) -> BuiltEngine:
    """Raises ModelLoadError, ConfigError or CapacityError, each with what to change."""
    if options.threads:
        torch.set_num_threads(options.threads)
    files = resolve_model(model.model, modules=model.modules or None)
    if progress is not None:
        progress(f"loading {files.name} from {files.folder}")
    dtype = to_dtype(model.dtype)
    trunk = load_transformer(files.folder, dtype)
    trunk.pack()
    modules: MtpModules | None = None
    digest = trunk_digest(files.folder)
    if files.modules_folder is not None and options.num_speculative_tokens != 0:
        modules = load_mtp(files.modules_folder, trunk, dtype, digest)
        modules.pack()
    tokenizer = Tokenizer.from_folder(files.folder)
    return assemble(trunk, modules, tokenizer, files, digest, model, options)


def assemble(
    trunk: Transformer,
    modules: MtpModules | None,
    tokenizer: Tokenizer,
    files: ModelFiles,
    digest: str,
    model: ModelOptions,
    options: EngineOptions,
) -> BuiltEngine:
    """The engine over loaded weights."""
    method = choose_method(modules, options)
    num_modules, speculation = method.num_modules, method.speculation
    config = trunk.config
    windows = modules.config.windows[:num_modules] if modules is not None else ()
    layout = build_layout(
        config.attention_windows,
        windows,
        block_size=options.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        recurrent_layers=config.recurrent_layers,
    )
    sizes = pool_sizes(layout, options.kv_cache_mib << 20, options.num_blocks)
    plain = options.disable_lookahead_block_hashes
    hash_lookahead = 0 if plain else speculation.lookahead
    hasher = BlockHasher(options.block_size, hash_lookahead, options.hash_algorithm, options.hash_seed)
    drop = plain and speculation.lookahead > 0
    if drop and options.prefix_caching:
        check_dropped_block(options.block_size, speculation)
    num_unhashed = speculation.lookahead if plain else 0
    kv = KVCacheManager(
        layout, sizes, hasher, options.prefix_caching, drop, options.tell_salted_tokens, num_unhashed
    )
    storage = KVStorage(layout, sizes)
    limit = config.max_position_embeddings
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=min(options.max_model_len, limit) if options.max_model_len else limit,
        speculation=speculation,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
    )

    def stop_checker(request: Request) -> StopChecker:
        return StopChecker(request, tokenizer.eos_token_ids, tokenizer.detokenizer)

    drafter = method.make(modules, storage, config.vocab_size, None)
    runner = ModelRunner(trunk, storage, drafter, tokenizer.eos_token_ids)
    fingerprint = {
        "model": files.name,
        "trunk_digest": digest,
        "modules_digest": modules_digest(files, num_modules),
        "num_modules": str(num_modules),
        "lookahead": str(speculation.lookahead),
        "hash": hasher.fingerprint,
        **layout.describe(),
    }
    engine = Engine(Scheduler(scheduler_config, kv, stop_checker), runner)
    return BuiltEngine(engine, files, tokenizer, storage, trunk, modules, num_modules, fingerprint)


def modules_digest(files: ModelFiles, num_modules: int) -> str:
    """sha256 of the modules' file, "none" where nothing drafts."""
    if files.modules_folder is None or num_modules == 0:
        return "none"
    with open(files.modules_folder / "model.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
