"""HTML for `_repr_html_`: tables and collapsible blocks, with inline styles only.

Notebook front ends remove <style> elements and block external resources. Text takes the color of the page and
backgrounds are transparent, so that the result is readable in light and dark themes.
"""

from collections.abc import Iterable, Sequence
from html import escape

_BORDER = "1px solid rgba(128,128,128,0.35)"
_CELL = "padding:2px 10px;background:transparent;color:currentColor;border:none;vertical-align:top"
_ALIGN = {"l": "left", "r": "right", "c": "center"}


def table(header: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str = "", align: str = "") -> str:
    """A <table> of escaped cells. None gives an empty cell; other objects are converted with `str`.

    Args:
      header: one heading per column; empty: no heading row.
      align: one letter per column, l, r or c; "": all left.
    Raises:
      ValueError: a row is longer or shorter than the header or `align`.
    """
    cells = [tuple(row) for row in rows]
    align = align or "l" * (len(header) or max(map(len, cells), default=0))
    lines = [_row("th", header, align, f"border-bottom:{_BORDER};font-weight:600")] if header else []
    lines += [_row("td", row, align, "font-variant-numeric:tabular-nums") for row in cells]
    title = f"<caption style='caption-side:top;text-align:left;{_CELL}'>{escape(caption)}</caption>" if caption else ""
    style = "border-collapse:collapse;border:none;font-size:13px;color:currentColor;margin:4px 0"
    return f"<table style='{style}'>{title}\n" + "\n".join(lines) + "\n</table>"


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


def _row(tag: str, cells: Sequence[object], align: str, style: str) -> str:
    parts = []
    for cell, letter in zip(cells, align, strict=True):
        text = "" if cell is None else escape(str(cell))
        parts.append(f"<{tag} style='{_CELL};{style};text-align:{_ALIGN[letter]}'>{text}</{tag}>")
    # JupyterLab shades every second row by default.
    return f"<tr style='background:transparent;border:none'>{''.join(parts)}</tr>"
