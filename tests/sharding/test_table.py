"""The sharding table equals a golden file, and its byte counts equal those of arrays."""

from html import unescape
from pathlib import Path

import jax
import numpy as np

from jaxlc.config import MeshConfig
from jaxlc.config.models.presets import PRESETS
from jaxlc.models import decoder
from jaxlc.sharding.mesh import make_mesh
from jaxlc.sharding.rules import sharding_table, storage_spec

GOLDEN = Path(__file__).parents[1] / "goldens" / "sharding_table_tiny.txt"
TINY = PRESETS["tiny"]


def _table(**axes):
    params, dims = decoder.abstract_params(TINY, TINY.vocab_size), decoder.dims_of(TINY)
    return sharding_table(params, dims, make_mesh(MeshConfig(**axes))), params, dims


def test_table_tiny_model_equals_golden():
    """tensor=4 does not divide the 2 key/value heads, which is marked. To regenerate the file,
    write `table` to it.
    """
    table, _, _ = _table(context=2, tensor=4)
    assert str(table) == GOLDEN.read_text()


def test_table_bytes_per_device_equal_arrays():
    table, params, dims = _table(fsdp=2, context=2, tensor=2)
    mesh = make_mesh(MeshConfig(fsdp=2, context=2, tensor=2))
    device_bytes = 0
    for path, param in jax.tree.leaves_with_path(params):
        names = dims
        for key in path:
            names = names[key.key]
        spec = storage_spec(names, param.shape, mesh)
        array = jax.device_put(np.zeros(param.shape, param.dtype), jax.NamedSharding(mesh, spec))
        device_bytes += array.addressable_shards[0].data.nbytes
    assert sum(row.bytes_per_device for row in table.rows) == device_bytes
    assert f"{device_bytes:,} bytes per device" in str(table)
    assert "!" not in str(table)


def test_table_partly_sharded_dimension_is_marked():
    params = {"w": jax.ShapeDtypeStruct((6, 5), np.float32)}
    mesh = make_mesh(MeshConfig(fsdp=2, context=4))
    table = str(sharding_table(params, {"w": ("model", "ffn")}, mesh))
    assert "model:fsdp" in table
    assert "! model=6 is not divisible by fsdp=2 x context=4" in table
    assert "30 parameters, 120 bytes; 60 bytes per device (50.0%) on a mesh of 8 devices" in table


def test_table_html_has_every_cell():
    table, _, _ = _table(context=2, tensor=4)
    text = unescape(table._repr_html_())
    # the heading, the totals, and the end of the element
    assert len(text.splitlines()) == len(table.rows) + 3
    for row in table.rows:
        for cell in row.cells:
            assert cell in text
    assert table.totals in text
