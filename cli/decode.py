"""`baton decode`: one decode node, until SIGTERM or Ctrl-C."""

import argparse

from cli.options import add_config, config_from
from decode_node.config import DecodeConfig


def configure(parser: argparse.ArgumentParser) -> None:
    add_config(parser, DecodeConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args, DecodeConfig)
    from common import service
    from decode_node.node import serve

    service.run(serve(config))
    return 0
