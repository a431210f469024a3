"""llms.txt and the plain text of all pages (llmstxt.org): the Markdown of the site without pictures and HTML."""

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

_DIRECTIVE = re.compile(r"^::: (?P<name>[\w.]+)(\n {4}.*)*$", re.MULTILINE)


def write(pages: Path, target: Path) -> None:
    """Writes the pages of the navigation below `target`, with the index llms.txt and all text in llms-full.txt.

    Raises:
      ValueError: a page is missing from the navigation of zensical.toml.
    """
    project = tomllib.loads((Path(__file__).parents[2] / "zensical.toml").read_text())["project"]
    names = {str(path.relative_to(pages)) for path in sorted(pages.rglob("*.md"))}
    index, full = [f"# {project['site_name']}", "", f"> {project['site_description']}"], []
    for section, entries in _sections(project["nav"]):
        index += ["", f"## {section}", ""]
        for name in (*entries, *_neighbors(entries, pages)):
            text = _plain((pages / name).read_text())
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            index.append(f"- [{_title(text)}]({name}): {_purpose(text)}")
            full.append(text)
            names.discard(name)
    if names:
        raise ValueError(f"pages that zensical.toml does not list: {', '.join(sorted(names))}")
    (target / "llms.txt").write_text("\n".join(index) + "\n")
    (target / "llms-full.txt").write_text("\n\n".join(full))


def _sections(nav: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The sections of the navigation, with the pages below them; a page at the top is a section of its own."""
    return [(title, list(_pages(value))) for entry in nav for title, value in entry.items()]


def _neighbors(entries: list[str], pages: Path) -> list[str]:
    """Pages in the folder of an index.md among `entries`, which lists them: dated pages need no entry of their own."""
    folders = [pages / Path(name).parent for name in entries if "/" in name and Path(name).name == "index.md"]
    names = [str(path.relative_to(pages)) for folder in folders for path in sorted(folder.glob("*.md"))]
    return [name for name in names if name not in entries]


def _pages(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [page for entry in value for page in _pages(list(entry.values())[0] if isinstance(entry, dict) else entry)]


def _plain(text: str) -> str:
    """Markdown without pictures, HTML and comments, and with the docstrings in place of directives."""
    text = _DIRECTIVE.sub(lambda match: _docstring(match["name"]), text)
    text = re.sub(r'^<(div class="notebook-output"|img ).*$', "", text, flags=re.MULTILINE)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)).strip() + "\n"


def _docstring(name: str) -> str:
    """Name, signature and docstring of an object of the API."""
    module, _, attribute = name.rpartition(".")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:  # a method
        owner, _, kind = module.rpartition(".")
        value = getattr(getattr(importlib.import_module(owner), kind), attribute)
    return f"## {name}{inspect.signature(value)}\n\n{inspect.getdoc(value)}"


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").replace("`", "")


def _purpose(text: str) -> str:
    """The first sentence below the title."""
    first = text.split("\n\n")[1] if "\n\n" in text else ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    return re.split(r"(?<=\.)\s", plain)[0]
