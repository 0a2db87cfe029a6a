"""`baton prefill`: one prefill node, until SIGTERM or Ctrl-C."""

import argparse

from cli.options import add_config, config_from
from prefill_node.config import PrefillConfig


def configure(parser: argparse.ArgumentParser) -> None:
    add_config(parser, PrefillConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args, PrefillConfig)
    from common import service
    from prefill_node.node import serve

    service.run(serve(config))
    return 0
