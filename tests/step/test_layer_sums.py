"""Sums that layers return: equal values and gradients on one device, on meshes, in tiles, groups and host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.models import decoder
from jaxlc.models.layers import DecoderLayer
from tests.step.synthetic import MIXED_KINDS, make_batch, natural_rows, put_params, small_config, small_step
from tests.tolerances import FLOAT32_PARITY, max_relative_error

MODEL = MIXED_KINDS | dict(num_layers=5, layer_kinds=("full", "wide"), window=0)  # two periods and a last layer
CASES = {
    "mesh": (dict(context=2, tensor=2), dict(remat="attention")),
    "groups": (dict(fsdp=2), dict(remat="full", layers_per_remat_group=2)),
    "tiles": (dict(context=2), dict(remat="full", tile_tokens=24)),
    "host": (dict(tensor=2), dict(parameters="host", remat="full")),  # on the device before JAX 0.11
}


@pytest.fixture(autouse=True)
def squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers return the sum of squares of their output, and those with wide heads also their sum."""
    after_attention = DecoderLayer.after_attention

    def with_sums(self, x_BTD, out_BTNH, *, shard):
        output = after_attention(self, x_BTD, out_BTNH, shard=shard)
        y_BTD = output.x_BTD.astype(jnp.float32)
        is_wide = self.attention.wq.shape[-1] == MODEL["kinds"]["wide"]["head_dim"]
        sums = dict(squares=(y_BTD**2).sum()) | (dict(total=y_BTD.sum()) if is_wide else {})
        return output._replace(sums=sums)

    monkeypatch.setattr(DecoderLayer, "after_attention", with_sums)


def _sums_and_gradients(params, mesh, memory):
    """(parameters, sums, gradients of a function of them that is not linear)."""
    step = small_step(small_config(model=MODEL, mesh=mesh, memory=memory))
    params = step.init().params if params is None else put_params(step, params)
    batch = jax.tree.map(lambda x: x[0], make_batch(step, natural_rows()))

    def objective(params):
        *_, sums = step.objective._hidden_and_head(decoder.Params(params), batch)
        return (sums["squares"] ** 2).sum() / 1e4 + (sums["total"] ** 2).sum(), sums

    gradients, sums = jax.jit(jax.grad(objective, has_aux=True))(params)
    return params, sums, gradients["layers"]


@pytest.fixture(scope="module")
def one_device():
    return []


@pytest.mark.parametrize("case", CASES)
def test_sums_of_layers_and_their_gradients_equal_one_device(case, one_device):
    if not one_device:
        one_device.append(_sums_and_gradients(None, {}, dict(remat="none")))
    params, expected, expected_gradients = one_device[0]
    assert (expected["squares"].shape, expected["total"].shape) == ((5,), (2,))
    _, sums, gradients = _sums_and_gradients(params, *CASES[case])
    errors = jax.tree.map(max_relative_error, (sums, gradients), (expected, expected_gradients))
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors
    assert np.all(np.abs(np.asarray(gradients["wide"]["mlp"]["w_down"])).max((1, 2)) > 0)
