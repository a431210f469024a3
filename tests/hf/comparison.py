"""Shared by the comparisons with `transformers`: its process, and logits and gradients of the same
model in jaxlc.

The environment variable JAXLC_TRANSFORMERS_PYTHON names a Python that has the packages of
tests/hf/requirements.txt; `make test-transformers` makes one.
"""

import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from jaxlc.config import load
from jaxlc.config.models.config_json import family_of, language_model_of
from jaxlc.config.models.pretrained import read_json
from jaxlc.hf.load import layouts_of, paths_of, shapes_of
from jaxlc.sharding.document_layout import zigzag_order
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.batch import BATCH_SPEC, Batch
from jaxlc.step.step import build_step
from tests.hf.models import CHOICE_BIAS

PYTHON = os.environ.get("JAXLC_TRANSFORMERS_PYTHON", "")
needs_transformers = pytest.mark.skipif(
    not PYTHON,
    reason="needs torch and transformers: set JAXLC_TRANSFORMERS_PYTHON to a Python that has them",
)
ORIGINAL_TOKENS = 32  # original context of all scaled models
MESHES = {"one device": {}, "context=4 x tensor=2": dict(context=4, tensor=2)}


def tokens_of(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((num_tokens, seed)).integers(0, 60, (2, num_tokens))


def run_jobs(directory: Path, jobs: dict[str, dict]) -> dict[str, dict[str, np.ndarray]]:
    """Runs jobs of tests/hf/reference.py in one process; returns their results by the same keys."""
    outs = {key: directory / f"{i}.npz" for i, key in enumerate(jobs)}
    listed = [job | dict(out=str(outs[key])) for key, job in jobs.items()]
    (directory / "jobs.json").write_text(json.dumps(listed))
    script = Path(__file__).with_name("reference.py")
    done = subprocess.run([PYTHON, script, directory / "jobs.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {key: dict(np.load(out)) for key, out in outs.items()}


def config_of(directory: Path, num_tokens: int, mesh: dict, **model) -> ConfigDict:
    return ConfigDict(
        {
            "model": {"init_from": str(directory), **model},
            "mesh": mesh,
            "data": {"seq_len": num_tokens},
            "train": {"global_batch_size": 2, "eval_sequences": 2},
            "precision": {"compute": "fp32"},
        }
    )


def step_of(
    directory: Path, num_tokens: int, mesh: dict, *, optimizer: dict | None = None, **model
):
    settings = config_of(directory, num_tokens, mesh, **model)
    settings.optimizer = optimizer or {}
    config = load(settings)
    return build_step(config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    # an expert without a token: gradient 0
    return np.abs(actual - expected).max() / (np.abs(expected).max() or 1)


def batch_of(
    step, tokens: np.ndarray, first_position: int = 0, documents: tuple[int, ...] = ()
) -> Batch:
    """One microbatch of the sequences `tokens` [B, T], in the order and with the sharding of the
    step.

    Args:
      documents: as in `evaluate`.
    """
    num_tokens = tokens.shape[1]
    lengths = documents or (num_tokens,)
    order = zigzag_order(num_tokens, step.mesh.shape["context"])
    weights = np.ones(tokens.shape, np.float32)
    weights[:, np.cumsum(lengths) - 1] = 0
    positions = np.broadcast_to(
        first_position + np.concatenate([np.arange(n) for n in lengths]), tokens.shape
    )
    segments = np.broadcast_to(np.repeat(np.arange(len(lengths)) + 1, lengths), tokens.shape)
    arrays = [tokens, np.roll(tokens, -1, 1), weights, positions, segments]
    arrays = [x if x.dtype == np.float32 else x.astype(np.int32) for x in arrays]
    return Batch(
        *(
            jax.device_put(x[None][:, :, order], NamedSharding(step.mesh, BATCH_SPEC))
            for x in arrays
        )
    )


def evaluate(
    step, params, tokens: np.ndarray, first_position: int = 0, documents: tuple[int, ...] = ()
):
    """Logits [B, T, V] in natural order, and gradients of the mean loss.

    Args:
      documents: the lengths of the documents of each sequence. Empty: it is one document.
    """
    batch = batch_of(step, tokens, first_position, documents)

    def compute(params, batch):
        features_BTD, head_DV = step.objective.features(params, jax.tree.map(lambda x: x[0], batch))
        _, gradients, *_ = step.objective.loss_and_grads(params, batch)
        return jnp.einsum("BTD,DV->BTV", features_BTD, head_DV), gradients

    logits_BTV, gradients = jax.jit(compute)(params, batch)
    natural = np.argsort(zigzag_order(tokens.shape[1], step.mesh.shape["context"]))
    logits_BTV = np.asarray(logits_BTV)[:, natural, : step.config.model.vocab_size]
    num_targets = np.asarray(batch.loss_weights).sum()
    return logits_BTV, jax.tree.map(lambda x: np.asarray(x) / num_targets, gradients)


def by_names_in_files(step, params) -> dict[str, np.ndarray]:
    """A tree of parameters by the names and in the shapes of the files."""
    model = step.config.model
    content = read_json(Path(model.init_from) / "config.json")
    family = family_of(language_model_of(content), model)
    abstract = shapes_of(model)
    layouts = layouts_of(family, model)
    by_name = {}
    for path, param in paths_of(params):
        layout = layouts[path]
        # without vocabulary padding
        array = np.asarray(param)[tuple(slice(size) for size in abstract[path].shape)]
        for place, x in zip(layout.places, layout.arrays(array), strict=True):
            # several parameters may be regions of one tensor
            tensor = by_name.setdefault(
                layout.name_at(place), np.zeros(layout.stored_shape, x.dtype)
            )
            for region, part in layout.stored_parts(x, place):
                tensor[region] = part
    return by_name


def errors_of(
    step, params, expected: dict[str, np.ndarray], num_tokens: int, first_position: int = 0
) -> dict[str, float]:
    """Largest relative errors of the logits and of the gradient of each parameter, by its name in
    the files.
    """
    logits, gradients = evaluate(step, params, tokens_of(num_tokens), first_position)
    errors = {"logits": relative_error(logits, expected["logits"])}
    for name, gradient in by_names_in_files(step, gradients).items():
        if name.endswith(CHOICE_BIAS):
            assert not gradient.any()
            continue
        errors[name] = relative_error(gradient, expected[f"gradient/{name}"])
    assert errors.keys() - {"logits"} == {
        name.removeprefix("gradient/") for name in expected if "/" in name
    }
    return errors


def assert_small(errors: dict[str, float], what: str) -> None:
    worst = max(errors, key=errors.__getitem__)
    print(f"{what}: logits {errors['logits']:.1e}, largest {worst} {errors[worst]:.1e}")
    assert errors[worst] <= 1e-4, worst
