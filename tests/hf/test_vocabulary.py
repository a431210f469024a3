"""Larger vocabularies than that of the model: rows of new tokens, training, exports, and their
distribution against `transformers`.
"""

import json

import jax
import numpy as np
import pytest

import jaxlc
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import load
from jaxlc.core.errors import UserError
from jaxlc.data.data_sources import load_matching_tokenizer
from jaxlc.hf.load import paths_of
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from tests.hf.comparison import needs_transformers, run_jobs
from tests.hf.models import tensors_of, write_model, write_tensors
from tests.hf.test_export import batches, config_of, tensors_in
from tests.hf.test_load import rewrite
from tests.train.runs import save_step_0

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")
OLD, NEW = 61, 65  # tokens
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def extended(init_from, num_tokens=NEW, mesh=None, **settings):
    """The config of a run with `num_tokens` tokens, on one device unless `mesh` is given."""
    config = config_of(init_from, **settings)
    config.mesh, config.model.vocab_size = mesh or {}, num_tokens
    return config


def loaded(config):
    """Parameters by path, without vocabulary padding, and the line of the start report."""
    config = load(config)
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices])
    params, line = load_pretrained(build_step(config, mesh))
    arrays = {path: np.asarray(x) for path, x in paths_of(params)}
    size = config.model.vocab_size
    for name, axis in (("embedding", 0), ("head", 1)):
        if name in arrays:
            padding = np.take(arrays[name], range(size, arrays[name].shape[axis]), axis)
            assert not padding.any()
            arrays[name] = np.take(arrays[name], range(size), axis)
    return arrays, line


def distribution_of(rows):
    rows = rows.astype(np.float64)
    return rows.mean(0), np.cov(rows, rowvar=False, bias=True)


def assert_drawn(new, old):
    """Compares the sample mean and covariance with their expectation: chi-squared variables with D
    and with N x D degrees of freedom.
    """
    mean, covariance = distribution_of(old)
    (num_rows, width), inverse = new.shape, np.linalg.inv(1e-9 * covariance)
    centered = new - mean
    squares = np.einsum("nd,de,ne->n", centered, inverse, centered)
    assert abs(squares.mean() / width - 1) < 5 * (2 / (num_rows * width)) ** 0.5
    deviation = centered.mean(0)
    assert abs(num_rows * deviation @ inverse @ deviation - width) < 5 * (2 * width) ** 0.5


def test_new_rows_are_drawn_from_the_distribution_of_the_others(tmp_path):
    directory = write_model(tmp_path / "model", "llama", dtype=np.float32)
    params, line = loaded(extended(directory, num_tokens=2061))
    assert line.endswith("; new rows of embedding and head for tokens from 61 on")
    tensors = tensors_of("llama", np.float32)
    embedding, head = params["embedding"], params["head"].T
    for rows, name in ((embedding, EMBEDDING), (head, HEAD)):
        np.testing.assert_array_equal(rows[:OLD], tensors[name])
        assert_drawn(rows[OLD:], tensors[name])
    differences = [rows[OLD:] - rows[:OLD].mean(0) for rows in (embedding, head)]
    correlation = np.corrcoef(differences[0].ravel(), differences[1].ravel())[0, 1]
    assert abs(correlation) < 5 * differences[0].size ** -0.5


def test_new_rows_depend_on_the_seed_and_not_on_the_mesh(tmp_path):
    directory = write_model(tmp_path / "model", "llama", dtype=np.float32)
    expected, _ = loaded(extended(directory))
    for mesh in (dict(tensor=2, fsdp=2), dict(context=4, tensor=2)):  # 65 ids are padded to 66
        params, _ = loaded(extended(directory, mesh=mesh))
        assert params.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_array_equal(params[path], value, err_msg=path)
    other, _ = loaded(extended(directory, train__seed=1))
    np.testing.assert_array_equal(other["embedding"][:OLD], expected["embedding"][:OLD])
    assert (other["embedding"][OLD:] != expected["embedding"][OLD:]).mean() > 0.9


def same_rows(tensors):
    """Twice the number of rows: their covariance has half the rank."""
    rows = tensors[EMBEDDING]
    return tensors | {EMBEDDING: np.concatenate([rows[:16]] * 4)[: len(rows)]}


def test_new_rows_are_the_mean_if_the_covariance_is_singular(tmp_path):
    directory = write_model(tmp_path / "model", "llama_tied", dtype=np.float32)
    rewrite(directory, same_rows)
    params, line = loaded(extended(directory))
    assert line.endswith("; new rows of embedding for tokens from 61 on")
    mean = same_rows(tensors_of("llama_tied", np.float32))[EMBEDDING].astype(np.float64).mean(0)
    np.testing.assert_array_equal(
        params["embedding"][OLD:], np.tile(mean.astype(np.float32), (NEW - OLD, 1))
    )


def test_smaller_vocabulary_than_that_of_the_model_raises(tmp_path):
    directory = write_model(tmp_path / "model", "llama")
    with pytest.raises(UserError, match="config.model.vocab_size=60 contradicts .*, which has 61"):
        load(extended(directory, num_tokens=60))


def test_tokenizer_may_have_the_new_tokens(tmp_path):
    directory = write_model(tmp_path / "model", "llama")
    config = extended(directory, num_tokens=257, data__tokenizer="bytes")
    assert load_matching_tokenizer(load(config)).vocab_size == 257
    config.model.vocab_size = 256
    with pytest.raises(
        UserError, match="and the model 256; set .*, or --config.model.vocab_size=257, which"
    ):
        load_matching_tokenizer(load(config))


