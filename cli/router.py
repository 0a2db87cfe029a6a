"""`baton router`: one router process, until SIGTERM or Ctrl-C. Imports no torch."""

import argparse

from cli.options import add_config, config_from
from router.config import RouterConfig


def configure(parser: argparse.ArgumentParser) -> None:
    add_config(parser, RouterConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args, RouterConfig)
    from common import service
    from router.server import serve

    service.run(serve(config))
    return 0
