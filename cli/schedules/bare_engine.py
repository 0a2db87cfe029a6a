"""An engine over weights in memory: no files, no tokenizer, every number free to choose."""

from common.block_hash import BlockHasher
from common.engine.drafter import Choice
from common.engine.engine import Engine
from common.engine.methods import Method, multi_method
from common.engine.model_runner import ModelRunner
from common.engine.rules import SchedulerConfig
from common.engine.scheduler import Scheduler
from common.engine.stopping import StopChecker
from common.kv_cache.layout import build_layout
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.storage import KVStorage
from common.model.mtp import MtpModules
from common.model.transformer import Transformer


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
    choose: Choice | None = None,
) -> tuple[Engine, KVStorage]:
    """``method``: another than one draft a module (then N modules have KV as it says). ``choose`` replaces
    the drafter's own tokens. ``drop_last_block``: plain hashes. Raises ConfigError as `build` does."""
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
    drafter = method.make(modules, storage, config.vocab_size, choose)
    return Engine(scheduler, ModelRunner(trunk, storage, drafter, ())), storage
