"""Counts, sizes and tables as they are displayed."""

from collections.abc import Iterable, Sequence


def count_text(number: int, noun: str, plural_ending: str = "s") -> str:
    """A count with its noun: "1 GPU", "1,024 GPUs", or "2 processes" with the ending "es"."""
    return f"{number:,} {noun}{'' if number == 1 else plural_ending}"


def gib(num_bytes: float) -> str:
    """Bytes in GiB with two decimals, without the unit."""
    return f"{num_bytes / 2**30:,.2f}"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns with their widths; the first one is left-aligned, the others right-aligned."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in table
    ]
