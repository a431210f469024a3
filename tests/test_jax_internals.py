"""One canary test per private JAX API: a failure here means that a new JAX version changed that
API.
"""

import ast
import functools
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import lib
from jax._src.cudnn import fused_attention_stablehlo as fmha
from jax._src.lib import cuda_versions

from jaxlc import _jax_internals
from jaxlc.attention.contract import AttentionProblem
from jaxlc.attention.kernels.choose import choose_kernel
from tests.helpers import free_port

pytestmark = pytest.mark.jax_version

ROOT = Path(__file__).parents[1]


def test_new_process_has_no_backends_before_first_use_and_a_key_value_store():
    """Plugins do not initialize backends, and neither does the coordinator."""
    code = f"""
import jax
from jaxlc._jax_internals import backends_are_initialized, coordination_client, register_plugins
register_plugins()
register_plugins()
assert coordination_client() is None
jax.distributed.initialize("127.0.0.1:{free_port()}", num_processes=1, process_id=0)
client = coordination_client()
for value in ("1", "2"):
    client.key_value_set("a/b", value, allow_overwrite=True)
assert client.key_value_dir_get("a/") == [("a/b", "2")]
client.key_value_delete("a/b")
assert client.key_value_dir_get("a/") == []
assert not backends_are_initialized()
jax.devices()
assert backends_are_initialized()
"""
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
    _jax_internals.replace_argument_residuals(vjp, [None, None])
    assert len(jax.tree.leaves(vjp)) == num_leaves - 1  # the weights are no longer stored
    _jax_internals.replace_argument_residuals(vjp, [{"a": jnp.float32(7)}, jnp.float32(0)])
    dx, dweights, _ = vjp(jnp.float32(1))
    np.testing.assert_array_equal([dx, dweights["a"]], [7.0, 3.0])


def test_cudnn_version_is_decoded_from_the_library(monkeypatch):
    """The plugin has the function also without a GPU, where it finds no library."""
    if cuda_versions is not None:
        assert callable(cuda_versions.cudnn_get_version) and isinstance(
            _jax_internals.cudnn_version(), tuple
        )

    def not_found():
        raise RuntimeError("cuDNN not found.")

    for get_version, version in ((lambda: 91801, (9, 18, 1)), (not_found, ())):
        monkeypatch.setattr(lib, "cuda_versions", SimpleNamespace(cudnn_get_version=get_version))
        assert _jax_internals.cudnn_version() == version
    monkeypatch.setattr(lib, "cuda_versions", None)
    assert _jax_internals.cudnn_version() == ()


def _cudnn_parameters(implementation) -> set[str]:
    """Parameter names without those that only JAX 0.12 has."""
    return set(inspect.signature(implementation).parameters) - {"score_mod_args", "score_mod"}


def test_cudnn_attention_signatures_are_as_expected():
    operands = {"query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"}
    operands |= {"page_table_k", "page_table_v"}
    settings = {
        "scale",
        "seed",
        "dropout_rate",
        "variadic_args",
        "mask_type",
        "layout",
        "sliding_window_length",
    }
    forward = _cudnn_parameters(fmha._dot_product_attention_fwd_impl)
    assert forward == operands | settings | {"is_training"}
    backward = _cudnn_parameters(fmha._dot_product_attention_bwd_impl)
    assert backward == operands | settings | {"activation", "fwd_output", "grad_output"}
    masks = {"CAUSAL", "NO_MASK", "PADDING", "PADDING_CAUSAL"}
    assert masks <= set(fmha.MaskType.__members__) and "BTNH" in fmha.AttentionLayout.__members__


