"""What a node is built around, without a model: the fake engine, real pools, and the names it registers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from common.engine.build import BuiltEngine
from common.kv_cache.storage import KVStorage
from common.model.registry import ModelFiles
from tests.fakes import ROW, make_fake_engine

NUM_MODULES = 2


def fake_built(num_blocks: int = 64, **options: Any) -> BuiltEngine:
    """``options`` as of `make_fake_engine`."""
    engine, runner = make_fake_engine(NUM_MODULES, num_blocks=num_blocks, **options)
    sizes = [pool.num_blocks for pool in engine.scheduler.kv.pools]
    config = SimpleNamespace(vocab_size=50, hidden_size=len(ROW) // 4)
    return BuiltEngine(
        engine=engine,
        files=ModelFiles(Path("fake"), None, "fake"),
        tokenizer=cast(Any, SimpleNamespace(digest="")),
        storage=KVStorage(runner.layout, sizes),
        trunk=cast(Any, SimpleNamespace(config=config)),
        modules=None,
        num_modules=NUM_MODULES,
        fingerprint={"model": "fake"},
    )
