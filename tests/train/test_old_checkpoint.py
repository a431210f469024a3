"""A checkpoint written before settings were renamed (tests/fixtures) resumes under the new names.

The fixture is a run of 6 steps: its documents, metrics.jsonl and the checkpoints of steps 3 and 6.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlc.checkpoints.checkpoint import Checkpoints
from jaxlc.config import load, read_config, to_dict
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from tests.train import runs

pytestmark = pytest.mark.jax_version

SETTINGS = dict(
    mesh__context=2,
    mesh__tensor=1,
    runtime__simulated_devices=2,
    data__seq_len=64,
    model__num_layers=2,
    model__model_dim=16,
    model__num_heads=2,
    model__num_kv_heads=1,
    model__head_dim=8,
    model__ffn_dim=32,
    data__eval_fraction=0.3,
    train__global_batch_size=2,
    train__gradient_accumulation_steps=2,
    train__eval_sequences=1,
    train__steps=6,
    train__checkpoint_every_steps=3,
)
# Compilers for other CPUs differ in the last bit, and tests run without LLVM's optimizer.
TOLERANCE = dict(rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """The run as it was written."""
    return runs.extract_old_run(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def resumed(old, tmp_path_factory) -> tuple[Path, str]:
    """The run with checkpoint 3 only, resumed to step 6 under the new names, and what it printed."""
    workdir = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(old / "checkpoints" / "3", workdir / "checkpoints" / "3")
    shutil.copy(old / "metrics.jsonl", workdir)
    cache = tmp_path_factory.mktemp("cache")
    output = runs.train_elsewhere("quickstart", workdir, data__sources=old / "docs", data__cache_dir=cache, **SETTINGS)
    return workdir, output


@pytest.fixture(scope="module")
def restore():
    """A function that restores the latest checkpoint of a directory, for the settings of the run."""
    config = read_config("quickstart")
    for path, value in SETTINGS.items():
        section, name = path.split("__")
        config[section][name] = value
    config = load(config)
    step = build_step(config, make_mesh(config.mesh, jax.devices()[:2]))

    def restore_latest(checkpoints: Path):
        """(state, meta); every array equals its stored checksum, or the checkpoint would count as damaged."""
        warnings: list[str] = []
        manager = Checkpoints(checkpoints, keep=2, warn=warnings.append)
        state, meta = manager.restore_latest(step.abstract_state, model=to_dict(config)["model"])
        manager.close()
        assert warnings == []
        return state, meta

    return restore_latest


def test_old_checkpoint_restores_all_arrays_and_data_position(old, restore, tmp_path):
    shutil.copytree(old / "checkpoints" / "3", tmp_path / "3")
    state, meta = restore(tmp_path)
    assert (int(state.step), meta["next_row"]) == (3, 6)


def test_old_checkpoint_resumes_with_the_same_data(old, resumed):
    workdir, output = resumed
    assert "resuming from step 3" in output
    assert "changed" not in output
    metas = [json.loads((run / "checkpoints/6/meta/metadata").read_text()) for run in (old, workdir)]
    assert metas[0]["corpus"] == metas[1]["corpus"]
    assert metas[0]["next_row"] == metas[1]["next_row"] == 12


def test_old_checkpoint_resumes_to_the_same_losses(old, resumed):
    expected, actual = runs.rows(old), runs.rows(resumed[0])
    assert actual[:3] == expected[:3]  # written by the old run, and kept
    assert len(actual) == len(expected)
    for row, expected_row in zip(actual, expected, strict=True):
        assert row.keys() == expected_row.keys()
        for name, value in expected_row.items():
            np.testing.assert_allclose(row[name], value, **TOLERANCE, err_msg=f"{name} of {expected_row}")


def test_old_checkpoint_resumes_to_the_same_parameters(old, resumed, restore):
    expected, _ = restore(old / "checkpoints")
    actual, _ = restore(resumed[0] / "checkpoints")
    assert int(actual.step) == int(expected.step) == 6
    pairs = zip(jax.tree.leaves(actual.params), jax.tree.leaves(expected.params), strict=True)
    for array, expected_array in pairs:
        np.testing.assert_allclose(array, expected_array, **TOLERANCE)
