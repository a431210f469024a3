"""Experts against `transformers`: balance losses, and weights in MXFP4."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import load
from jaxlc.hf.load import paths_of
from jaxlc.models.quantized import is_quantized
from jaxlc.sharding.document_layout import zigzag_order
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.batch import BATCH_SPEC, Batch
from jaxlc.step.step import build_step
from tests.hf.comparison import (
    by_names_in_files,
    config_of,
    needs_transformers,
    relative_error,
    run_jobs,
    step_of,
    tokens_of,
)
from tests.hf.models import CASES, tensors_of, write_model, write_tensors

MXFP4 = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
_LAST_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _quantized_tensors() -> dict[str, np.ndarray]:
    """Those of gpt_oss, with random blocks and scales in place of the weights of experts."""
    rng, tensors = np.random.default_rng(0), {}
    for name, x in tensors_of("gpt_oss").items():
        if not name.endswith("_proj") or ".experts." not in name:
            tensors[name] = x
            continue
        experts, inputs, outputs = x.shape
        tensors[f"{name}_blocks"] = rng.integers(
            0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8
        )
        tensors[f"{name}_scales"] = rng.integers(
            120, 126, (experts, outputs, inputs // 32), dtype=np.uint8
        )
    return tensors


@pytest.fixture
def quantized(tmp_path):
    """A model with experts in MXFP4."""
    directory = write_model(tmp_path / "model", "gpt_oss", quantization_config=MXFP4)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    write_tensors(directory, _quantized_tensors(), num_files=2)
    return directory


def test_mxfp4_weights_on_a_mesh_equal_their_definition(quantized):
    """Shards cut blocks of 32 inputs."""
    step = step_of(quantized, 64, dict(context=4, tensor=2))
    params = dict(paths_of(load_pretrained(step)[0]))
    tensors = _quantized_tensors()
    for layer in range(2):  # the third layer is in last_layers
        kind = ("sliding", "full")[layer]
        for param, name in (
            ("expert_gate", "gate_up"),
            ("expert_up", "gate_up"),
            ("expert_down", "down"),
        ):
            stored = f"model.layers.{layer}.mlp.experts.{name}_proj"
            packed, scales = tensors[f"{stored}_blocks"], tensors[f"{stored}_scales"]
            values = np.stack([_LAST_VALUES[packed % 16], _LAST_VALUES[packed // 16]], -1)
            values = values.reshape(*packed.shape[:-1], 32) * 2.0 ** (
                scales[..., None].astype(int) - 127
            )
            weight = values.reshape(*packed.shape[:2], -1).swapaxes(1, 2)
            columns = dict(expert_gate=slice(0, None, 2), expert_up=slice(1, None, 2)).get(
                param, slice(None)
            )
            path = f"layers/mlp/{param}"
            np.testing.assert_array_equal(
                np.asarray(params[path])[layer], weight[..., columns], err_msg=kind
            )


@needs_transformers
def test_mxfp4_weights_equal_those_of_transformers_bit_for_bit(quantized, tmp_path):
    job = dict(job="dequantize", directory=str(quantized))
    expected = run_jobs(tmp_path, {"weights": job})["weights"]
    step = step_of(quantized, 64, {})
    got = by_names_in_files(step, load_pretrained(step)[0])
    names = [name for name in expected if name != "version"]
    assert len(names) == 6
    for name in names:
        bits = got[name].astype(ml_dtypes.bfloat16).view(np.uint16)
        np.testing.assert_array_equal(bits, expected[name], err_msg=name)


def _frozen_step(directory, mesh, frozen="mxfp4"):
    settings = config_of(directory, 64, mesh)
    settings.precision.frozen = frozen
    settings.lora = dict(rank=2, projections=("query", "attention_projected"))
    config = load(settings)
    return build_step(config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))


def test_experts_in_mxfp4_are_loaded_as_they_are_on_every_mesh(quantized):
    params, line = load_pretrained(_frozen_step(quantized, {}))
    on_mesh, _ = load_pretrained(_frozen_step(quantized, dict(context=4, tensor=2), "nf4"))
    plain = dict(paths_of(load_pretrained(step_of(quantized, 64, {}))[0]))
    assert "quantized" not in line
    params, on_mesh, tensors = dict(paths_of(params)), dict(paths_of(on_mesh)), _quantized_tensors()
    paths = [path for path, x in params.items() if is_quantized(x)]
    assert len(paths) == 2 * 3
    for path in paths:
        for ours, theirs in zip(params[path].arrays, on_mesh[path].arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(
            params[path].dequantized(), plain[path].astype(ml_dtypes.bfloat16)
        )
    up = tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"][:, 1::2]
    np.testing.assert_array_equal(params["layers/mlp/expert_up"].codes[1], up.reshape(8, 64, -1))


@pytest.mark.full
def test_experts_in_bf16_are_quantized_to_mxfp4_without_a_change(quantized, tmp_path):
    """If they were dequantized from it."""
    params, _ = load_pretrained(_frozen_step(quantized, {}))
    step, in_bf16 = step_of(quantized, 64, {}), write_model(tmp_path / "bf16", "gpt_oss")
    weights = by_names_in_files(step, load_pretrained(step)[0])
    write_tensors(in_bf16, weights, num_files=2)
    again, line = load_pretrained(_frozen_step(in_bf16, dict(context=2)))
    assert "quantized to MXFP4" in line
    params, again = dict(paths_of(params)), dict(paths_of(again))
    for path in (path for path, x in params.items() if is_quantized(x)):
        np.testing.assert_array_equal(params[path].dequantized(), again[path].dequantized())


def _batch(step, tokens: np.ndarray) -> Batch:
    num_tokens = tokens.shape[1]
    order = zigzag_order(num_tokens, step.mesh.shape["context"])
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    positions = np.broadcast_to(np.arange(num_tokens), tokens.shape)
    arrays = tokens, np.roll(tokens, -1, 1), weights, positions, np.ones(tokens.shape)
    arrays = [x if x.dtype == np.float32 else x.astype(np.int32) for x in arrays]
    return Batch(
        *(
            jax.device_put(x[None][:, :, order], NamedSharding(step.mesh, BATCH_SPEC))
            for x in arrays
        )
    )


@needs_transformers
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
def test_balance_loss_and_its_gradients_equal_transformers(case, tmp_path):
    directory, tokens = write_model(tmp_path / "model", case, dtype=np.float32), tokens_of(32)
    job = dict(
        job="balance_gradients", directory=str(directory), tokens=tokens.tolist(), coefficient=0.5
    )
    expected = run_jobs(tmp_path, {"balance": job})["balance"]
    for mesh in ({}, dict(context=4, tensor=2)):
        config = config_of(directory, 32, mesh)
        config.train.balance_loss = 0.5
        config = load(config)
        step = build_step(config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))
        batch = _batch(step, tokens)
        _, gradients, _, experts = jax.jit(step.objective.loss_and_grads)(
            load_pretrained(step)[0], batch
        )
        np.testing.assert_allclose(experts.balance_loss, expected["balance_loss"], rtol=1e-6)
        for name, gradient in by_names_in_files(step, gradients).items():
            mean = gradient / np.asarray(batch.loss_weights).sum()
            assert relative_error(mean, expected[f"gradient/{name}"]) <= 1e-4, (name, mesh)


def test_export_of_mxfp4_model_has_no_quantization(quantized, tmp_path):
    import jaxlc
    from tests.hf.test_export import config_of as run_config
    from tests.train.runs import save_step_0

    save_step_0(run_config(quantized), tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == CASES["gpt_oss"].config
    shutil.rmtree(out)


@needs_transformers
def test_export_of_frozen_experts_has_their_blocks_and_scales(quantized, tmp_path):
    import jaxlc
    from tests.hf.test_export import config_of as run_config
    from tests.hf.test_export import tensors_in
    from tests.train.runs import save_step_0

    settings = run_config(quantized, precision__frozen="mxfp4")
    settings.lora = dict(rank=2, projections=("query", "attention_projected"))
    settings.train.checkpoint_frozen = False
    save_step_0(settings, tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config == CASES["gpt_oss"].config | dict(quantization_config=MXFP4)
    expected, written = _quantized_tensors(), tensors_in(out)
    assert written.keys() == expected.keys()
    in_4_bits = [name for name in expected if name.endswith(("_blocks", "_scales"))]
    assert len(in_4_bits) == 2 * 2 * 3
    for name in in_4_bits:
        np.testing.assert_array_equal(written[name], expected[name])
    jobs = {
        "before": dict(job="dequantize", directory=str(quantized)),
        "after": dict(job="weights", directory=str(out)),
    }
    before, after = run_jobs(tmp_path, jobs).values()
    for name in (name for name in before if name != "version"):
        np.testing.assert_array_equal(after[name], before[name])
    base = jaxlc.export(tmp_path / "run", tmp_path / "base", base=str(quantized))
    assert "quantization_config" not in json.loads((base / "config.json").read_text())
    trained = tmp_path / "experts"
    settings.lora.projections = ("expert_up",)
    save_step_0(settings, trained)
    merged = tensors_in(jaxlc.export(trained, tmp_path / "merged"))
    assert not [name for name in merged if name.endswith(("_blocks", "_scales"))]
