"""Extension of the API reference: sections of docstrings need no blank line before them, and pages become links."""

import re

import griffe

_PAGE = re.compile(r"docs/(\w+)\.md")
_SECTION = re.compile(r"(?<!\n)\n(?=(Args|Raises|Returns|Yields):\n)")


class DocstringSections(griffe.Extension):
    """Inserts the blank lines that griffe expects, and links to pages that are named as docs/NAME.md."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = _PAGE.sub(r"[\1](\1.md)", _SECTION.sub("\n\n", obj.docstring.value))
