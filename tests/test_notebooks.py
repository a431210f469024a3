"""Notebooks in notebooks/: they run without errors and warnings, and what is stored in git is small and complete."""

import os
import re
import shutil
import socket
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000
CELL_TIMEOUT_SECONDS = 300
# The first code cell of every notebook, for Colab; it does nothing where jaxlc is installed.
INSTALL_CELL = """\
import importlib.util
import os
import subprocess
import sys

# There is no release yet: put the owner of your fork here, or set JAXLC_SOURCE="PATH_OF_A_WHEEL[plot]".
JAXLC = os.environ.get("JAXLC_SOURCE", "jaxlc[plot] @ git+https://github.com/OWNER/jaxlc")
if importlib.util.find_spec("jaxlc") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", JAXLC], check=True)"""
BADGE = "https://colab.research.google.com/github/OWNER/jaxlc/blob/main/notebooks/{name}"
PRIVATE = re.compile(r"(?<![\w.:/<~-])/[\w.-]+/[\w.-]|0x[0-9a-f]{6,}")  # an absolute path, or an address in memory
HOSTNAME = re.compile(rf"\b{re.escape(socket.gethostname())}\b")  # a short one may be a part of a word

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def output_kinds(cell: nbformat.NotebookNode) -> list[tuple]:
    """The kind of each output, with consecutive streams as one: how they are split depends on timing."""
    kinds: list[tuple] = []
    for output in cell.outputs:
        kind = ("stream", output.name) if output.output_type == "stream" else ("display", *sorted(output.data))
        if kind[0] != "stream" or kinds[-1:] != [kind]:
            kinds.append(kind)
    return kinds


def test_notebooks_exist_and_are_listed_in_the_readme():
    assert NOTEBOOKS
    text = (ROOT / "notebooks" / "README.md").read_text()
    assert {path.name for path in NOTEBOOKS} == set(re.findall(r"\]\((\w+\.ipynb)\)", text))


@notebooks
def test_notebook_runs_without_error_and_stderr(path, tmp_path):
    directory = tmp_path / "notebooks"
    shutil.copytree(path.parent, directory)
    stored, notebook = read(path), read(directory / path.name)
    # The environment of a user, without the variables of tests/conftest.py.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    environment["PYTHONPATH"] = str(ROOT)
    client = nbclient.NotebookClient(
        notebook, timeout=CELL_TIMEOUT_SECONDS, resources={"metadata": {"path": str(directory)}}
    )
    client.execute(env=environment)
    for cell, stored_cell in zip(code_cells(notebook), code_cells(stored), strict=True):
        errors = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        assert errors == [], cell.source
        assert output_kinds(stored_cell) == output_kinds(cell), f"run `make notebooks`: {cell.source}"


@notebooks
def test_notebook_starts_with_badge_and_install_cell(path):
    first, second = read(path).cells[:2]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert BADGE.format(name=path.name) in first.source
    for machine in ("CPU", "T4", "H100"):
        assert machine in first.source
    assert (second.cell_type, second.source) == ("code", INSTALL_CELL)


@notebooks
def test_notebook_file_is_small_and_has_no_private_text(path):
    assert path.stat().st_size <= MAX_BYTES
    notebook = read(path)
    assert notebook.metadata.keys() <= {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.metadata.keys() - {"tags"}, cell.metadata
    for cell in code_cells(notebook):
        for output in cell.outputs:
            # Pictures are base64, in which any short text may occur.
            texts = [text for kind, text in output.get("data", {}).items() if kind != "image/png"]
            for text in [*texts, output.get("text", "")]:
                assert not PRIVATE.search(text), PRIVATE.search(text)
                assert not HOSTNAME.search(text), HOSTNAME.search(text)
