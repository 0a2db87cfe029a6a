"""`baton verify`: runs prompts on a prefill/decode pair and on one aggregated engine, and compares.

Four engines over the same weights: the pair, the aggregated oracle, and one without speculation. Greedy.
Compared: tokens (all), drafts at equal known tokens (pair and oracle), and the draft KV of both with one
uninterrupted pass (02-exactness 6). Where the two best logits lie closer than 1e-4 a difference is
reported and not counted. A negative control must fail, by orders of magnitude.
"""

import argparse
import asyncio
import json

from cli.local_config import ClusterConfig
from cli.number_types import positive_int
from cli.options import add_config, config_from
from router.config import HANDOFFS

CONTROLS = ("none", "carry", "lookahead")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=positive_int, default=32, help="prompts (default: %(default)s)")
    add("--output-len", type=positive_int, default=24, help="tokens of each answer (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    add(
        "--negative-control",
        choices=CONTROLS,
        default="none",
        help="break one rule on purpose; the comparison must then fail (exit code 1)",
    )
    add("--handoff", choices=HANDOFFS, default="backoff", help="hand-over of the pair (default: %(default)s)")
    add("--json", action="store_true", help="print the result as JSON")
    add_config(parser, ClusterConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cli.verification import verify
    from common.log import setup_logging

    config = config_from(args, ClusterConfig)
    setup_logging(config.log, process="verify")
    report = asyncio.run(
        verify(config, args.prompts, args.output_len, args.seed, args.negative_control, args.handoff)
    )
    print(json.dumps(report.as_json(), indent=2) if args.json else report.describe())
    return 0 if report.ok else 1
