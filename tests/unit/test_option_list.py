"""The options of every process are pinned: a new one is a decision, seen in review.

Regenerate tests/data/options.txt with `python -m tests.unit.test_option_list`.
"""

from pathlib import Path

from cli.up_config import UpConfig
from common.config import option_names
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from router.config import RouterConfig

PINNED = Path(__file__).resolve().parents[1] / "data" / "options.txt"
CONFIGS: dict[str, type] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "up": UpConfig,
}


def option_list() -> str:
    """One line an option: `<command> <flag>`."""
    return "".join(f"{command} {flag}\n" for command, cls in CONFIGS.items() for flag in option_names(cls))


def test_option_list_is_the_pinned_one() -> None:
    pinned = PINNED.read_text(encoding="utf-8").splitlines()
    actual = option_list().splitlines()
    added, removed = sorted(set(actual) - set(pinned)), sorted(set(pinned) - set(actual))
    assert actual == pinned, (
        f"added {added}, removed {removed}; regenerate: python -m tests.unit.test_option_list"
    )


if __name__ == "__main__":
    PINNED.write_text(option_list(), encoding="utf-8")
