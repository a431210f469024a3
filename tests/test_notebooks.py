"""Notebooks in notebooks/: they run without errors and warnings, and what is stored in git is small
and complete.
"""

import os
import re
import shutil
import socket
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests import environment, helpers

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000
# The first code cell of every notebook, for Colab; it does nothing where jaxlc is installed.
INSTALL_CELL = """\
import importlib.util
import os
import subprocess
import sys

# Where jaxlc is missing, as on Colab, this installs it. JAXLC_SOURCE can be another pip requirement.
JAXLC = os.environ.get("JAXLC_SOURCE", "./jaxlc[plot]")
if getattr(importlib.util.find_spec("jaxlc"), "origin", None) is None:  # a checkout has a spec without origin
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", JAXLC], check=True)"""
# Names of files and directories that a notebook may leave next to it.
IGNORED = {
    line.strip("/").rpartition("/")[2] for line in (ROOT / ".gitignore").read_text().splitlines()
}
# an absolute path, or an address in memory
PRIVATE = re.compile(r"(?<![\w.:/<~-])/[\w.-]+/[\w.-]|0x[0-9a-f]{6,}")
# a short one may be a part of a word
HOSTNAME = re.compile(rf"\b{re.escape(socket.gethostname())}\b")

# JAX does not write entries of the compilation cache atomically. It ignores an entry that another process is writing,
# or was writing when it was killed.
INCOMPLETE_CACHE_ENTRY = re.compile(
    r".*Error reading persistent compilation cache entry .*incomplete or truncated stream\n( +warnings\.warn\(\n)?"
)
# Lines of core/text.py, which a slow machine prints.
PROGRESS_LINE = re.compile(r"^\w[^:\n]*: .*\b(left|so far)\n", re.MULTILINE)

# more than 20 CPU seconds
HEAVY = {
    "agent",
    "extend_context",
    "hybrid",
    "long_context_chat",
    "own_model",
    "qlora",
    "use_of_context",
}

# The model of configs/retrieval.py has a layer of each of two kinds.
ONE_LAYER = "config.model.update(num_layers=1, layer_kinds=('sliding',))"

# Texts of cells and what `make test` runs instead, because unoptimized programs are slow: fewer steps and less data.
# `make test-full` runs the notebooks as they are stored.
SHORTER = {
    "agent": {
        "config.train.update(steps=60, checkpoint_every_steps=60": "config.train.update(steps=2, "
        "checkpoint_every_steps=2",
        "student.train.update(steps=60, checkpoint_every_steps=60, log_every_steps=20": "student.train.update("
        "steps=2, checkpoint_every_steps=2, log_every_steps=1",
    },
    "extend_context": {
        "steps=150, global_batch_size=16, eval_every_steps=0, eval_sequences=32": "steps=12, global_batch_size=4, "
        "eval_every_steps=0, eval_sequences=4",
        "[:192]": "[:4]",
        "steps=20, global_batch_size=8, eval_sequences=32": "steps=4, global_batch_size=4, eval_sequences=4",
        "if has_gpu_compiler():": "if False:",  # the live plan of plan_256k is compiled
    },
    "first_run": {
        "seq_len = 1024": "seq_len = 512",
        "steps=120": "steps=8",
        "eval_every_steps=40": "eval_every_steps=4",
        "eval_sequences=8": "eval_sequences=2",
        "range(60)": "range(6)",
    },
    "grpo": {
        "steps=500": "steps=3",
        "config.train.eval_sequences = 8": f"config.train.eval_sequences = 2\n{ONE_LAYER}",
        "LENGTHS = (120, 480)": "LENGTHS = (96,)",
        "NUM_HELD_OUT = 96": "NUM_HELD_OUT = 2",
        "config.mesh = dict(data=1, context=2)": "config.mesh = dict(data=2, context=1)",
        "prompts_per_step=16, answers_per_prompt=8": "prompts_per_step=2, answers_per_prompt=2",
        "steps=40, global_batch_size=16": "steps=2, global_batch_size=2",
        ', eval_prompts="runs/eval.jsonl"': "",
        "steps=2, global_batch_size=4": "steps=1, global_batch_size=4",
    },
    "hybrid": {
        "STEPS = 32, 128, 16, 500": "STEPS = 32, 128, 4, 3",
        # The hybrid has layers of both kinds; its scores stand for all models.
        "{name: jaxlc.train.run(config_of(*model), workdir(name), batches=batches()) for name, model in "
        "MODELS.items()}": 'dict.fromkeys(MODELS, jaxlc.train.run(config_of(*MODELS["hybrid"]), workdir("hybrid"), '
        "batches=batches()))",
        "warmup_steps=20": "warmup_steps=1",
        "NUM_BOOKS = 512": "NUM_BOOKS = 8",
        "log_every_steps=50": "log_every_steps=2",
    },
    "long_context_chat": {
        "range(400)": "range(100)",
        "eval_sequences=8": "eval_sequences=2",
        "steps=50,": "steps=8,",
        "max_eval_loss=4.0": "max_eval_loss=5.5",
        "global_batch_size=16": "global_batch_size=4",
        "steps=10,": "steps=4,",
        "steps=60,": "steps=4,",
        "global_batch_size=8": "global_batch_size=2",
        "max_tokens=30": "max_tokens=6",
    },
    "memory": {"if has_gpu_compiler():": "if False:"},
    "own_model": {
        "VOCAB, TOKENS, BATCH = 16, 64, 64": "VOCAB, TOKENS, BATCH = 16, 64, 16",
        "range(120)": "range(10)",
        "steps=200": "steps=20",
        "checkpoint_every_steps=100": "checkpoint_every_steps=10",
        "StopBelow(1.5)": "StopBelow(2.9)",
    },
    "qlora": {
        "config.train.eval_sequences = 1": "config.train.update(steps=2, eval_sequences=1)\n"
        "config.data.update(seq_len=256, sources=(os.path.dirname(importlib.__file__),))\nconfig.model.num_layers = 1",
        "max_tokens=48": "max_tokens=4",
    },
    "use_of_context": {
        "STEPS = (500, 200, 150)": "STEPS = (3, 2, 2)",
        # The first two stages have equal programs.
        "stage.changed(steps=steps)": "stage.changed(steps=steps, data=dict(seq_len=128), "
        "train=dict(global_batch_size=4))",
        "config.train.eval_sequences = 8": f"config.train.eval_sequences = 4\n{ONE_LAYER}",
        "LENGTHS = (128, 256, 512, 1024, 2048, 4096)": "LENGTHS = (128,)",
        "NUM_EXAMPLES = 8": "NUM_EXAMPLES = 1",
        'after = jaxlc.load("runs/retrieval", mesh=dict(context=4))': "after = before",
    },
}

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def output_kinds(cell: nbformat.NotebookNode) -> list[tuple]:
    """The kind of each output, with consecutive streams as one: how they are split depends on
    timing.
    """
    kinds: list[tuple] = []
    for output in cell.outputs:
        kind = (
            ("stream", output.name)
            if output.output_type == "stream"
            else ("display", *sorted(output.data))
        )
        if kind[0] != "stream" or kinds[-1:] != [kind]:
            kinds.append(kind)
    return kinds


