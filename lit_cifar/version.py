"""The release of this package."""

__version__ = "0.1.0"  # pyproject.toml reads it here
