"""The wheel: what it contains, and that it works on its own in an empty directory."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from jaxlc.cli import VERBS, main_of
from tests.environment import ASSEMBLER
from tests.helpers import TIMEOUT_SECONDS, png_size

ROOT = Path(__file__).parents[1]
NOT_SOURCES = shutil.ignore_patterns(
    ".*", "runs", "build", "dist", "*.egg-info", "__pycache__", "images", "*.png", "shared"
)
TINY = (
    "--config.data.seq_len=128",
    "--config.data.eval_fraction=0.3",
    "--config.model.num_layers=1",
    "--config.train.steps=2",
    "--config.train.eval_every_steps=0",
    "--config.train.eval_sequences=2",
)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the source tree, so that no build directory is left in the tree
    itself.
    """
    source = tmp_path_factory.mktemp("source") / "jaxlc"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(source))
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """A directory into which the wheel is installed. Dependencies come from the environment of the
    tests.
    """
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


def pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run(
    installed: Path, directory: Path, *command: str, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess:
    """Runs a command in `directory` with the installed jaxlc, which precedes an editable one."""
    environment = {**environment, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=environment,
        text=True,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_wheel_contains_package_configs_and_licence_only(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "jaxlc/py.typed",
        "jaxlc/cli/__init__.py",
        *(f"jaxlc/configs/{path}" for path in configs()),
    ):
        assert name in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"jaxlc"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxlc").rglob("*.py")}
    shipped = {
        name for name in names if name.endswith(".py") and not name.startswith("jaxlc/configs/")
    }
    assert shipped == modules


def configs() -> list[Path]:
    """The config files and their data, relative to configs/."""
    paths = sorted(
        path
        for suffix in ("py", "json", "jsonl")
        for path in (ROOT / "configs").rglob(f"*.{suffix}")
    )
    assert paths
    return [path.relative_to(ROOT / "configs") for path in paths]


def test_wheel_core_requirements_exclude_optional_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    core = [
        line
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert len(core) == 11
    for package in ("tokenizers", "pyarrow", "matplotlib", "tensorboardX"):
        assert not any(package in line for line in core)
    assert "License-Expression: Apache-2.0" in metadata


_OPTIONAL = (
    "matplotlib",
    "jinja2",
    "tokenizers",
    "pyarrow",
    "tensorboardX",
    "wandb",
    "huggingface_hub",
    "datasets",
)
_IMPORT_WITHOUT = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {_OPTIONAL}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
from jaxlc import api
from jaxlc.evals import evaluate_run
from jaxlc.plan import plan
from jaxlc.preflight import check
from jaxlc.search import recommendation
from jaxlc.train import loop
"""


def test_verbs_are_imported_without_optional_packages():
    subprocess.run([sys.executable, "-c", _IMPORT_WITHOUT], cwd=ROOT, check=True)


def test_pyproject_lists_every_package_of_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    directories = {path.parent.relative_to(ROOT) for path in (ROOT / "jaxlc").rglob("*.py")}
    configs = {"jaxlc.configs", "jaxlc.configs.recipes"}
    assert set(listed) == {".".join(directory.parts) for directory in directories} | configs


@pytest.mark.gpu_compiler
def test_extra_plan_installs_the_assembler():
    """XLA starts it, and machines without a CUDA toolkit have no other one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["plan"]
    assert any(line.startswith("nvidia-cuda-nvcc-cu12>=") for line in extra)
    jax_pins = [line.removeprefix("jax") for line in extra if line.startswith("jax==")]
    assert len(jax_pins) == 2
    for pin in jax_pins:  # JAX does not load a plugin of another version
        assert f"jax-cuda12-plugin{pin}" in extra and f"jax-cuda12-pjrt{pin}" in extra
    assert "nvidia-cuda-nvcc-cu12==" in (ROOT / "requirements-plan.lock").read_text()
    assert ASSEMBLER.is_file()


def test_installed_quickstart_trains_in_an_empty_directory(installed, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_text(f"Document {i} of the package test. " * 40)
    where = run(installed, work, "-c", "import jaxlc; print(jaxlc.__file__)").stdout
    assert Path(where.strip()).is_relative_to(installed)
    settings = [
        f"--config.data.sources={texts}",
        f"--config.data.cache_dir={tmp_path / 'cache'}",
        *TINY,
    ]
    output = run(
        installed, work, str(installed / "bin" / "jaxlc"), "train", "--config=quickstart", *settings
    ).stdout
    assert "held-out loss" in output
    assert [path.name for path in work.iterdir()] == ["runs"]
    rows = [
        json.loads(line)
        for line in (work / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-1]["step"] == 2


@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("ptxas")
def test_installed_plan_prints_page_and_writes_files(installed, tmp_path):
    """In an empty directory, with a shipped config, and without the variables of the tests."""
    arguments = [
        "--config=256k:mini",
        "--topology=h100:1x4",
        "--transport=auto",
        "--json=plan.json",
        "--html=plan.html",
        "--timeline=layer.png",
        "--advise",
        "--evaluation",
        "--host_memory_gib=100",
        "--config.mesh.fsdp=1",
        "--config.mesh.context=2",
        "--config.mesh.tensor=2",
        "--config.model.num_layers=2",
        "--config.attention.document_mask=false",
        "--config.memory.remat=full",
        "--config.runtime.simulated_devices=0",
    ]
    ours = ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = run(
        installed,
        tmp_path,
        str(installed / "bin" / "jaxlc"),
        "plan",
        *arguments,
        environment=environment,
    )
    first, *others = done.stderr.splitlines()
    assert first == "compiling the training step for h100:1x4 ..."
    assert all("so far" in line for line in others)  # of a slow machine
    assert "peak of an evaluation" in done.stdout
    assert "VERDICT: fits" in done.stdout and "cudnn attention forward" in done.stdout
    values = json.loads((tmp_path / "plan.json").read_text())
    assert (
        values["topology"] == "h100:1x4"
        and values["num_devices"] == 4
        and values["memory"]["fits"] is True
    )
    assert values["advice"] is None
    assert values["memory"]["host_capacity_per_node_bytes"] == 100 * 2**30
    (backend,) = values["ring"]["by_backend"]
    assert backend in ("NVSHMEM", "NCCL")  # auto, on JAX 0.10.1 and on 0.12
    memory = values["memory"]
    # its permutes use symmetric buffers
    assert (memory["symmetric_used_bytes"] > 0) == (backend == "NVSHMEM")
    assert memory["symmetric_used_bytes"] <= memory["symmetric_bytes"]
    state_bytes = memory["parameters_bytes"] + memory["optimizer_bytes"]
    assert state_bytes < values["evaluation_peak_bytes"] < memory["device_peak_bytes"]
    parts = (
        "device_arguments_bytes",
        "device_temp_bytes",
        "workspace_bytes",
        "symmetric_bytes",
        "nccl_bytes",
    )
    assert memory["device_peak_bytes"] == sum(memory[part] for part in parts)
    assert ">fits</span>" in (tmp_path / "plan.html").read_text()
    assert png_size(tmp_path / "layer.png") > (500, 200)


@pytest.mark.parametrize("verb", VERBS)
def test_verb_has_a_main_function(verb):
    assert callable(main_of(verb))


def test_modules_that_run_as_commands_have_a_main_function():
    """Notebooks and scripts of users call it."""
    pattern = re.compile(r"^(main = |def main\(|from \S+ import (\w+ as )?main$)", re.MULTILINE)
    texts = {path: path.read_text() for path in (ROOT / "jaxlc").rglob("*.py")}
    run = [path for path, text in texts.items() if '__name__ == "__main__"' in text]
    assert len(run) > 10 and all(pattern.search(texts[path]) for path in run)


def test_public_api_is_complete_and_typed():
    """`dir`, `__all__` and what a type checker sees (definitions and TYPE_CHECKING imports) agree,
    without JAX.
    """
    code = (
        "import jaxlc, sys; assert sorted([*jaxlc.__all__, '__version__']) == dir(jaxlc);"
        "assert 'jax' not in sys.modules; [getattr(jaxlc, name) for name in jaxlc.__all__];"
        "mesh = jaxlc.make_mesh(); assert dict(mesh.shape) == dict(data=1, fsdp=1, context=1, tensor=1)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    tree = ast.parse((ROOT / "jaxlc" / "__init__.py").read_text())
    visible = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            visible |= {
                alias.name
                for line in node.body
                if isinstance(line, ast.ImportFrom)
                for alias in line.names
            }
    (public,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    assert set(ast.literal_eval(public)) <= visible


@pytest.mark.parametrize(
    ("arguments", "status", "output"),
    [
        ([], 0, "usage: jaxlc VERB"),
        (["--help"], 0, "Shipped configs: 128k,"),
        (["--version"], 0, "jaxlc 0."),
        (["trian"], 2, "unknown command 'trian': did you mean train?"),
        (["serve"], 2, "unknown command 'serve': use jaxlc export"),
        (["train", "--help", "mesh"], 0, "--config.mesh.context"),
    ],
)
def test_console_command_help_and_unknown_verb(arguments, status, output):
    done = subprocess.run(
        [sys.executable, "-m", "jaxlc", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == status
    assert output in done.stdout + done.stderr
