import re
from html.parser import HTMLParser

import pytest

from jaxlc.core import html


class Cells(HTMLParser):
    """The text of every cell, and a check that tags are closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.texts, self.styles = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)
        if tag in ("td", "th"):
            self.texts.append("")
            self.styles.append(dict(attrs)["style"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.texts[-1] += data


def test_table_cells_are_escaped_and_complete():
    text = html.table(("key", "<b>"), [("a & b", 3), (None, "<script>alert('x')</script>")], caption="C < D")
    cells = Cells(text)
    assert cells.texts == ["key", "<b>", "a & b", "3", "", "<script>alert('x')</script>"]
    assert "<script" not in text
    assert "C &lt; D" in text


def test_table_align_sets_each_column():
    cells = Cells(html.table(("a", "b"), [("x", 1)], align="lr"))
    assert [re.search(r"text-align:(\w+)", style)[1] for style in cells.styles] == ["left", "right"] * 2


def test_table_without_header_has_rows_only():
    assert Cells(html.table((), [("a", "b")])).texts == ["a", "b"]


@pytest.mark.parametrize("rows", [[("a",)], [("a", "b", "c")]])
def test_table_row_of_other_length_raises(rows):
    with pytest.raises(ValueError, match="argument 2 is"):
        html.table(("x", "y"), rows)


@pytest.mark.parametrize(
    "text",
    [
        html.table(("a",), [("b",)], caption="c"),
        html.details("more", html.table(("a",), [("b",)])),
        html.paragraph("a\nb <c>"),
        html.preformatted("a  b\n<c>"),
    ],
)
def test_html_has_no_resource_and_no_fixed_color(text):
    Cells(text)
    assert not re.search(r"https?:|src=|url\(|@import|<style|<script|<link", text)
    assert not re.search(r"[^-]color:(?!currentColor)|background:(?!transparent)|#[0-9a-fA-F]{3}", text)


def test_preformatted_keeps_spaces_and_newlines():
    assert "a  b\n&lt;c&gt;" in html.preformatted("a  b\n<c>")
