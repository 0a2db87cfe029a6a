"""`baton model prepare NAME`: fetches, converts and checks a model, unless that is done already."""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name of `baton model list`, a checkpoint folder, or a hub id")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from common.model.registry import resolve_model

    files = resolve_model(args.model)
    print(f"{files.name} is in {files.folder}")
    print(f"MTP modules: {files.modules_folder or 'none; it is served without speculation'}")
    return 0
