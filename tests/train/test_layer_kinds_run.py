"""A model whose layers differ in size, by the commands: trained, resumed on another mesh, loaded,
generated from.
"""

import dataclasses
import shutil

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxlc
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import load, read_config
from jaxlc.core.errors import UserError
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from tests.step.synthetic import MIXED_KINDS
from tests.train import runs

MODEL = f"""
    config.model.update({MIXED_KINDS!r}, layer_kinds=("sliding", "wide"))
    config.data.seq_len = 64
    config.attention.document_mask = False
    config.train.update(steps=4, global_batch_size=8, eval_sequences=8, checkpoint_every_steps=2)
    config.memory.remat = "none"
    return config
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory):
    path = runs.write_config(tmp_path_factory.mktemp("kinds"))
    path.write_text(path.read_text().replace("\n    return config\n", MODEL))
    return path


@pytest.fixture(scope="module")
def workdir(config_path, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    runs.train(config_path, workdir, mesh__context=2, mesh__fsdp=4, mesh__tensor=1)
    return workdir


@pytest.mark.heavy
def test_run_resumed_on_another_mesh_has_equal_losses(config_path, workdir, tmp_path):
    resumed = shutil.copytree(workdir, tmp_path / "copy")
    shutil.rmtree(resumed / "checkpoints/4")
    output = runs.train(config_path, resumed, mesh__context=1, mesh__fsdp=4, mesh__tensor=2)
    assert "resuming from step 2 " in output
    losses = [
        [row["loss"] for row in runs.rows(directory) if "loss" in row]
        for directory in (resumed, workdir)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.heavy
def test_greedy_tokens_are_those_of_a_forward_pass(workdir):
    result = jaxlc.load(workdir, mesh=dict())
    prompt = list(b"12 7 31 ")
    [generation] = jaxlc.generate(result, [prompt], max_tokens=4)
    logits = result.model.logits([*prompt, *generation.tokens[:-1]])
    np.testing.assert_array_equal(generation.tokens, logits[len(prompt) - 1 :].argmax(-1))


def test_export_and_run_are_models_to_start_from(config_path, tmp_path):
    config = read_config(str(config_path))
    runs.save_step_0(config, tmp_path / "run")
    params = flatten_dict(jaxlc.load(tmp_path / "run").params, sep="/")
    assert params["layers/wide/attention/wk"].shape == (1, 32, 4, 12)
    assert params["layers/sliding/attention/wk"].shape == (1, 32, 2, 8)
    exported = jaxlc.export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    for source in (tmp_path / "run", exported):
        config.model.init_from = str(source)
        config.model.kinds.wide.ffn_dim = 64
        advice = "--config.model.kinds.wide.ffn_dim=96"
        with pytest.raises(
            UserError,
            match=f"=64 contradicts .*, which has 96: remove that setting, or use {advice}",
        ):
            load(config)
        config.model.kinds.wide.ffn_dim = 96
        loaded = load(config)
        assert loaded.model.layer_config("wide").ffn_dim == 96
        step = build_step(loaded, make_mesh(loaded.mesh))
        weights = flatten_dict(load_pretrained(step)[0], sep="/")
        for path, values in params.items():
            np.testing.assert_array_equal(weights[path], values, path)
        without_kinds = dataclasses.replace(
            loaded, model=dataclasses.replace(loaded.model, kinds=())
        )
        with pytest.raises(
            UserError, match="kinds.wide.num_kv_heads=0 contradicts .*, which has 4"
        ):
            load_pretrained(build_step(without_kinds, step.mesh))
