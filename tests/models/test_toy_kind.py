"""A kind of layers that is added by two files outside the package, `tests/toy_kind`: no other file
knows it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file

import jaxlc
from jaxlc.config import kinds, load
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation.generator import Generator
from jaxlc.models import kinds as model_kinds
from jaxlc.step.language_model import LanguageModel
from jaxlc.step.memory import activation_bytes
from tests.step.synthetic import (
    gradients_and_loss,
    make_batch,
    natural_rows,
    put_params,
    small_config,
    small_step,
    with_mesh,
    without_padding,
)
from tests.tolerances import FLOAT32_PARITY, max_relative_error
from tests.toy_kind.config import DecayedMeanKind
from tests.toy_kind.model import DecayedMean
from tests.train.runs import save_step_0

MODEL = dict(layer_kinds=("decayed_mean", "full"))
# two start where a fragment does
ROWS = natural_rows(documents=((96,), (36, 3, 21, 13, 23), (10, -86), (-96,)))


@pytest.fixture(autouse=True, scope="module")
def _toy_kind():
    kinds.register(DecayedMeanKind())
    model_kinds.register("decayed_mean", DecayedMean)
    yield
    del kinds.MIXERS["decayed_mean"], model_kinds.MIXERS["decayed_mean"]


def toy_config(**sections):
    return small_config(model=MODEL, **sections)


@functools.cache
def on_one_device():
    """(parameters, gradients, cross entropy); heads have different decays."""
    step = small_step(toy_config())
    params = step.init().params
    layers = params["layers"]["decayed_mean"]["attention"]
    layers["decay"] = jnp.linspace(-1, 3, layers["decay"].size).reshape(layers["decay"].shape)
    gradients, loss = jax.jit(gradients_and_loss(step))(params, make_batch(step, ROWS))
    return params, gradients, loss


def test_mean_equals_a_loop_over_tokens():
    step = small_step(toy_config())
    on = model_kinds.kinds_on_mesh(step.config, step.mesh, step.compute_dtype)["decayed_mean"]
    v_BTHV = np.random.default_rng(0).standard_normal((4, 12, 4, 8), dtype=np.float32)
    decay_H = np.array([0.0, 0.3, 0.9, 0.99], np.float32)
    continues_BT = np.broadcast_to(np.arange(12) % 5 > 0, (4, 12))
    got_BTHV = DecayedMean.on_sequences(on).attend(v_BTHV, decay_H, ranges=continues_BT)
    mean_BHV = np.zeros((4, 4, 8))
    for token in range(12):
        decay_H1 = decay_H[:, None] * continues_BT[0, token]
        mean_BHV = decay_H1 * mean_BHV + (1 - decay_H[:, None]) * v_BTHV[:, token]
        np.testing.assert_allclose(got_BTHV[:, token], mean_BHV, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "memory", [dict(remat="attention"), dict(remat="full", tile_tokens=12)], ids=str
)
def test_packed_documents_on_a_mesh_equal_one_device(memory):
    params, gradients, loss = on_one_device()
    config = with_mesh(toy_config(), context=4, tensor=2)
    step = small_step(
        load(dataclasses.replace(config, memory=dataclasses.replace(config.memory, **memory)))
    )
    got, got_loss = jax.jit(gradients_and_loss(step))(
        put_params(step, params), make_batch(step, ROWS)
    )
    np.testing.assert_allclose(got_loss, loss, rtol=FLOAT32_PARITY)
    errors = jax.tree.map(lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients)
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors


def test_generated_tokens_are_the_argmax_of_one_forward_pass():
    params, *_ = on_one_device()
    prompt = np.random.default_rng(0).integers(0, 61, 75, dtype=np.int32)
    step = small_step(toy_config(mesh=dict(context=2, tensor=2)))
    generator = Generator(step, put_params(step, params), ByteTokenizer())
    tokens = generator([prompt], max_tokens=6, chunk_tokens=64)[0].tokens
    one_device = LanguageModel(small_step(toy_config()), params, ByteTokenizer())
    logits = one_device.logits(np.concatenate([prompt, tokens])[:-1], slice(len(prompt) - 1, None))
    np.testing.assert_array_equal(logits.argmax(-1), tokens)


def test_saved_activations_add_bytes_to_the_plan():
    model = dict(layer_kinds=("decayed_mean",), num_layers=8)
    configs = [
        small_config(model=model, memory=dict(remat="full", save=save))
        for save in ((), ("mean_values",))
    ]
    temporaries = [
        small_step(config).lower().compile().memory_analysis().temp_size_in_bytes
        for config in configs
    ]
    planned = activation_bytes(configs[1], ("mean_values",), 8)
    assert planned == 8 * 4 * 96 * 32 * 4  # float32 of 4 sequences
    # those of the last layer are in use
    assert 7 / 8 * planned <= temporaries[1] - temporaries[0] < 1.5 * planned


def test_exported_weights_are_transposed_and_read_again(tmp_path):
    config = toy_config(data=dict(tokenizer="bytes"))
    save_step_0(config, tmp_path / "run")
    first = jaxlc.export(tmp_path / "run", tmp_path / "first")
    tensors = load_file(next(first.glob("*.safetensors")))
    assert tensors["model.layers.0.mean.in_proj.weight"].shape == (32, 32)
    assert tensors["model.layers.0.mean.decay"].shape == (4,)
    save_step_0(ConfigDict(dict(model=dict(init_from=str(first)))), tmp_path / "again")
    again = load_file(
        next(jaxlc.export(tmp_path / "again", tmp_path / "second").glob("*.safetensors"))
    )
    assert tensors.keys() == again.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, again[name], err_msg=name)


def test_trees_are_refused():
    with pytest.raises(UserError, match="shared_prefixes=True with decayed_mean layers"):
        toy_config(attention=dict(shared_prefixes=True))
