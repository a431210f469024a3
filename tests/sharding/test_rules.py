"""Sharding rules: the axes of stored and gathered parameters, and the shardings of activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlc.config import MeshConfig
from jaxlc.core.axes import MESH_AXES
from jaxlc.sharding.mesh import make_mesh, nodes_of
from jaxlc.sharding.rules import RULES, Sharder, compute_spec, copy_spec, storage_axes, storage_spec


def _mesh(**axes):
    config = MeshConfig(**axes)
    return make_mesh(config, jax.devices()[: config.num_devices])


def test_specs_for_storage_and_compute():
    mesh, dims, shape = (
        _mesh(fsdp=2, context=2, tensor=2),
        ("layers", "model", "heads", "head_dim"),
        (3, 8, 4, 6),
    )
    assert storage_spec(dims, shape, mesh) == P(None, ("fsdp", "context"), "tensor", None)
    assert compute_spec(dims, shape, mesh) == P(None, None, "tensor", None)


@pytest.mark.parametrize(
    "size, entry",
    [
        (12, ("fsdp", "context")),
        (9, "context"),  # 3 divides 9, 6 does not
        (3, "context"),
        (4, "fsdp"),
        (7, None),
    ],
)
def test_storage_spec_uses_largest_dividing_subset(size, entry):
    assert storage_spec(("model",), (size,), _mesh(fsdp=2, context=3)) == P(entry)


def test_compute_spec_indivisible_kv_heads_are_replicated():
    mesh = _mesh(tensor=4)
    assert compute_spec(("model", "kv_heads", "head_dim"), (8, 2, 4), mesh) == P(None, None, None)
    assert compute_spec(("model", "kv_heads", "head_dim"), (8, 4, 4), mesh) == P(
        None, "tensor", None
    )


def test_storage_spec_one_device_shards_nothing():
    assert storage_spec(("vocab", "model"), (8, 8), _mesh()) == P(None, None)


def test_storage_axes_of_unknown_dimension_raise():
    with pytest.raises(KeyError):
        storage_axes("no such dimension")


def test_rules_name_only_mesh_axes():
    for value in vars(RULES).values():
        entries = value if value and isinstance(value[0], tuple) else (value,)
        assert all(axis in MESH_AXES for axes in entries for axis in axes)


@pytest.mark.parametrize(
    "method, shape, spec",
    [
        ("residual", (4, 8, 6), P(("fsdp",), ("context", "tensor"), None)),
        ("gathered", (4, 8, 6), P(("fsdp",), "context", None)),
        ("heads", (4, 8, 2, 6), P(("fsdp",), "context", "tensor", None)),
        ("heads", (4, 8, 1, 6), P(("fsdp",), "context", None, None)),
        ("ffn", (4, 8, 6), P(("fsdp",), "context", "tensor")),
    ],
)
def test_sharder_shards_activations(method, shape, spec):
    mesh = _mesh(fsdp=2, context=2, tensor=2)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    got = jax.jit(getattr(Sharder(mesh), method))(x)
    np.testing.assert_array_equal(got, x)
    assert got.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), len(shape))


def test_sharder_weight_is_cast_before_gather():
    mesh, dims = _mesh(context=2, tensor=2), ("model", "ffn")
    stored = jax.device_put(
        np.ones((8, 6), np.float32), jax.NamedSharding(mesh, storage_spec(dims, (8, 6), mesh))
    )
    value, pull_back = jax.vjp(
        jax.jit(lambda w: Sharder(mesh).weight(w, dims, jnp.bfloat16)), stored
    )
    assert value.dtype == jnp.bfloat16
    assert value.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, "tensor")), 2)
    (gradient,) = pull_back(jnp.ones((8, 6), jnp.bfloat16))
    assert gradient.dtype == jnp.float32
    assert gradient.sharding.is_equivalent_to(stored.sharding, 2)
    text = jax.jit(lambda w: Sharder(mesh).weight(w, dims, jnp.bfloat16)).lower(stored).as_text()
    cast, gather = text.index("stablehlo.convert"), text.rindex("sharding_constraint")
    assert cast < gather


@pytest.mark.parametrize(
    ("axes", "node_devices", "stored", "copied"),
    [
        (dict(fsdp=2, context=4), 4, ("context_inner", "fsdp_outer"), "context_inner"),
        (dict(context=8), 2, ("context_inner", "context_outer"), "context_inner"),
        (
            dict(fsdp=4, context=2),
            4,
            ("fsdp_inner", "context_inner", "fsdp_outer"),
            ("fsdp_inner", "context_inner"),
        ),
    ],
)
def test_storage_over_nodes_splits_the_shards_of_the_copy(axes, node_devices, stored, copied):
    """So the gather across nodes joins consecutive shards, and that within a node joins the
    results.
    """
    nodes = nodes_of(_mesh(**axes), node_devices)
    dims, shape = ("model", "ffn"), (16, 8)
    assert storage_spec(dims, shape, nodes.mesh) == P(stored, None)
    assert copy_spec(dims, shape, nodes) == P(copied, None)
    assert [device.id for device in nodes.mesh.devices.flat] == list(range(8))
