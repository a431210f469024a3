import re
from html.parser import HTMLParser

import pytest

from jaxlc.core import text as html


class Tags(HTMLParser):
    """Checks that tags are closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_table_is_escaped_and_aligned():
    text = html.table(
        ("key", "<b>"), [("a & b", 3), (None, "<script>")], caption="C < D", align="lr"
    )
    lines = ["C &lt; D", "key         &lt;b&gt;", "a &amp; b         3", "       &lt;script&gt;"]
    assert text.partition(">")[2].removesuffix("</pre>").splitlines() == lines


def test_table_without_header_has_rows_only():
    assert ">a  b</pre>" in html.table((), [("a", "b")])


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
    Tags(text)
    assert not re.search(r"https?:|src=|url\(|@import|<style|<script|<link", text)
    assert not re.search(
        r"[^-]color:(?!currentColor)|background:(?!transparent)|#[0-9a-fA-F]{3}", text
    )


def test_preformatted_keeps_spaces_and_newlines():
    assert "a  b\n&lt;c&gt;" in html.preformatted("a  b\n<c>")
