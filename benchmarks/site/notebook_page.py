"""A notebook as a Markdown page, with its stored outputs; nothing is executed."""

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

_INSTALL = "JAXLC_SOURCE"  # in the cell that installs jaxlc where it is missing


def markdown(notebook: Path, page: Path) -> str:
    """The text of the page. Pictures are written next to it, as NAME-1.png and so on.

    Args:
      page: path of the page.
    """
    cells = json.loads(notebook.read_text())["cells"]
    pictures = iter(range(1, 1000))
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif _INSTALL in source:
            text = _one_line(f"<pre><code>{html.escape(source)}</code></pre>")
            parts.append(f"<details><summary>Installation</summary>{text}</details>")
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output, page, pictures) for output in cell["outputs"]]
    return "\n\n".join(filter(None, parts)) + "\n"


def _output(output: dict[str, Any], page: Path, pictures: Any) -> str:
    if output["output_type"] == "stream":
        return _text_block("".join(output["text"]))
    data = output["data"]
    if "image/png" in data:
        picture = page.with_name(f"{page.stem}-{next(pictures)}.png")
        picture.write_bytes(base64.b64decode("".join(data["image/png"])))
        return f'<img alt="output of the cell above" src="{picture.name}">'
    if "text/html" in data:
        return f'<div class="notebook-output">{_one_line("".join(data["text/html"]))}</div>'
    return _text_block("".join(data["text/plain"]))


def _text_block(text: str) -> str:
    """A block of plain text, without the codes of terminals for colors."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).rstrip("\n")
    return f"```text\n{text}\n```" if text else ""


def _one_line(text: str) -> str:
    """HTML without line breaks, which would end it in Markdown; those of preformatted text become
    references.
    """
    parts = re.split(r"(<pre.*?</pre>)", text, flags=re.DOTALL)
    return "".join(
        part.replace("\n", "&#10;" if index % 2 else " ") for index, part in enumerate(parts)
    )
