"""`baton model list`: the models that Baton knows by name, and which of them are ready."""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import json

    from common.model.registry import list_models

    models = list_models()
    if args.json:
        fields = ("name", "description", "ready", "folder", "modules_folder")
        print(json.dumps([{f: getattr(m, f) for f in fields} for m in models], default=str, indent=2))
        return 0
    for m in models:
        print(f"{m.name:<24} {'ready' if m.ready else 'not prepared':<13} {m.description}")
        print(f"{'':<24} {m.folder}")
        if m.modules_folder is None:
            print(f"{'':<24} no MTP modules here: served without speculation")
    return 0
