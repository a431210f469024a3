"""Collects the pages of the site: README.md (its start), docs/, notebooks/, benchmarks/, and the
project's own pages.

Pages stay where they are in the repository, with links that work there. Here their links are
rewritten to the places of the pages on the site. The reference pages end with text that is
generated from the code and stored in the repository.
"""

import functools
import os
import re
import shutil
from pathlib import Path

from benchmarks import support_table
from benchmarks.site import api, notebook_page, reference

ROOT = Path(__file__).parents[2]
_COPIED = (".css", ".jsonl", ".png", ".svg", ".txt")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_BADGE = re.compile(r"^\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)\n", re.MULTILINE)
_COMMENT = re.compile(r"^ *<!-- (not )?run: .*? -->\n", re.MULTILINE)
_GENERATED = {
    "api.md": api.text,
    "config.md": reference.settings,
    "other_programs.md": reference.other_names_table,
    "plan_fields.md": reference.plan_fields,
    "support.md": support_table.tables,
}
_MARKER = "<!-- generated from the code: `make reference` writes what follows -->\n"


def write(target: Path) -> None:
    """Writes all pages and the files that they show or link to.

    Raises:
      ValueError: a link to a file that does not exist.
    """
    for source, page in sources().items():
        path = target / page
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            text = notebook_page.markdown(source, path)
        elif source.suffix == ".md":
            text = source.read_text()
        else:
            shutil.copyfile(source, path)
            continue
        path.write_text(page_text(text, source))


def reference_pages() -> dict[Path, str]:
    """The pages of docs/ that are generated from the code, and their texts, whose introduction is
    written by hand.
    """
    pages = {ROOT / "docs" / name: generate for name, generate in _GENERATED.items()}
    return {
        path: f"{path.read_text().partition(_MARKER)[0]}{_MARKER}\n{generate().strip()}\n"
        for path, generate in pages.items()
    }


@functools.cache
def sources() -> dict[Path, str]:
    """Files of the repository -> their paths on the site."""
    paths = {ROOT / "README.md": "index.md"}
    paths |= {
        ROOT / f"{name}.md": f"{name.lower()}.md"
        for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")
    }
    for folder in ("docs", "notebooks", "benchmarks"):
        top = ROOT if folder != "docs" else ROOT / "docs"
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (*_COPIED, ".md", ".ipynb"):
                name = "index.md" if path.name == "README.md" else path.name
                paths[path] = str((path.parent / name).relative_to(top)).replace(".ipynb", ".md")
    return paths


def page_text(text: str, source: Path) -> str:
    """The text of a page of the repository, with the links of the site.

    Args:
      source: its file, to which links are relative.
    """
    text = _COMMENT.sub("", _BADGE.sub("", text.replace(_MARKER, "")))
    parts = _FENCE.split(text)  # text, fence, text, ...
    return "".join(
        part if index % 2 else _with_site_links(part, source) for index, part in enumerate(parts)
    )


def _with_site_links(text: str, source: Path) -> str:
    return _LINK.sub(lambda link: _site_link(link, source), text)


def _is_external(target: str) -> bool:
    return re.match(r"(https?|mailto):|#", target) is not None


def _site_link(link: re.Match, source: Path) -> str:
    """A link of a page as it is on the site; a file that is not on the site is named in
    parentheses.
    """
    if _is_external(link["target"]):
        return link.group()
    path, _, anchor = link["target"].partition("#")
    file = (source.parent / path).resolve()
    places = sources()
    if file not in places:
        if not file.exists():
            raise ValueError(f"{source.name} links to {link['target']}, which does not exist")
        name = f"`{file.relative_to(ROOT)}`"
        return name if link["text"].strip("`/") in name else f"{link['text']} ({name})"
    here = places.get(source, "")
    target = os.path.relpath(places[file], os.path.dirname(here) or ".")
    return f"{link['image']}[{link['text']}]({target}{'#' + anchor if anchor else ''})"
