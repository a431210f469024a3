"""The layers of the package (CONTRIBUTING.md), checked in the sources: imports, cycles, sizes,
names.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jaxlc.cli import VERBS
from jaxlc.config import load_stages

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxlc"
LAYERS = dict(
    interrupts=-1,
    core=0, _jax_internals=0,
    config=1, hlo=1,
    runtime=2, sharding=2, **{"data.texts": 2, "data.tokens": 2, "data.sequences": 2},
    attention=3, posttrain=3,
    models=4, simulate=4, data=4,
    hf=5, step=5,
    checkpoints=6,
    generation=7,
    evals=8,
    train=9, plan=9,
    api=10, preflight=10, profile=10, search=10,
    faces=11,  # __init__ of plan, which adds the advice of search
    cli=12,
    exporting=13, logprobs=13, recommend=13, sweep=13, __main__=13,  # `python -m jaxlc.X`
)  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.py"))


def name_of(path: Path) -> str:
    """jaxlc/step/step.py is jaxlc.step.step, jaxlc/train/__init__.py is jaxlc.train."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(nodes) -> set[str]:
    """The modules that import statements among `nodes` name; `from a import b` names a.b if that is
    a module.
    """
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import; use the absolute name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules.update(names & NAMES)
            if not names <= NAMES:
                modules.add(node.module)
    return modules


def without_docstrings(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return tree


def all_imports(path: Path) -> set[str]:
    return imports_of(ast.walk(tree_of(path)))


def imports_at_start(path: Path) -> set[str]:
    """Imports that run when the module is imported: all except those inside functions."""

    def outside_functions(node):
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from outside_functions(child)

    return imports_of(outside_functions(tree_of(path)))


def package_of(module: str) -> str | None:
    """jaxlc.step.step is in step, jaxlc.data.texts.records in data.texts, which has a layer of its
    own, jaxlc.plan.__main__ in __main__; None outside jaxlc and for jaxlc itself."""
    parts = module.split(".")
    if parts[0] == "jaxlc" and parts[-1] == "__main__":
        return "__main__"
    if module == "jaxlc.plan":
        return "faces"
    if parts[0] != "jaxlc" or len(parts) == 1:
        return None
    inner = ".".join(parts[1:3])
    return inner if inner in LAYERS else parts[1]


def upward_imports(path: Path) -> list[str]:
    """Imports of `path` from a higher layer, or from another package of its own layer."""
    package = package_of(name_of(path))
    violations = []
    for module in sorted(all_imports(path)):
        other = package_of(module)
        if other is None:
            continue
        is_same = other.split(".")[0] == package.split(".")[0]
        if LAYERS[other] > LAYERS[package] or (LAYERS[other] == LAYERS[package] and not is_same):
            violations.append(f"{name_of(path)} imports {module}")
    return violations


def test_layers_list_every_package():
    packages = {package_of(name_of(path)) for path in MODULES} - {None}
    assert packages <= LAYERS.keys()


def test_imports_only_go_down():
    assert [
        violation
        for path in MODULES
        if package_of(name_of(path))
        for violation in upward_imports(path)
    ] == []


def test_imports_have_no_cycle():
    graph = {name_of(path): (all_imports(path) & NAMES) - {name_of(path)} for path in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("package", ["core", "config"])
def test_core_and_config_do_not_import_jax(package):
    for path in (PACKAGE / package).rglob("*.py"):
        roots = {module.split(".")[0] for module in all_imports(path)}
        assert not roots & {"jax", "jaxlib", "flax", "optax", "orbax"}, path


def test_commands_print_help_and_errors_without_jax():
    """Importing it takes longer than everything else until the arguments are parsed."""
    verbs = ", ".join(f"jaxlc.cli.{module}" for module, _ in VERBS.values())
    code = f"import jaxlc, {verbs}, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_scipy_is_imported_when_it_is_used():
    """It is a tenth of the time of the imports of a run, and few runs need it."""
    imported = {path: imports_at_start(path) for path in MODULES}
    assert [path for path, names in imported.items() if "scipy.special" in names] == []


@pytest.mark.parametrize("package", ["data", "generation", "plan", "profile", "train"])
def test_packages_that_verbs_import_first_do_so_without_notes_of_the_cuda_plugin(package):
    """Without a GPU, the plugin writes three notes to stderr when JAX is imported."""
    tree = tree_of(PACKAGE / package / "__init__.py")
    imported = [modules for node in tree.body if (modules := imports_of([node]))]
    assert next(x for x in imported if "jaxlc" in str(x)) == {"jaxlc.runtime.stderr"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_and_function_sizes_are_limited(path):
    assert len(path.read_text().splitlines()) <= 650
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = node.body[0] if ast.get_docstring(node) else None
            num_lines = node.end_lineno - node.lineno + 1
            num_lines -= docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            assert num_lines <= 70, node.name


def test_package_does_not_import_benchmarks_scripts_or_tests():
    roots = {path: {module.partition(".")[0] for module in all_imports(path)} for path in MODULES}
    assert [
        path for path, names in roots.items() if names & {"benchmarks", "scripts", "tests"}
    ] == []


def test_private_jax_apis_are_used_in_one_module():
    """Each has a canary test in tests/test_jax_internals.py."""
    private = re.compile(r"\bjax(lib)?\._(?!_version)|\bargs_res\b|\._lowering\b")
    sources = {path: ast.unparse(without_docstrings(path)) for path in MODULES}
    assert {path.name for path, source in sources.items() if private.search(source)} <= {
        "_jax_internals.py"
    }


def test_module_names_are_specific():
    assert [
        path
        for path in MODULES + SCRIPTS
        if path.stem in ("utils", "util", "common", "helpers", "misc")
    ] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds(path):
    assert {".".join(module.split(".")[:2]) for module in all_imports(path)} <= {
        "ml_collections",
        "jaxlc.config",
    }
    spec = importlib.util.spec_from_file_location(f"configs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config("")
    assert isinstance(config, ConfigDict)
    load_stages(config)
