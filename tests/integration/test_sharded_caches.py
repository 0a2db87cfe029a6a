"""Head-sharded caches, each rank a process: the ranks of a decode node fetch from those of a prefill node."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from kv_transfer.geometry import sources
from tests.fakes_sharded import ids_of, make_pools

ROOT = Path(__file__).resolve().parents[2]


class Rank:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, role: str, *numbers: int) -> "Rank":
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.sharded_peer", role, *map(str, numbers),
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return cls(process)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def answer(self) -> object:
        assert self.process.stdout is not None
        return json.loads(await self.process.stdout.readline())

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.mark.parametrize(
    ("heads", "p_size", "p_block", "d_size", "d_block"),
    [(8, 4, 16, 2, 32), (2, 2, 32, 4, 16), (1, 4, 16, 1, 16)],
)
def test_ranks_of_processes_fetch_every_head_once(
    heads: int, p_size: int, p_block: int, d_size: int, d_block: int
) -> None:
    async def story() -> None:
        p_ranks = [await Rank.start("prefill", p_block, heads, r, p_size) for r in range(p_size)]
        d_ranks = [await Rank.start("decode", d_block, heads, r, d_size) for r in range(d_size)]
        try:
            names: list[list[str]] = [[] for _ in p_ranks]
            for r, rank in enumerate(d_ranks):
                tickets = []
                for source in sources(heads, p_size, r, d_size):
                    names[source].append(f"t{r}")
                    p_ranks[source].tell(f"t{r}")
                    tickets.append(await p_ranks[source].answer())
                rank.tell(json.dumps(tickets))
            for rank in p_ranks:
                rank.tell("")
            for r, rank in enumerate(d_ranks):
                groups = make_pools(d_block, heads, r, d_size).groups[:2]
                whole = sum(len(ids_of(d_block, 1)) * group.block_bytes for group in groups)
                assert await rank.answer() == whole  # after it has compared every token
            for rank, mine in zip(p_ranks, names, strict=True):
                assert await rank.answer() == [f"{name} committed" for name in mine]
            for rank in p_ranks + d_ranks:
                assert await rank.process.wait() == 0
        finally:
            for rank in p_ranks + d_ranks:
                await rank.end()

    async def bounded() -> None:
        async with asyncio.timeout(40):
            await story()

    asyncio.run(bounded())
