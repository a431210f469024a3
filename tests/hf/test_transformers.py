"""Logits and gradients against `transformers`, in float32.

The environment variable JAXLC_TRANSFORMERS_PYTHON names a Python that has torch and transformers; make one with

    python3.11 -m venv DIRECTORY && DIRECTORY/bin/pip install torch transformers ml_dtypes
"""

import functools
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

import jaxlc
from jaxlc.config import load, to_dict
from jaxlc.config.families import FAMILIES
from jaxlc.hf.load import layouts_of, paths_of
from jaxlc.models import decoder
from jaxlc.sharding.mesh import make_mesh
from jaxlc.train.batch import BATCH_SPEC, Batch
from jaxlc.train.checkpoint import CHECKPOINTS_DIRECTORY, Checkpoints
from jaxlc.train.language_model import LanguageModel
from jaxlc.train.pretrained_params import load_pretrained
from jaxlc.train.step import build_step
from tests.hf.models import CASES, LLAMA3_ROPE, write_model

PYTHON = os.environ.get("JAXLC_TRANSFORMERS_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs torch and transformers: set JAXLC_TRANSFORMERS_PYTHON to a Python that has them"
)
ORIGINAL_TOKENS = LLAMA3_ROPE["original_max_position_embeddings"]
LENGTHS = (ORIGINAL_TOKENS // 2, 4 * ORIGINAL_TOKENS)  # below and 4 times beyond the original context
MESHES = {"one device": {}, "context=4 x tensor=2": dict(context=4, tensor=2)}


def tokens_of(num_tokens: int) -> np.ndarray:
    return np.random.default_rng(num_tokens).integers(0, 61, (2, num_tokens))


def reference(directory: Path, num_tokens: int) -> dict[str, np.ndarray]:
    """Logits and gradients of transformers."""
    tokens, out = directory / f"tokens{num_tokens}.npy", directory / f"reference{num_tokens}.npz"
    if not out.exists():
        np.save(tokens, tokens_of(num_tokens))
        script = Path(__file__).with_name("reference.py")
        done = subprocess.run([PYTHON, script, directory, tokens, out], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return dict(np.load(out))


@functools.cache
def model_directory(root: Path, case: str) -> Path:
    return write_model(root / case, case, dtype=np.float32)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    return functools.partial(model_directory, tmp_path_factory.mktemp("models"))


def step_of(directory: Path, num_tokens: int, mesh: dict, **model):
    config = ConfigDict(
        {
            "model": {"init_from": str(directory), **model},
            "mesh": mesh,
            "data": {"seq_len": num_tokens},
            "train": {"global_batch_size": 2, "eval_sequences": 2},
            "precision": {"compute": "fp32"},
        }
    )
    config = load(config)
    return build_step(config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case, num_tokens, mesh, directory_of):
    directory = directory_of(case)
    expected = reference(directory, num_tokens)
    step = step_of(directory, num_tokens, MESHES[mesh])
    params, _ = load_pretrained(step)
    assert expected["logits"].std() >= 1
    logits = LanguageModel(step, params, None).logits(tokens_of(num_tokens))
    errors = {"logits": relative_error(logits, expected["logits"])}
    for name, gradient in gradients_of(step, params, num_tokens).items():
        errors[name] = relative_error(gradient, expected[f"gradient/{name}"])
    assert errors.keys() - {"logits"} == {name.removeprefix("gradient/") for name in expected if "/" in name}
    worst = max(errors, key=errors.__getitem__)
    print(f"{case}, {num_tokens} tokens, {mesh}: logits {errors['logits']:.1e}, largest {worst} {errors[worst]:.1e}")
    assert errors[worst] <= 1e-4, worst


def gradients_of(step, params, num_tokens: int) -> dict[str, np.ndarray]:
    """Gradients of the mean loss by the names and in the shapes of the files."""
    tokens, order = tokens_of(num_tokens).astype(np.int32), step.sequence_order
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    positions = np.broadcast_to(np.arange(num_tokens, dtype=np.int32), tokens.shape)
    arrays = (tokens, np.roll(tokens, -1, 1), weights, positions, np.ones_like(tokens))
    sharding = NamedSharding(step.mesh, BATCH_SPEC)
    batch = Batch(*(jax.device_put(x[None][:, :, order], sharding) for x in arrays))
    _, gradients, _ = jax.jit(step.objective.loss_and_grads)(params, batch)
    model = step.config.model
    family = FAMILIES["qwen3" if model.qk_norm == "head" else "llama"]
    abstract = dict(paths_of(decoder.abstract_params(model, model.vocab_size)))
    layouts = layouts_of(family, abstract, dict(paths_of(decoder.dims_of(model))), model.vocab_size)
    by_name = {}
    for path, gradient in paths_of(gradients):
        layout, array = layouts[path], np.asarray(gradient) / weights.sum()
        array = array[tuple(slice(size) for size in abstract[path].shape)]  # without vocabulary padding
        of_layers = [array] if layout.layers is None else array
        for name, of_layer in zip(layout.names, of_layers, strict=True):
            by_name[name] = layout.to_stored(of_layer)
    return by_name


@pytest.mark.parametrize("case", ["llama", "llama_tied"])
def test_rope_scaling_has_an_effect(case, directory_of):
    """Without it, the comparison above would fail by far."""
    directory, num_tokens = directory_of(case), LENGTHS[1]
    step = step_of(directory, num_tokens, {}, rope_scaling="none")
    logits = LanguageModel(step, load_pretrained(step)[0], None).logits(tokens_of(num_tokens))
    assert np.abs(logits - reference(directory, num_tokens)["logits"]).max() >= 0.1


def test_exported_model_opens_in_transformers(directory_of, tmp_path):
    """An exported model with another RoPE base gives the logits of the run."""
    scaling = dict(rope_scaling="llama3", rope_scaling_factor=4.0, rope_scaling_original_tokens=8192)
    step = step_of(directory_of("qwen3"), 64, dict(context=2, tensor=2), rope_theta=1e6, **scaling)
    params = load_pretrained(step)[0]
    checkpoints = Checkpoints(tmp_path / CHECKPOINTS_DIRECTORY, keep=1, warn=print)
    checkpoints.save(1, step.init(params), dict(step=1, next_row=0, corpus="", config=to_dict(step.config)))
    checkpoints.close()
    out = jaxlc.export(tmp_path, tmp_path / "out", dtype="fp32")
    logits = LanguageModel(step, params, None).logits(tokens_of(LENGTHS[1]))
    assert relative_error(logits, reference(out, LENGTHS[1])["logits"]) <= 1e-4
