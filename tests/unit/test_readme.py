"""The README's file tree is what the files say of themselves."""

from scripts.file_tree import README, updated


def test_file_tree_is_up_to_date() -> None:
    readme = README.read_text(encoding="utf-8")
    assert updated(readme) == readme, "run `python -m scripts.file_tree`"