def lora_config(directory, steps, trainable):
    config = extended(directory, mesh=dict(data=2, context=2, tensor=2), train__steps=steps)
    config.lora = dict(rank=2)
    config.precision.frozen = "fp32"
    config.optimizer = dict(learning_rate=0.01, schedule="constant", warmup_steps=0)
    config.train.update(checkpoint_frozen=False, trainable=trainable)
    return config


def test_new_rows_with_adapters_are_trained_resumed_and_exported(tmp_path):
    """The embedding is trained. Its checkpoints do not contain the head, which is drawn again when
    the run resumes.
    """
    directory = write_model(tmp_path / "model", "llama", dtype=np.float32)
    first, _ = loaded(extended(directory))
    for steps in (1, 2):  # the second one resumes
        config = lora_config(directory, steps, ("embedding",))
        result = jaxlc.train.run(config, tmp_path / "run", batches=batches(2, NEW))
    embedding = np.asarray(result.params["embedding"])[:NEW]
    assert (embedding[OLD:] != first["embedding"][OLD:]).any(axis=1).all()
    np.testing.assert_array_equal(np.asarray(result.params["head"])[:, :NEW], first["head"])
    out = jaxlc.export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    assert json.loads((out / "config.json").read_text())["vocab_size"] == NEW
    exported = tensors_in(out)
    np.testing.assert_array_equal(exported[EMBEDDING], embedding)
    np.testing.assert_array_equal(exported[HEAD].T, first["head"])
    loaded_again, line = loaded(config_of(out))
    assert "new rows" not in line
    np.testing.assert_array_equal(loaded_again["embedding"], embedding)


def test_run_that_starts_from_a_run_has_its_rows_and_may_add_more(tmp_path):
    directory = write_model(tmp_path / "model", "llama", dtype=np.float32)
    first, _ = loaded(extended(directory))
    save_step_0(extended(directory, mesh=dict(context=4, tensor=2)), tmp_path / "run")
    for num_tokens, mesh in ((NEW, {}), (70, {}), (70, dict(context=2, tensor=4))):
        params, line = loaded(extended(tmp_path / "run", num_tokens, mesh))
        assert ("new rows" in line) == (num_tokens > NEW)
        np.testing.assert_array_equal(params["embedding"][:NEW], first["embedding"])
        np.testing.assert_array_equal(params["head"][:, :NEW], first["head"])
        assert np.ptp(params["embedding"], axis=1).min() > 0
    out = jaxlc.export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    np.testing.assert_array_equal(tensors_in(out)[HEAD], first["head"].T)


def test_frozen_new_rows_are_named_with_the_setting_that_trains_them(tmp_path):
    directory = write_model(tmp_path / "model", "llama_tied")
    _, line = loaded(lora_config(directory, 1, ("*norm*",)))
    assert line.endswith(
        "from 61 on, which are frozen: config.train.trainable=embedding trains them"
    )


def test_export_drops_untrained_tensors_with_a_row_for_each_token(tmp_path, capsys):
    """Those of multi-token prediction; the others are copied."""
    source = write_model(tmp_path / "model", "glm4_moe")
    rows = np.ones((OLD, 32), np.float32)
    names = [f"model.layers.3.{x}.weight" for x in ("embed_tokens", "shared_head.head", "eh_proj")]
    others = dict(zip(names, (rows, rows, np.ones((32, 64), np.float32))))
    write_tensors(source, tensors_of("glm4_moe") | others, num_files=2)
    save_step_0(extended(source), tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out")
    assert f"no {names[0]}, {names[1]}: with rows for 61 of 65 tokens" in capsys.readouterr().err
    exported = tensors_in(out)
    assert exported.keys() == tensors_of("glm4_moe").keys() | {names[2]}
    assert exported[EMBEDDING].shape == (NEW, 32)


def test_export_of_a_model_with_images_has_the_new_rows(tmp_path):
    source = write_model(tmp_path / "model", "qwen3_vl", dtype=np.float32)
    save_step_0(extended(source), tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    assert json.loads((out / "config.json").read_text())["text_config"]["vocab_size"] == NEW
    before, after = tensors_in(source), tensors_in(out)
    assert before.keys() == after.keys()
    name = next(name for name in after if name.endswith("embed_tokens.weight"))
    assert after[name].shape[0] == NEW
    np.testing.assert_array_equal(after[name][:OLD], before[name])


@needs_transformers
def test_new_rows_have_the_distribution_of_transformers(tmp_path):
    """Of rows with a covariance of full rank, and of others, whose new rows are their mean."""
    full = write_model(tmp_path / "full", "llama", dtype=np.float32)
    singular = write_model(tmp_path / "singular", "llama_tied", dtype=np.float32)
    rewrite(singular, same_rows)
    jobs = {
        path.name: dict(job="resize", directory=str(path), num_tokens=2061)
        for path in (full, singular)
    }
    expected = run_jobs(tmp_path, jobs)
    for name in (EMBEDDING, HEAD):
        assert_drawn(expected["full"][name][OLD:], tensors_of("llama", np.float32)[name])
    params, _ = loaded(extended(singular))
    rows = expected["singular"][EMBEDDING][OLD:]
    assert (rows == rows[0]).all()
    np.testing.assert_allclose(params["embedding"][OLD:], rows[: NEW - OLD], rtol=1e-5, atol=1e-8)
