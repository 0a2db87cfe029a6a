"""How much of a step is scheduler and block manager: CPU time per step with a runner that computes nothing.

Every request decodes with N = 4 drafts of which some are accepted, blocks fill up, are hashed, registered
and announced, as in real decoding. Reported per step and per request of the batch.

    python -m benchmarks.step_overhead [--batch 1,8,32,128] [--steps 200] [--json]
"""

import argparse
import json
import statistics
import time
from typing import Any

from common.block_hash import BlockHasher
from common.engine.batch import RequestOutput, RunnerOutput, ScheduledBatch
from common.engine.engine import Engine
from common.engine.rules import SchedulerConfig
from common.engine.scheduler import Scheduler
from common.engine.speculation import multi_module
from common.engine.stopping import StopChecker
from common.kv_cache.layout import build_layout
from common.kv_cache.manager import KVCacheManager
from common.request import Request, SamplingParams

NUM_MODULES = 4
BLOCK_SIZE = 16
PROMPT_LEN = 512
VOCAB = 32_000


class InstantRunner:
    """Accepts two of four drafts in every step; tokens are a running count, so no two blocks are equal."""

    def __init__(self) -> None:
        self._next = 0

    def run(self, batch: ScheduledBatch) -> RunnerOutput:
        outputs = []
        for entry in batch.entries:
            if not entry.samples:
                outputs.append(RequestOutput())
                continue
            accepted = min(2, len(entry.drafts))
            tokens = (*entry.drafts[:accepted], self._draw())
            drafts = tuple(self._draw() for _ in range(NUM_MODULES))
            outputs.append(RequestOutput(tokens, accepted, drafts))
        return RunnerOutput(tuple(outputs))

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        return None

    def _draw(self) -> int:
        self._next = (self._next + 1) % VOCAB
        return self._next


def make_engine(batch: int, max_len: int) -> Engine:
    layout = build_layout(
        [None] * 3 + [128],
        [None] * NUM_MODULES,
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
    )
    num_blocks = batch * (max_len // BLOCK_SIZE + 2) + 2
    kv = KVCacheManager(layout, [num_blocks] * len(layout.groups), BlockHasher(BLOCK_SIZE, NUM_MODULES))
    config = SchedulerConfig(8192, batch, max_len, multi_module(NUM_MODULES))
    return Engine(Scheduler(config, kv, lambda request: StopChecker(request)), InstantRunner())


def measure(batch: int, steps: int) -> dict[str, Any]:
    """CPU microseconds per decode step, scheduling and applying, events taken."""
    max_len = PROMPT_LEN + 3 * (steps + 16) + NUM_MODULES
    engine = make_engine(batch, max_len)
    for i in range(batch):
        prompt = [(i * 7919 + j * 31) % VOCAB for j in range(PROMPT_LEN)]
        engine.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=max_len, temperature=0.0)))
    while any(r.num_computed < PROMPT_LEN for r in engine.scheduler.requests.values()):
        engine.step()
    for _ in range(8):
        engine.step()
    times_us = []
    for _ in range(steps):
        start_ns = time.process_time_ns()
        engine.step()
        engine.take_events()
        times_us.append((time.process_time_ns() - start_ns) / 1000)
    median = statistics.median(times_us)
    return {
        "batch": batch,
        "median_us_per_step": median,
        "p99_us_per_step": sorted(times_us)[int(0.99 * len(times_us))],
        "median_us_per_request": median / batch,
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--batch", default="1,8,32,128", help="batch sizes, comma-separated")
    parser.add_argument("--steps", type=int, default=200, help="decode steps measured")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [measure(int(b), args.steps) for b in args.batch.split(",")]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print("| batch | us per step (median) | us per step (p99) | us per request and step |")
    print("| ---: | ---: | ---: | ---: |")
    for r in results:
        print(
            f"| {r['batch']} | {r['median_us_per_step']:.0f} | {r['p99_us_per_step']:.0f} "
            f"| {r['median_us_per_request']:.1f} |"
        )


if __name__ == "__main__":
    main()
