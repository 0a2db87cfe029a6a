"""`baton bench arms`: the same prompts, one run, with and without speculation and hand-over.

Arms: no speculation; MTP on one aggregated node; MTP on a prefill/decode pair, with either hand-over; and
that pair as others run it, with the prompt cut on P and no carry. All arms share one process and one set of
weights and take turns prompt by prompt, so that a busy machine is busy for all of them.
"""

import argparse
import asyncio
import json
from pathlib import Path

from cli.local_config import ClusterConfig
from cli.number_types import positive_int
from cli.options import add_config, config_from


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-prompts", type=positive_int, default=16, help="prompts (default: %(default)s)")
    add("--output-len", type=positive_int, default=64, help="tokens of each answer (default: %(default)s)")
    add("--concurrency", type=positive_int, default=1, help="requests in flight (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0: greedy; else seeded sampling (default: 0)")
    add(
        "--prompts",
        type=Path,
        default=None,
        metavar="FILE",
        help="one prompt a line, .jsonl with `prompt` (text or token ids), or .json with `prompts`; "
        "default: sentences of our own (as chat questions where the model has a chat template)",
    )
    add("--seed", type=int, default=0, help="seed of the prompts and of sampling (default: %(default)s)")
    add("--json", action="store_true", help="print the result as JSON")
    add_config(parser, ClusterConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cli.arms import ArmsRun, describe, run_arms
    from common.log import setup_logging

    config = config_from(args, ClusterConfig)
    setup_logging(config.log, process="arms")
    plan = ArmsRun(
        args.num_prompts, args.output_len, args.concurrency, args.temperature, args.seed, args.prompts
    )
    result = asyncio.run(run_arms(config, plan))
    print(json.dumps(result, indent=2) if args.json else describe(result))
    return 0
