"""HTML for `_repr_html_`: text tables and collapsible blocks, with inline styles only.

Notebook front ends remove <style> elements and block external resources. Text takes the color of the page and
backgrounds are transparent, so that the result is readable in light and dark themes.
"""

from collections.abc import Iterable, Sequence
from html import escape

from jaxlc.core.text import aligned


def table(header: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str = "", align: str = "") -> str:
    """The table that a terminal shows, in a fixed-width font.

    Args:
      header: one heading per column; empty: no heading row.
      rows: cells; None is an empty one, and other objects are converted with `str`.
      align: one letter per column, l or r; "": all left.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in (header, *rows) if row]
    lines = aligned(cells, align or "l" * len(cells[0]))
    return preformatted("\n".join([caption, *lines] if caption else lines))


def details(summary: str, body: str, *, is_open: bool = False) -> str:
    """A collapsible block. `body` is HTML; `summary` is text and is escaped."""
    opened = " open" if is_open else ""
    return f"<details{opened}><summary style='cursor:pointer'>{escape(summary)}</summary>\n{body}\n</details>"


def paragraph(text: str, *, before: str = "") -> str:
    """Escaped text, after the HTML in `before`; newlines become line breaks."""
    return f"<div style='color:currentColor;margin:4px 0'>{before}{escape(text).replace(chr(10), '<br>')}</div>"


def preformatted(text: str) -> str:
    """Escaped text in a fixed-width font, with its spaces and newlines."""
    style = "background:transparent;color:currentColor;font-size:12px;line-height:1.35;margin:4px 0;white-space:pre"
    return f"<pre style='{style};overflow-x:auto'>{escape(text)}</pre>"
