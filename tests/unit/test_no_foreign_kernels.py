"""Our package `kernels` has the name of a distribution that `transformers` imports when it is there."""

from importlib.metadata import distributions


def test_no_installed_distribution_is_called_kernels() -> None:
    names = {str(d.metadata["Name"]).lower() for d in distributions()}
    assert "kernels" not in names, (
        "uninstall it: `pip uninstall kernels`; our package of that name would shadow it"
    )
    assert "torch" in names  # the check does see what is installed
