"""CPU time to hash the blocks of one long prompt, with and without lookahead.

    python benchmarks/hashing.py [--tokens 32769] [--rounds 15] [--json]

Thread CPU time of one call, milliseconds: minimum and median over rounds in which all settings take turns
in an order of their own, so that a busy machine hits them alike. What lookahead costs is the median of the
rounds' ratios. vLLM's hasher runs in the same rounds where it is installed.
"""

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from common.block_hash import ALGORITHMS, BlockHasher

BLOCK_SIZES = (16, 128, 1024)
LOOKAHEADS = (0, 1, 4, 8)


@dataclass(frozen=True)
class Result:
    hasher: str
    block_size: int
    num_lookahead: int
    num_blocks: int
    min_cpu_ms: float
    median_cpu_ms: float
    ratio: float  # median over rounds of this setting's time to the one without lookahead


Setting = tuple[str, int, int]  # hasher, block size, lookahead
HashPrompt = Callable[[], int]  # hashes the prompt once, returns the number of blocks


def our_settings(token_ids: list[int]) -> dict[Setting, HashPrompt]:
    return {
        (algorithm, block_size, num_lookahead): partial(
            hash_prompt, BlockHasher(block_size, num_lookahead, algorithm), token_ids
        )
        for algorithm in ALGORITHMS
        for block_size in BLOCK_SIZES
        for num_lookahead in LOOKAHEADS
    }


def hash_prompt(hasher: BlockHasher, token_ids: list[int]) -> int:
    hashes: list[bytes] = []
    hasher.extend(hashes, token_ids)
    return len(hashes)


def peer_settings(token_ids: list[int]) -> dict[Setting, HashPrompt]:
    """vLLM's request hasher, if it can be imported; it has no lookahead before 0.33."""
    os.environ.setdefault("PYTHONHASHSEED", "0")
    try:
        from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
        from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
        from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]
        from vllm.v1.request import Request  # type: ignore[import-not-found]
    except ImportError:
        return {}
    settings: dict[Setting, HashPrompt] = {}
    request = Request(
        request_id="r",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=None,
    )
    for algorithm in ("sha256", "sha256_cbor"):
        function = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(function)
        for block_size in BLOCK_SIZES:
            hasher = kv_cache_utils.get_request_block_hasher(block_size, function)
            settings[(f"vLLM {algorithm}", block_size, 0)] = partial(_count, hasher, request)
    return settings


def _count(hasher: Callable[[object], list[bytes]], request: object) -> int:
    return len(hasher(request))


def measure(settings: dict[Setting, HashPrompt], rounds: int) -> list[Result]:
    cpu_ms: dict[Setting, list[float]] = {setting: [] for setting in settings}
    num_blocks = {setting: call() for setting, call in settings.items()}  # also warms up
    gc.collect()
    gc.disable()
    order = list(settings.items())
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for setting, call in order:
            started = time.thread_time_ns()
            call()
            cpu_ms[setting].append((time.thread_time_ns() - started) / 1e6)
    gc.enable()
    results = []
    for (hasher, block_size, k), times in cpu_ms.items():
        plain = cpu_ms[hasher, block_size, 0]
        ratio = statistics.median(t / p for t, p in zip(times, plain, strict=True))
        results.append(
            Result(
                hasher,
                block_size,
                k,
                num_blocks[hasher, block_size, k],
                round(min(times), 3),
                round(statistics.median(times), 3),
                round(ratio, 3),
            )
        )
    return results


def table(results: Sequence[Result]) -> str:
    """Markdown: a row a hasher and lookahead, a column a block size: minimum (median, ratio to k = 0)."""
    rows = ["| hasher | k | " + " | ".join(f"B = {size}" for size in BLOCK_SIZES) + " |"]
    rows.append("| --- | --- |" + " --- |" * len(BLOCK_SIZES))
    cells = {(r.hasher, r.num_lookahead, r.block_size): r for r in results}
    for hasher, num_lookahead in dict.fromkeys((r.hasher, r.num_lookahead) for r in results):
        found = [cells[(hasher, num_lookahead, size)] for size in BLOCK_SIZES]
        values = " | ".join(f"{r.min_cpu_ms:.2f} ({r.median_cpu_ms:.2f}, {r.ratio:.2f})" for r in found)
        rows.append(f"| `{hasher}` | {num_lookahead} | {values} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of block hashing.")
    parser.add_argument("--tokens", type=int, default=32_769, help="length of the prompt")
    parser.add_argument("--rounds", type=int, default=15, help="repeats of each setting")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    source = random.Random(0)
    token_ids = [source.randrange(150_000) for _ in range(arguments.tokens)]
    results = measure(our_settings(token_ids) | peer_settings(token_ids), arguments.rounds)
    print(json.dumps([asdict(result) for result in results]) if arguments.json else table(results))


if __name__ == "__main__":
    main()
