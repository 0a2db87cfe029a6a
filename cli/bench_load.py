"""`baton bench load`: closed-loop load on a running router (or anything that speaks the same API).

`--concurrency` requests are always in flight until `--num-requests` are answered. Prompts, sampling seeds and
order depend on `--seed` alone. What it measures is defined in `cli/bench_stats.py`.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.number_types import positive_int
from common.errors import BatonError

WARMUP_PROMPT = "This request is not counted."


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="base URL of the server (default: %(default)s)")
    add("--model", default=None, help="model name in the requests; default: the first that the server lists")
    add("--concurrency", type=positive_int, default=1, help="requests in flight (default: %(default)s)")
    add("--num-requests", type=positive_int, default=16, help="requests in all (default: %(default)s)")
    add(
        "--input-len",
        type=positive_int,
        default=128,
        help="prompt tokens, without --prompts (default: %(default)s)",
    )
    add("--output-len", type=positive_int, default=64, help="tokens to generate (default: %(default)s)")
    add(
        "--prompts",
        type=Path,
        default=None,
        metavar="FILE",
        help="one prompt a line, or .jsonl with `prompt`",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="sampling temperature; 0: greedy (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="seed of the prompts and of sampling (default: %(default)s)")
    add(
        "--stop-at-eos",
        action="store_true",
        help="let answers end early; default: always --output-len tokens",
    )
    add(
        "--warmup",
        type=int,
        default=1,
        help="requests that are sent first and not counted (default: %(default)s)",
    )
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cli.bench_stats import summarize, table

    timings = asyncio.run(measure(args))
    summary = summarize(timings)
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "run"}
        print(json.dumps({"settings": settings, **summary}, indent=2))
    else:
        print(table(summary))
    return 1 if summary["failed"] else 0


async def measure(args: argparse.Namespace) -> list[Any]:
    """Sends all requests; a `Timing` each, in the order of the prompts."""
    from tqdm import tqdm

    from cli.client import get_json, open_client

    async with open_client(args.url, max_connections=args.concurrency + 1) as client:
        model = args.model or (await get_json(client, "/v1/models"))["data"][0]["id"]
        prompts = await _prompts(client, args, model)
        bodies = [_body(args, model, prompt, i) for i, prompt in enumerate(prompts)]
        for i in range(args.warmup):
            await _one(client, {**bodies[i % len(bodies)], "prompt": WARMUP_PROMPT})
        gate = asyncio.Semaphore(args.concurrency)
        with tqdm(total=len(bodies), unit="request", disable=None, file=sys.stderr) as bar:

            async def send(body: dict[str, Any]) -> Any:
                async with gate:
                    timing = await _one(client, body)
                bar.update()
                return timing

            return await asyncio.gather(*(send(body) for body in bodies))


def _body(args: argparse.Namespace, model: str, prompt: str | list[int], index: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": args.output_len,
        "temperature": args.temperature,
        "seed": args.seed + index,
        "ignore_eos": not args.stop_at_eos,
    }


async def _one(client: Any, body: dict[str, Any]) -> Any:
    """One request; its failure is part of the result, not the end of the run."""
    from cli.acceptance import Acceptance
    from cli.bench_stats import Timing
    from cli.client import stream, text_of

    start_s = time.perf_counter()
    chunk_times_s: list[float] = []
    usage: dict[str, Any] = {}
    try:
        async for chunk in stream(client, "/v1/completions", body):
            if text_of(chunk):
                chunk_times_s.append(time.perf_counter())
            usage = chunk.get("usage") or usage
    except BatonError as error:
        return Timing(start_s, time.perf_counter(), error=error.message)
    return Timing(
        start_s=start_s,
        end_s=time.perf_counter(),
        chunk_times_s=tuple(chunk_times_s),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        output_tokens=usage.get("completion_tokens", 0),
        acceptance=Acceptance.from_usage(usage),
    )


async def _prompts(client: Any, args: argparse.Namespace, model: str) -> Sequence[str | list[int]]:
    from cli.bench_prompts import CHARACTERS_PER_TOKEN, read_prompts, shuffled_text

    if args.prompts is not None:
        prompts = read_prompts(args.prompts)
        return [prompts[i % len(prompts)] for i in range(args.num_requests)]
    rng = random.Random(args.seed)
    num_characters = CHARACTERS_PER_TOKEN * args.input_len * 2  # more than enough tokens, then cut
    texts = [shuffled_text(rng, num_characters) for _ in range(args.num_requests)]
    return [await _cut(client, model, text, args.input_len) for text in texts]


async def _cut(client: Any, model: str, text: str, num_tokens: int) -> str | list[int]:
    """The first ``num_tokens`` tokens of ``text``, by the server's own tokenizer where it offers one."""
    response = await client.post("/tokenize", json={"model": model, "prompt": text})
    if response.status_code == 200:
        return [int(token) for token in response.json()["tokens"][:num_tokens]]
    return text[: len(text) // 2].rsplit(" ", 1)[0]  # without one: about as many
