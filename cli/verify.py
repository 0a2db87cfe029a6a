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
        "--random-model",
        action="store_true",
        help="instead of a model: random hybrids (window, convolution, delta net, full), N = 1, 2, 4, 8",
    )
    add(
        "--schedules",
        type=positive_int,
        default=0,
        metavar="K",
        help="also run K random schedules: chunks, budgets, preemptions, hits, accept patterns, hand-overs; "
        "half of them on one engine (default: none)",
    )
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
    from cli.local_nodes import EngineFactory
    from cli.random_engines import SIZES, random_factory
    from cli.verification import verify
    from cli.verify_schedules import check_dtype, run_random_schedules
    from common.log import setup_logging

    config = config_from(args, ClusterConfig)
    setup_logging(config.log, process="verify")
    factories = (
        (random_factory(config, n) for n in SIZES) if args.random_model else iter([EngineFactory(config)])
    )
    reports = []
    for factory in factories:
        if args.schedules:
            check_dtype(factory.config)
        report = asyncio.run(
            verify(factory, args.prompts, args.output_len, args.seed, args.negative_control, args.handoff)
        )
        if args.schedules:
            run_random_schedules(factory, args.schedules, args.seed, report)
        if not args.json:
            print(report.describe(), flush=True)
        reports.append(report)
    ok = all(report.ok for report in reports)
    if args.json:
        told = [report.as_json() for report in reports]
        print(json.dumps({"ok": ok, "models": told} if args.random_model else told[0], indent=2))
    return 0 if ok else 1
