"""`baton generate "text"`: the answer on stdout as it comes, what speculation did on stderr.

Asks the router at `--url`; when none runs there, builds an engine in this process from the model and engine
options (`cli/generate_local.py`).
"""

import argparse
import asyncio
import sys
from typing import Any

from cli.local_config import EngineConfig
from cli.number_types import positive_int
from cli.options import add_config

DEFAULT_URL = "http://127.0.0.1:8000"


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", help="the question or text; `-` reads it from stdin")
    add("--url", default=None, help=f"router to ask; default: {DEFAULT_URL} if one runs there")
    add("--local", action="store_true", help="use an in-process engine even if a router runs")
    add("--raw", action="store_true", help="continue the text as it is, without the chat template")
    add("--max-tokens", type=positive_int, default=256, help="longest answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0: greedy (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="nucleus of the sampling (default: %(default)s)")
    add("--seed", type=int, default=None, help="makes a sampled answer reproducible")
    add_config(parser, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cli.client import CannotConnect

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    sampling: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
    }
    if args.seed is not None:
        sampling["seed"] = args.seed
    if not args.local:
        try:
            answer = asyncio.run(_ask(args, prompt, sampling))
        except CannotConnect:
            if args.url is not None:
                raise
            print(f"no router at {DEFAULT_URL}; using an engine in this process", file=sys.stderr)
        else:
            print(answer.describe(), file=sys.stderr)
            return 0
    from cli.generate_local import generate

    return generate(args, prompt, sampling)


async def _ask(args: argparse.Namespace, prompt: str, sampling: dict[str, Any]) -> Any:
    from cli.answer import ask
    from cli.client import open_client

    async with open_client(args.url or DEFAULT_URL) as client:
        return await ask(client, prompt, sampling, model=getattr(args, "model", ""), raw=args.raw)
