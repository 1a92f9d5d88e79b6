"""The release of this package."""

__version__ = "0.2.0"  # pyproject.toml reads it here
