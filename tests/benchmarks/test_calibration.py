"""The published runs, and the fit of the calibration. `python -m benchmarks.calibration` compiles
the runs.

Expected numbers are from the cited pages and computed without jaxlc.
"""

import math
from types import SimpleNamespace

import pytest

from benchmarks import calibration, calibration_fit
from benchmarks.calibration_fit import Residual
from benchmarks.published import MEASURED, estimated_figure, runs, sources, time_ratio
from jaxlc.simulate import roofline

# Name -> (sequence length, mesh, parameters in billions, as their models' pages give them).
PUBLISHED = {
    "torchtitan: Llama 3.1 8B, bf16, 8K, 8 H100": (8_192, dict(fsdp=8), 8.03),
    "torchtitan: Llama 3.1 8B, FP8, 32K, 8 H100": (32_768, dict(fsdp=8), 8.03),
    "torchtitan: Llama 3.1 8B, FP8, 64K, 8 H100": (65_536, dict(fsdp=4, context=2), 8.03),
    "torchtitan: Llama 3.1 8B, FP8, 128K, 8 H100": (131_072, dict(fsdp=2, context=4), 8.03),
    "torchtitan: Llama 3.1 8B, FP8, 256K, 8 H100": (262_144, dict(context=8), 8.03),
    "nemo: Llama 2 7B, FP8, 256K, 256 H100": (262_144, dict(context=8, tensor=4), 6.74),
    "nemo: Llama 2 7B, FP8, 1M, 1024 H100": (1_048_576, dict(context=32, tensor=8), 6.74),
    "trl: Qwen3 8B, bf16, 1M, 8 H100": (1_048_576, dict(context=8), 8.19),
    # a model of another shape
    "memo: GPT 7B, bf16, 1M, 8 A800": (1_048_576, dict(context=8), None),
    "alst: Llama 3.1 8B, bf16, 3.7M, 8 H100": (3_702_784, dict(context=8), 8.03),
    # 6.65 and a second embedding table
    "llm-foundry: MPT 7B, bf16, 64K, 8 H100": (65_536, dict(fsdp=8), 6.84),
    "maxtext: Llama 3.1 70B, FP8, 8K, 256 B200": (8_192, dict(fsdp=256), 70.55),
    "fms-fsdp: Llama 2 7B, bf16, 4K, 128 A100": (4_096, dict(data=2, fsdp=8), 6.74),
    "easycontext: Llama 2 7B, bf16, 512K, 8 A100": (524_288, dict(context=8), 6.74),
    "jax-toolbox: GPT 5B, bf16, 2K, 256 A100": (2_048, dict(fsdp=64), 5.23),
}


def named(name: str):
    (run,) = (run for run in runs() if f"{run.source}: {run.name}" == name)
    return run


def num_params(model) -> int:
    """Embedding, head, and per layer: q, k, v, o and three feed-forward matrices. Norms are below
    the precision.
    """
    heads = 2 * model.attention.num_heads + 2 * model.attention.num_kv_heads
    per_layer = model.model_dim * (heads * model.attention.head_dim + 3 * model.ffn_dim)
    return model.num_layers * per_layer + 2 * model.vocab_size * model.model_dim


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_of_published_run_has_its_model_mesh_and_length(name):
    seq_len, mesh, billion_params = PUBLISHED[name]
    config = named(name).config
    assert config.data.seq_len == seq_len
    assert vars(config.mesh) == dict(data=1, fsdp=1, context=1, tensor=1) | mesh
    assert billion_params is None or num_params(config.model) / 1e9 == pytest.approx(
        billion_params, abs=0.005
    )


def test_published_runs_are_complete_and_valid():
    """At least 20 runs of four kinds of GPU; each config loads for its topology; keys are unique."""
    assert len(runs()) >= 20
    assert {run.gpus.device.name for run in runs()} >= {"a100", "h100", "h200", "b200"}
    assert len({run.key for run in runs()}) == len(runs())
    for run in runs():
        assert run.config.mesh.num_devices == run.gpus.num_gpus
        assert run.figure > 0 and run.where and run.published
        assert run.source in sources() and sources()[run.source].url.startswith("https://")


def test_estimated_figure_full_attention_counts_all_pairs():
    """NeMo counts 6 FLOPs per matrix parameter and token, and 12 L D T^2 for attention without a
    mask.
    """
    run = named("nemo: Llama 2 7B, FP8, 256K, 256 H100")
    num_tokens = 262_144
    matrix_params = 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 4096 * 32_000
    flops = num_tokens * 6 * matrix_params + 12 * 32 * 4096 * num_tokens**2
    figure = estimated_figure(run, SimpleNamespace(step_seconds=2.0))
    assert figure == pytest.approx(flops / 2.0 / 32 / 1e12, rel=1e-12)


