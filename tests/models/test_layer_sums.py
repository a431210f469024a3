"""Sums that layers return through scans, remat groups and meshes; `test_layer_tiles` and
`test_offloaded_layers` have those of tiles and prefetched layers."""

import jax
import jax.numpy as jnp
import pytest

from jaxlc.config import MemoryConfig
from jaxlc.config.models.model_schema import KindConfig
from jaxlc.models import decoder
from jaxlc.models.layer_stack import DecoderLayer
from jaxlc.step.remat import make_remat
from tests.models.small import context_of, small_inputs, small_mesh, small_model, small_params
from tests.tolerances import FLOAT32_PARITY, max_relative_error

WIDE = KindConfig(name="wide", head_dim=10, ffn_dim=40)
# two periods and a last layer
MODEL = small_model(num_layers=5, layer_kinds=("full", "wide"), kinds=(WIDE,))


@pytest.fixture(autouse=True)
def squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers return the sum of squares of their output, and wide layers also its sum."""
    after_attention = DecoderLayer.after_attention

    def with_sums(self, *operands, shard):
        output, chosen = after_attention(self, *operands, shard=shard)
        sums = dict(squares=(output.x_BTD**2).sum())
        if self.attention.wq.shape[-1] == WIDE.head_dim:
            sums |= dict(total=output.x_BTD.sum())
        return output._replace(sums=sums), chosen

    monkeypatch.setattr(DecoderLayer, "after_attention", with_sums)


def _sums_and_gradients(mesh=None, memory=None):
    """(sums, gradients of a function of the sums that is not linear)."""
    context = context_of(MODEL, mesh)
    if memory is not None:
        context = context._replace(remat=make_remat(memory, num_compiled=2))

    def objective(params):
        *_, sums = decoder.apply(decoder.Params(params), MODEL, *small_inputs(MODEL), context)
        weights_L = jnp.arange(1.0, 6.0)
        return (weights_L * sums["squares"] ** 2).sum() / 1e3 + (sums["total"] ** 2).sum(), sums

    gradients, sums = jax.jit(jax.grad(objective, has_aux=True))(small_params(MODEL))
    return sums, gradients


def test_sums_of_layers_and_their_gradients_equal_one_device_without_remat():
    expected, expected_gradients = _sums_and_gradients()
    assert (expected["squares"].shape, expected["total"].shape) == ((5,), (2,))
    assert jnp.all(jnp.abs(expected_gradients["layers"]["wide"]["mlp"]["w_down"]).max((1, 2)) > 0)
    groups = MemoryConfig(remat="full", layers_per_remat_group=2)
    for got in (
        _sums_and_gradients(small_mesh(context=2, tensor=2)),
        _sums_and_gradients(memory=groups),
    ):
        errors = jax.tree.map(max_relative_error, got, (expected, expected_gradients))
        assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors
