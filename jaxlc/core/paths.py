"""Paths as they are displayed."""

from pathlib import Path


def displayed(path: Path) -> Path:
    """An absolute path relative to the working directory, if it is below it; other paths unchanged."""
    directory = Path.cwd()
    return path.relative_to(directory) if path.is_relative_to(directory) else path
