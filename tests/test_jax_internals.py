"""One canary test per private JAX API: a failure here means that a new JAX version changed that API."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc import _jax_internals

ROOT = Path(__file__).parents[1]


def test_backends_are_initialized_before_and_after_first_use():
    code = (
        "import jax; from jaxlc._jax_internals import backends_are_initialized as initialized;"
        " assert not initialized(); jax.devices(); assert initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_kept_argument_indices_skips_unused_arguments():
    lowered = jax.jit(lambda unused, a, also_unused, b: a + b).lower(1.0, 2.0, 3.0, 4.0)
    assert _jax_internals.kept_argument_indices(lowered) == [1, 3]


def test_replace_argument_residuals_changes_gradient():
    def product(x, weights, unread):
        return x * weights["a"], unread

    x, weights = jnp.float32(3), {"a": jnp.float32(5)}
    _, vjp, _ = jax.vjp(product, x, weights, jnp.float32(0), has_aux=True)
    num_leaves = len(jax.tree.leaves(vjp))
    _jax_internals.replace_argument_residuals(vjp, 1, [None, None])
    assert len(jax.tree.leaves(vjp)) == num_leaves - 1  # the weights are no longer stored
    _jax_internals.replace_argument_residuals(vjp, 1, [{"a": jnp.float32(7)}, jnp.float32(0)])
    dx, dweights, _ = vjp(jnp.float32(1))
    np.testing.assert_array_equal([dx, dweights["a"]], [7.0, 3.0])


def test_import_leaves_jax_unloaded():
    code = "import jaxlc._jax_internals, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_private_apis_are_used_only_in_jax_internals():
    not_yet_moved = {"cudnn.py"}  # attention/cudnn.py
    users = set()
    for path in (ROOT / "jaxlc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            attribute = node.attr if isinstance(node, ast.Attribute) else ""
            if attribute in ("_lowering", "args_res") or any(
                module and module.startswith("jax._src") for module in modules
            ):
                users.add(path.name)
    assert users - not_yet_moved == {"_jax_internals.py"}