def test_notebooks_exist_and_are_listed_in_the_readme():
    assert NOTEBOOKS
    text = (ROOT / "notebooks" / "README.md").read_text()
    assert {path.name for path in NOTEBOOKS} == set(re.findall(r"\]\((\w+\.ipynb)\)", text))


def check_run(
    path: Path, directory: Path, shorter: dict[str, str], environment: dict[str, str]
) -> None:
    """Runs a notebook in a copy of its directory, with texts of its cells replaced by those of
    `shorter`.
    """
    shutil.copytree(path.parent, directory)
    stored, notebook, before = read(path), read(directory / path.name), set(directory.iterdir())
    for text, replacement in shorter.items():
        (cell,) = (cell for cell in code_cells(notebook) if text in cell.source)
        assert cell.source.count(text) == 1, text
        cell.source = cell.source.replace(text, replacement)
    client = nbclient.NotebookClient(
        notebook, resources={"metadata": {"path": str(directory)}}, **helpers.NOTEBOOK_TIMEOUTS
    )
    client.execute(env=environment)
    written = {file.name for file in set(directory.iterdir()) - before}
    assert written <= IGNORED, "name it in .gitignore"
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                output.text = PROGRESS_LINE.sub("", INCOMPLETE_CACHE_ENTRY.sub("", output.text))
        cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    for cell, stored_cell in zip(code_cells(notebook), code_cells(stored), strict=True):
        errors = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        assert errors == [], cell.source
        kinds = output_kinds(cell)
        stored_kinds = output_kinds(stored_cell)
        if cell.source != stored_cell.source:  # it may train fewer models
            kinds = list(dict.fromkeys(kinds))
            stored_kinds = list(dict.fromkeys(stored_kinds))
        assert kinds == stored_kinds, f"run `make notebooks`: {cell.source}"


def _parameter(path: Path):
    return pytest.param(path, id=path.stem, marks=pytest.mark.heavy if path.stem in HEAVY else ())


@pytest.mark.parametrize("path", [_parameter(path) for path in NOTEBOOKS])
def test_notebook_runs_without_error_and_stderr(path, tmp_path):
    check_run(path, tmp_path / "notebooks", SHORTER.get(path.stem, {}), environment.for_user())


@pytest.mark.full
@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem in SHORTER], ids=lambda path: path.stem
)
def test_notebook_at_full_length_runs_without_error_and_stderr(path, tmp_path):
    """With XLA's default optimization, and without the variables of the tests."""
    users_variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))
    }
    users_variables |= {"PYTHONPATH": str(ROOT), "JAXLC_ASSEMBLE": "1"}
    check_run(path, tmp_path / "notebooks", {}, users_variables)


@notebooks
def test_notebook_starts_with_machines_and_install_cell(path):
    first, second = read(path).cells[:2]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    for machine in ("CPU", "T4", "H100"):
        assert machine in first.source
    # `python -m benchmarks.site --links` replaces the requirement by that of a public repository.
    requirement = re.search(r'"JAXLC_SOURCE", "(.*)"', second.source)[1]
    assert (second.cell_type, second.source) == (
        "code",
        INSTALL_CELL.replace("./jaxlc[plot]", requirement),
    )


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
