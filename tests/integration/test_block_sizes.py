"""Real nodes whose KV blocks differ in size, over the real hand-over: as exact as a pair of one size."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from cli.local_config import ClusterConfig, DefaultModelOptions
from cli.local_nodes import EngineFactory
from cli.verification import verify
from common.config import EngineOptions
from common.engine.build import BuiltEngine
from router.config import HANDOFFS
from tests.hybrids import save_hybrid

WINDOWS = (None, 6, 9, None)  # of the N = 4 modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows")
    save_hybrid(path, WINDOWS, ("sliding_attention", "full_attention", "full_attention"))
    return path


class Sizes(EngineFactory):
    """Engines of the block sizes given, in the order in which they are asked for."""

    def __init__(self, config: ClusterConfig, *sizes: int) -> None:
        super().__init__(config)
        self.sizes = list(sizes)

    def make(self, options: EngineOptions | None = None, *, speculation: bool = True) -> BuiltEngine:
        size = self.sizes.pop(0) if self.sizes else self.config.engine.block_size
        options = dataclasses.replace(options or self.config.engine, block_size=size)
        return super().make(options, speculation=speculation)


@pytest.mark.parametrize("handoff", HANDOFFS)
@pytest.mark.parametrize(("p_size", "d_size"), [(4, 8), (8, 4)])
def test_a_pair_of_two_block_sizes_is_exact(folder: Path, handoff: str, p_size: int, d_size: int) -> None:
    config = ClusterConfig(
        model=DefaultModelOptions(model=str(folder), modules=str(folder / "mtp"), dtype="float32"),
        engine=EngineOptions(block_size=4, num_blocks=200, max_num_batched_tokens=64, threads=1),
    )
    report = asyncio.run(verify(Sizes(config, 4, p_size, d_size), 20, 12, 0, "none", handoff))
    assert report.ok, report.describe()
    assert report.hand_overs >= 16
    assert report.transfer_failures == 0
    assert report.tokens_differing == report.tokens_differing_without_speculation == 0
    assert 0 < max(report.draft_kv_max_diff.values()) < 1e-4
    assert min(report.prefix_hits.values()) > 0
