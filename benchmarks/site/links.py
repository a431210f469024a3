"""Links to the repository, and the version, in files that cannot compute them: notebooks,
zensical.toml, CITATION.cff.

The URL is `Repository` in [project.urls] of pyproject.toml, the version `jaxlc.__version__`.
Without a URL there are no links, and the notebooks install a checkout in the directory jaxlc/, as
one that was uploaded to Colab.
"""

import json
import re
import tomllib
from pathlib import Path

import jaxlc

ROOT = Path(__file__).parents[2]
_GITHUB = "https://github.com/"
_BADGE_IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"
_BADGE = re.compile(r"^\[!\[Open in Colab\].*\n\n", re.MULTILINE)
_DEFAULT = r'(os\.environ\.get\("{name}", )"[^"]*"'


def repository() -> str:
    """The URL of the repository on GitHub; empty: it is not public."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository", "").rstrip("/")


def update() -> None:
    """Writes the links and the version to all files that have them."""
    for path, text in updated(repository()).items():
        path.write_text(text)


def updated(url: str) -> dict[Path, str]:
    """The files that have links or the version, and their texts for the repository at `url`."""
    texts = {path: _notebook(path, url) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    site, citation = ROOT / "zensical.toml", ROOT / "CITATION.cff"
    version = jaxlc.__version__
    texts[site] = _with_values(
        site, " = ", {"site_name": "jaxlc", "copyright": f"jaxlc {version}", "repo_url": url}
    )
    texts[citation] = _with_values(citation, ": ", {"version": version, "repository-code": url})
    return texts


def _notebook(path: Path, url: str) -> str:
    """The text of a notebook with a badge for Colab, and with the places of the package and of its
    data.
    """
    name = url.removeprefix(_GITHUB)
    target = f"https://colab.research.google.com/github/{name}/blob/main/notebooks/{path.name}"
    badge = f"[![Open in Colab]({_BADGE_IMAGE})]({target})"
    defaults = {
        "JAXLC_SOURCE": f"jaxlc[plot] @ git+{url}" if url else "./jaxlc[plot]",
        "JAXLC_DATA": f"https://raw.githubusercontent.com/{name}/main/notebooks/data"
        if url
        else "file:jaxlc/notebooks/data",
    }
    notebook = json.loads(path.read_text())
    for index, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if index == 0:
            source = _BADGE.sub("", source)
            source = source.replace("\n\n", f"\n\n{badge}\n\n", 1) if url else source
        for variable, default in defaults.items():
            source = re.sub(_DEFAULT.format(name=variable), rf'\g<1>"{default}"', source)
        cell["source"] = source.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _with_values(path: Path, separator: str, values: dict[str, str]) -> str:
    """The text of a file of lines `NAME SEPARATOR "VALUE"` with these values, in place of the lines
    that it has.

    A new line follows the one before it in `values`. An empty value removes the line.
    """
    text, before = path.read_text(), ""
    for name, value in values.items():
        line = f'{name}{separator}"{value}"\n' if value else ""
        pattern = rf"^{name}{re.escape(separator)}.*\n"
        if not re.search(pattern, text, re.MULTILINE):
            pattern = rf"(?<={re.escape(before)})"
        text = re.sub(pattern, line, text, count=1, flags=re.MULTILINE)
        before = line or before
    return text
