"""The house rules of docs/architecture.md, proven from the sources: floors, no cycles, sizes, names."""

import ast
import importlib.util
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jaxlc.config import load

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxlc"
FLOORS = dict(
    core=0, _jax_internals=0,
    config=1, kernels=1,
    runtime=2, hlo=2, sharding=2,
    attention=3, data=3,
    models=4,
    train=5,
    simulate=6,
    plan=7,
    sweep=8,
    cli=9,
)  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def name_of(path: Path) -> str:
    """jaxlc/train/step.py is jaxlc.train.step, jaxlc/train/__init__.py is jaxlc.train."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(nodes) -> set[str]:
    """Every module that import statements among `nodes` name; `from a import b` names a.b where that is a module."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import; write the whole name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names & NAMES)
            if not names <= NAMES:
                found.add(node.module)
    return found


def all_imports(path: Path) -> set[str]:
    return imports_of(ast.walk(tree_of(path)))


def imports_at_start(path: Path) -> set[str]:
    """Imports that run when the module is imported: all but those inside functions."""

    def outside_functions(node):
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from outside_functions(child)

    return imports_of(outside_functions(tree_of(path)))


def room_of(module: str) -> str | None:
    """jaxlc.train.step is in train; None outside the package, and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "jaxlc" and len(parts) > 1 else None


def climbs(path: Path) -> list[str]:
    """Imports of `path` that go up, or across to another room of its floor."""
    room = room_of(name_of(path))
    return [
        f"{name_of(path)} imports {module}"
        for module in sorted(all_imports(path))
        if room_of(module) not in (None, room) and FLOORS[room_of(module)] >= FLOORS[room]
    ]


def test_every_room_has_a_floor():
    rooms = {room_of(name_of(path)) for path in MODULES} - {None}
    assert rooms <= FLOORS.keys()


def test_imports_go_down_only_those_inside_functions_too():
    assert [climb for path in MODULES if room_of(name_of(path)) for climb in climbs(path)] == []


def test_there_is_no_import_cycle():
    graph = {name_of(path): (all_imports(path) & NAMES) - {name_of(path)} for path in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("room", ["core", "config"])
def test_no_jax_in_core_and_config(room):
    for path in (PACKAGE / room).rglob("*.py"):
        roots = {module.split(".")[0] for module in all_imports(path)}
        assert not roots & {"jax", "jaxlib", "flax", "optax", "orbax"}, path


def test_runtime_imports_jax_inside_functions_only():
    for path in (PACKAGE / "runtime").rglob("*.py"):
        assert "jax" not in {module.split(".")[0] for module in imports_at_start(path)}, path


@pytest.mark.parametrize(
    "module", ["jaxlc", "jaxlc.config.command_line", "jaxlc.core.flops", "jaxlc.plan", "jaxlc.runtime"]
)
def test_import_does_not_start_jax(module):
    code = f"import {module}, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_sizes(path):
    limit = 700 if room_of(name_of(path)) == "kernels" else 500
    assert len(path.read_text().splitlines()) <= limit
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno + 1 < 60, node.name


def test_package_does_not_import_benchmarks_scripts_or_tests():
    roots = {path: {module.partition(".")[0] for module in all_imports(path)} for path in MODULES}
    assert [path for path, names in roots.items() if names & {"benchmarks", "scripts", "tests"}] == []


def test_there_is_no_drawer_for_odds_and_ends():
    assert [path for path in MODULES + SCRIPTS if path.stem in ("utils", "util", "common", "helpers", "misc")] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds(path):
    assert {".".join(module.split(".")[:2]) for module in all_imports(path)} <= {"ml_collections", "jaxlc.config"}
    spec = importlib.util.spec_from_file_location(f"configs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config("")
    assert isinstance(config, ConfigDict)
    load(config)