def test_time_ratio_above_one_if_estimate_is_too_fast():
    slow = SimpleNamespace(step_seconds=760.0)
    assert time_ratio(named("trl: Qwen3 8B, bf16, 1M, 8 H100"), slow) == 0.5  # 380 s
    fast = SimpleNamespace(tokens_per_second_per_device=2 * 3890)
    assert time_ratio(named("torchtitan: Llama 3.1 8B, FP8, 32K, 8 H100"), fast) == 2


def test_conformal_quantile_covers_corrected_share_of_sources():
    """ceil(11 x 0.8) = 9 of 10 sources; a source with many runs counts as one."""
    errors = [(str(number), float(number)) for number in range(1, 11)]
    assert calibration_fit.conformal_quantile(errors) == 9
    many = [*errors[:9], *(("10", 10.0 + number) for number in range(100))]
    assert calibration_fit.conformal_quantile(many) == 9
    assert calibration_fit.conformal_quantile(many, is_by_run=True) > 9
    assert calibration_fit.conformal_quantile(errors[:3]) == 3  # too few sources: all of them


def test_fit_ignores_held_back_source():
    """Changing the runs of a source changes its own errors, not its fit."""
    rows = [Residual(fold.source, 0.1 * number) for number, fold in enumerate(_folds())]
    moved = [row._replace(log_ratio=9.0) if row.source == "trl" else row for row in rows]
    before, after = (
        {fold.source: fold for fold in calibration_fit.folds(x)} for x in (rows, moved)
    )
    assert before["trl"].fit == after["trl"].fit
    assert before["trl"].errors != after["trl"].errors
    assert before["memo"].fit != after["memo"].fit
    with pytest.raises(ValueError, match="other sources"):
        calibration_fit.folds(rows[1:])


def _folds():
    return calibration_fit.folds(calibration.residuals(calibration.stored()))


def test_paired_errors_are_of_one_group_and_similar_length():
    rows = [
        Residual("a", 0.0, "x", 100),
        Residual("a", 0.3, "x", 200),
        Residual("a", 9.0, "y", 100),
    ]
    rows += [
        Residual("b", 5.0, "x", 100),
        Residual("a", 7.0, "x", 500),
        Residual("a", 8.0, "", 100),
    ]
    assert calibration_fit.paired_errors(rows, max_length_ratio=2) == [("a", 0.3)]
    assert len(calibration_fit.paired_errors(rows, max_length_ratio=10)) == 3


def test_constants_of_interval_are_those_of_stored_results():
    """The interval that plans print follows from the stored runs, and covers 80% of the held-back
    ones.
    """
    residuals = calibration.residuals(calibration.stored())
    assert len(residuals) == len(runs())
    final = calibration_fit.fit(residuals)
    assert final.log_scale == pytest.approx(math.log(roofline.TIME_SCALE), abs=1e-3)
    assert final.spread == pytest.approx(roofline.TIME_SPREAD, abs=1e-3)
    assert calibration.pairs(residuals)[0] == pytest.approx(roofline.PAIR_SPREAD, abs=1e-3)
    covered, num_runs = calibration_fit.coverage(_folds())
    assert covered / num_runs >= roofline.LEVEL == calibration_fit.level()
    assert calibration_fit.coverage_by_source(_folds()) >= roofline.LEVEL


def test_interval_of_measured_steps_is_that_of_stored_results():
    """Of jaxlc's own steps on an H100, with each model held back; the interval covers 80% of them."""
    residuals = calibration.measured_residuals(calibration.stored(calibration.MEASURED))
    assert len(residuals) == len(runs(MEASURED))
    assert all(run.config.mesh.num_devices == 1 for run in runs(MEASURED))
    final = calibration_fit.fit(residuals)
    scale, spread = roofline.MEASURED["h100"]
    assert final.log_scale == pytest.approx(math.log(scale), abs=1e-3)
    assert final.spread == pytest.approx(spread, abs=1e-3)
    covered, num_runs = calibration_fit.coverage(calibration_fit.folds(residuals, "measured"))
    assert covered / num_runs >= roofline.LEVEL


def test_page_has_the_stored_results():
    paths = calibration.RESULTS, calibration.MEASURED, calibration.TRANSPORTS
    text = calibration.generated(*map(calibration.stored, paths))
    assert text in calibration.PAGE.read_text()
