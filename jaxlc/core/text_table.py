"""Tables of plain text."""

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], align: str = "") -> list[str]:
    """One line per row, with columns of equal width.

    Args:
      align: one letter per column, l or r; "": the first column to the left, the others to the right.
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table)]
    align = align or "l" + "r" * (len(widths) - 1)
    pad = {"l": str.ljust, "r": str.rjust}
    padded = ([pad[letter](cell, width) for cell, letter, width in zip(row, align, widths)] for row in table)
    return ["  ".join(row).rstrip() for row in padded]
