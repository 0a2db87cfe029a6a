"""The version, in the one place that packaging, CLI and chart read."""

__version__ = "0.1.0"
