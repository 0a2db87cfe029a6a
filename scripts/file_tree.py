"""Writes the README's file tree from the modules' own first lines: `python -m scripts.file_tree` (`--check`).

A file that cannot be described in one line is two files; a description that lives in the file stays true.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FOLDERS = (
    "router", "prefill_node", "decode_node", "kv_transfer", "common", "common/engine", "common/kv_cache",
    "common/model", "kernels", "cli", "cli/schedules", "scripts", "examples", "benchmarks",
)  # fmt: skip
BEGIN, END = "<!-- tree: begin -->", "<!-- tree: end -->"


def first_line(path: Path) -> str:
    """What a file says it is: the first line of its docstring, or of a script's comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return next(line[2:] for line in text.splitlines() if line.startswith("# "))
    docstring = ast.get_docstring(ast.parse(text))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    paragraph = docstring.split("\n\n")[0]
    return paragraph.splitlines()[0]


def files(folder: str) -> list[Path]:
    paths = sorted((ROOT / folder).iterdir())
    shown = [
        p for p in paths if p.is_file() and (p.suffix == ".py" or (folder == "scripts" and not p.suffix))
    ]
    return [p for p in shown if p.stat().st_size]


def tree() -> str:
    """The tree as a fenced block."""
    lines = []
    for folder in FOLDERS:
        lines.append(f"{folder}/")
        lines += [f"    {p.name:<26}{first_line(p)}" for p in files(folder)]
    return "\n".join(["```", *lines, "```"])


def updated(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tree()}\n{END}{after}"


def main() -> int:
    readme = README.read_text(encoding="utf-8")
    new = updated(readme)
    if "--check" in sys.argv[1:]:
        return int(new != readme)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
