"""A random hybrid model from its checkpoint through real nodes: `verify` over the real hand-over.

Its state group has larger blocks than attention, so the transfer moves blocks of three groups and two sizes.
"""

import asyncio
from pathlib import Path

import pytest

from cli.local_config import ClusterConfig, DefaultModelOptions
from cli.local_nodes import EngineFactory
from cli.verification import verify
from common.config import EngineOptions
from common.engine.build import build_engine
from router.config import HANDOFFS
from tests.hybrids import save_hybrid

WINDOWS = (None, 6, 9, None)  # of the N = 4 modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    save_hybrid(path, WINDOWS)
    return path


def config_of(folder: Path) -> ClusterConfig:
    return ClusterConfig(
        model=DefaultModelOptions(model=str(folder), modules=str(folder / "mtp"), dtype="float32"),
        engine=EngineOptions(block_size=4, num_blocks=200, max_num_batched_tokens=64, threads=1),
    )


@pytest.mark.parametrize("handoff", HANDOFFS)
def test_the_pair_is_exact_on_real_nodes(folder: Path, handoff: str) -> None:
    config = config_of(folder)
    layout = build_engine(config.model, config.engine).layout
    assert [group.block_size for group in layout.groups] == [4, 4, 4, 12]
    report = asyncio.run(verify(EngineFactory(config), 20, 12, 0, "none", handoff))
    assert report.ok, report.describe()
    # With `backoff` prompts of fewer than N tokens leave nothing to hand over.
    assert report.hand_overs == (16 if handoff == "backoff" else 20)
    assert report.transfer_failures == 0
    assert report.tokens_differing == report.tokens_differing_without_speculation == 0
    assert set(report.draft_kv_max_diff) == {"pair", "aggregated"}
    assert 0 < max(report.draft_kv_max_diff.values()) < 1e-4
    assert min(report.prefix_hits.values()) > 0


def test_a_wrong_lookahead_is_seen_on_a_hybrid(folder: Path) -> None:
    report = asyncio.run(verify(EngineFactory(config_of(folder)), 9, 8, 0, "lookahead"))
    assert not report.ok
    assert report.tokens_differing == 0
    assert report.draft_kv_max_diff["pair"] > 1e-2 > report.draft_kv_max_diff["aggregated"]
