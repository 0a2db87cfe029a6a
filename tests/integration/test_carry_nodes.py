"""`carry` on real nodes over a real transfer: a random hybrid, compared with one aggregated node.

Everything a request may ask of its first token: sampling, penalties, log-probabilities, stops. And transfers
that break, of which the answer shows nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.local_cluster import Generation, LocalCluster
from cli.local_nodes import EngineFactory, decode_node, prefill_node
from common.errors import TransferFailed
from common.kv_ticket import KVTicket
from common.request import SamplingParams
from common.tokenizer import Tokenizer
from decode_node.node import DecodeNode
from kv_transfer.receiver import FetchResult, KvReceiver
from prefill_node.node import PrefillNode
from tests.builders import random_prompt
from tests.fakes import is_whole
from tests.hybrids import save_hybrid
from tests.integration.test_hybrid_nodes import WINDOWS, config_of

COUNT = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    save_hybrid(path, WINDOWS)
    return path


@dataclass
class Nodes:
    cluster: LocalCluster
    prefill: PrefillNode
    decode: DecodeNode
    tokenizer: Tokenizer

    async def both(self, name: str, prompt: list[int], **sampling: Any) -> tuple[Generation, Generation]:
        """From the aggregated node and from the pair; the engines of the pair are whole afterwards."""
        params = SamplingParams(**{"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True} | sampling)
        alone = await self.cluster.generate(name, prompt, params, decode="aggregated")
        pair = await self.cluster.generate(
            name, prompt, params, decode="decode", prefill="prefill", handoff="carry"
        )
        async with asyncio.timeout(5.0):
            for node in (self.prefill, self.decode):
                while not await node.runtime.call(is_whole):
                    await asyncio.sleep(0.01)
        return alone, pair


def scenario(folder: Path, story: Callable[[Nodes], Awaitable[None]]) -> None:
    async def main() -> None:
        config = config_of(folder)
        factory = EngineFactory(config)
        prefill_engine, decode_engine, alone = (factory.make() for _ in range(3))
        async with asyncio.timeout(60), LocalCluster() as cluster:
            address = cluster.control_address
            prefill = prefill_node(config, prefill_engine, address, "prefill")
            decode = decode_node(config, decode_engine, address, "decode")
            aggregated = decode_node(config, alone, address, "aggregated", aggregated=True)
            await cluster.start({"prefill": prefill, "decode": decode, "aggregated": aggregated})
            await story(Nodes(cluster, prefill, decode, alone.tokenizer))

    asyncio.run(main())


def test_whatever_is_asked_of_the_first_token(folder: Path) -> None:
    async def story(nodes: Nodes) -> None:
        asked: list[dict[str, Any]] = [
            {},
            {"temperature": 0.8, "seed": 3, "top_p": 0.9},
            {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
            {"logit_bias": {7: 100.0}, "stop_token_ids": (7,)},  # ends at token L, with a stop
            {"logit_bias": {7: 100.0}, "stop_token_ids": (7,), "min_tokens": 3},
            {"max_tokens": 1, "logprobs": 2},
            {"max_tokens": 2, "logprobs": 0},
        ]
        for i, sampling in enumerate(asked):
            for length in (1, 13, 30):
                prompt = random_prompt(length, 10 * i + length)
                alone, pair = await nodes.both(f"r{i}-{length}", prompt, **sampling)
                assert pair.tokens == alone.tokens
                for name in ("reason", "stop_string", "prompt_tokens", "output_tokens"):
                    assert getattr(pair.finished, name) == getattr(alone.finished, name)
                assert pair.prefill is not None
                ended = len(pair.tokens) == 1
                assert pair.prefill.reason == (pair.finished.reason if ended else "cut")
                if not ended:
                    assert pair.finished.transferred_tokens == length
        transfers, failures, _ = nodes.decode._transfers
        assert (transfers > 10, failures) == (True, 0)

    scenario(folder, story)


def test_a_stop_string_that_is_complete_with_token_l(folder: Path) -> None:
    async def story(nodes: Nodes) -> None:
        for seed in range(50):
            prompt = random_prompt(17, seed)
            alone, pair = await nodes.both(f"look-{seed}", prompt)
            text = nodes.tokenizer.decode(list(alone.tokens[:1]))
            if text.isascii() and text.isprintable() and text:
                break
        alone, pair = await nodes.both("stop", prompt, stop=(text,))
        assert pair.tokens == alone.tokens == alone.tokens[:1]
        assert pair.finished.reason == alone.finished.reason == "stop"
        assert pair.finished.stop_string == alone.finished.stop_string == text

    scenario(folder, story)


class Breaking(KvReceiver):
    """Fetches, and then every second transfer turns out to have failed; of the others a row is missing, or
    all rows and token L."""

    def __init__(self, like: KvReceiver) -> None:
        super().__init__(like.pools, like.fingerprint, like.config, transports=like.transports)
        self.count = 0

    async def fetch(
        self,
        ticket: KVTicket,
        want: Mapping[int, Mapping[int, int]],
        cut: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> FetchResult:
        result = await super().fetch(ticket, want, cut, on_progress)
        self.count += 1
        if self.count % 2:
            raise TransferFailed("scripted", final_upto=cut // 2)
        carry, extra = (result.carry[4:], result.extra) if self.count % 4 else (b"", b"?")
        return FetchResult(carry, extra, result.num_bytes, 0.0, 0.0, result.transport)


def test_broken_transfers_and_lost_rows_change_no_token(folder: Path) -> None:
    async def story(nodes: Nodes) -> None:
        nodes.decode.receiver = Breaking(nodes.decode.receiver)
        for i in range(8):
            sampling: dict[str, Any] = {} if i < 4 else {"temperature": 0.9, "seed": i}
            alone, pair = await nodes.both(f"r{i}", random_prompt(11 + 3 * i, i), **sampling)
            assert pair.tokens == alone.tokens
            assert pair.finished.output_tokens == COUNT
        assert nodes.decode._transfers[:2] == (8, 4)

    scenario(folder, story)
