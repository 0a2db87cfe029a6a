"""The front door: `baton <command>`.

One file a command. A command's module is imported only when that command is chosen, and imports what it
needs only when it runs, so `baton --help` is quick and needs no torch. Such a module has `configure(parser)`,
which adds its flags and sets `run`: a function from the parsed arguments to an exit code.

Exit codes: 0 done, 1 failed, 2 wrong input (an unusable model or peer included), 130 interrupted.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from common.errors import BatonError, ConfigError, IncompatiblePeer, ModelLoadError, RequestError
from common.version import __version__

COMMANDS: dict[str, tuple[str, str]] = {  # name: (module, one line of help)
    "up": ("cli.up", "router, prefill and decode nodes on this machine, supervised"),
    "router": ("cli.router", "one router process: the OpenAI-compatible HTTP service"),
    "prefill": ("cli.prefill", "one prefill node"),
    "decode": ("cli.decode", "one decode node"),
    "generate": ("cli.generate", "answer one prompt and show what speculation did"),
    "bench load": ("cli.bench_load", "load generator against a URL: TTFT, TPOT, ITL, tokens/s, acceptance"),
    "bench arms": ("cli.bench_arms", "the same prompts with and without speculation and hand-over"),
    "verify": ("cli.verify", "compare a prefill/decode pair with one engine: tokens, drafts, draft KV"),
    "model prepare": ("cli.model_prepare", "fetch, convert and check a model into the cache"),
    "model list": ("cli.model_list", "models that come with Baton, and what the cache holds"),
    "events": ("cli.events", "follow a node's KV events"),
    "doctor": ("cli.doctor", "what this machine can run"),
}
GROUPS = {"bench": "measurements", "model": "models: prepare, list"}
WRONG_INPUT = (ConfigError, RequestError, ModelLoadError, IncompatiblePeer)
HIDDEN_COMMANDS = {"demo": ("cli.demo", "")}  # what scripts/demo runs


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a whole command line; `run(args)` of the result executes it. Wrong flags exit with code 2."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serves language models on separate prefill and decode nodes."
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    groups: dict[str, Any] = {}
    words = [word for word in argv if not word.startswith("-")]
    hidden = {name: entry for name, entry in HIDDEN_COMMANDS.items() if [name] == words[:1]}
    for name, (module, help_line) in (COMMANDS | hidden).items():
        *group, last = name.split()
        if group and group[0] not in groups:
            group_parser = commands.add_parser(group[0], help=GROUPS[group[0]], description=GROUPS[group[0]])
            groups[group[0]] = group_parser.add_subparsers(dest="subcommand", metavar="what", required=True)
        siblings = groups[group[0]] if group else commands
        command = siblings.add_parser(last, help=help_line, description=help_line, allow_abbrev=False)
        if name.split() == words[: len(name.split())]:
            importlib.import_module(module).configure(command)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; an expected error becomes one line on stderr."""
    try:
        _end_with_supervisor()
        args = parse(sys.argv[1:] if argv is None else argv)
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left (`baton ... | head`): nothing to report
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, WRONG_INPUT) else 1


def _end_with_supervisor() -> None:
    """Started by `baton up`: the kernel kills this process when the supervisor is gone, however it went.

    The process asks for itself, not the supervisor between fork and exec; the check afterwards covers a
    supervisor that died before we asked.
    """
    supervisor = os.environ.pop("BATON_SUPERVISOR_PID", None)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    import ctypes
    import signal

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