def test_cudnn_packed_calls_bind_primitives_without_wrapper():
    """JAX's wrapper changes offsets; here the operands are those of the primitive, in its order."""
    q, k = (jax.ShapeDtypeStruct((1, 8, heads, 64), jnp.bfloat16) for heads in (4, 2))
    packed = [jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (2, 2, 3, 3)]
    lse = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)
    settings = dict(scale=1.0, causal=True)

    def forward(q, k, *packed):
        return _jax_internals.cudnn_packed_forward(q, k, k, packed, **settings)

    def backward(q, k, lse, *packed):
        return _jax_internals.cudnn_packed_backward(q, k, k, packed, q, lse, q, **settings)

    for function, operands in ((forward, (q, k, *packed)), (backward, (q, k, lse, *packed))):
        jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
        (call,) = (eqn for eqn in jaxpr.eqns if "dot_product_attention" in eqn.primitive.name)
        assert list(call.invars[4:8]) == list(jaxpr.invars[-4:])
        assert call.params["mask_type"] == fmha.MaskType.PADDING_CAUSAL


def test_changed_cudnn_attention_names_other_parameters(monkeypatch):
    assert _jax_internals.changed_cudnn_attention() is None

    def changed(query, key, value, added): ...

    monkeypatch.setattr(fmha, "_dot_product_attention_bwd_impl", changed)
    _jax_internals.changed_cudnn_attention.cache_clear()
    assert (
        "changed has other parameters (activation, added, bias"
        in _jax_internals.changed_cudnn_attention()
    )
    monkeypatch.undo()
    monkeypatch.setattr(fmha, "_dot_product_attention_bwd_abstract", changed)
    _jax_internals.changed_cudnn_attention.cache_clear()
    assert (
        "changed has other parameters (activation, added, bias"
        in _jax_internals.changed_cudnn_attention()
    )
    monkeypatch.delattr(fmha, "_dot_product_attention_fwd_impl")
    _jax_internals.changed_cudnn_attention.cache_clear()
    assert "_dot_product_attention_fwd_impl" in _jax_internals.changed_cudnn_attention()
    problem = AttentionProblem(
        platform="gpu", compute_capability="9.0", dtype="bfloat16", head_dim=64, value_dim=64, window=None,
        implicit_positions=True,
    )  # fmt: skip
    assert (
        choose_kernel("auto", problem).name == "pallas"
        and "private" in choose_kernel("auto", problem).reason
    )
    _jax_internals.changed_cudnn_attention.cache_clear()


def test_cudnn_attention_edits_device_requirements_in_calls_only():
    """The primitives are in JAX's set after the import, and no longer after a call."""
    code = (
        "import jax, jax.numpy as jnp; import jaxlc.attention; from jaxlc import _jax_internals;"
        " from jax._src import dispatch; from jax._src.cudnn import fused_attention_stablehlo as fmha;"
        " primitives = {fmha._dot_product_attention_fwd_p, fmha._dot_product_attention_bwd_p};"
        " assert primitives <= dispatch.prim_requires_devices_during_lowering;"
        " q = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.bfloat16);"
        " call = lambda q: _jax_internals.cudnn_attention_forward(q, q, q, scale=1.0, causal=True, window=None);"
        " assert [x.dtype.name for x in jax.eval_shape(call, q)] == ['bfloat16', 'float32'];"
        " assert not primitives & dispatch.prim_requires_devices_during_lowering"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_mosaic_products_of_groups_have_the_settings_and_shapes_that_are_used():
    x, w, dout = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 64), (3, 64, 128), (256, 128))
    )
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    tiles = dict(block_m=64, block_n=64, block_k=64, max_concurrent_steps=4, grid_block_n=1)
    for transpose_rhs, operand, shape in ((False, x, dout.shape), (True, dout, x.shape)):
        call = functools.partial(
            _jax_internals.mosaic_ragged_dot, transpose_rhs=transpose_rhs, **tiles
        )
        assert jax.eval_shape(call, operand, w, sizes).shape == shape
    call = functools.partial(_jax_internals.mosaic_ragged_gradient, **tiles)
    assert jax.eval_shape(call, x, dout, sizes).shape == w.shape
    assert not hasattr(jax.devices()[0], "core_count")  # otherwise `_JaxOnHopper` is not needed


def test_private_apis_are_used_only_in_jax_internals():
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
    assert users == {"_jax_internals.py"}
