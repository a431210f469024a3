"""The published runs of the calibration table. `python -m benchmarks.calibration` compiles them; these tests do not.

Expected numbers are from the cited pages and computed without jaxlc.
"""

from types import SimpleNamespace

import pytest

from benchmarks.calibration import RUNS, config_of, estimated_figure, speed_ratio
from jaxlc.simulate.topology import topology

# Name -> (sequence length, mesh, parameters in billions, as their models' pages give them).
PUBLISHED = {
    "TorchTitan, Llama 3.1 8B, bf16, 8K, 8 H100": (8_192, dict(fsdp=8), 8.03),
    "TorchTitan, Llama 3.1 8B, FP8, 32K, 8 H100": (32_768, dict(fsdp=8), 8.03),
    "TorchTitan, Llama 3.1 8B, FP8, 64K, 8 H100": (65_536, dict(fsdp=4, context=2), 8.03),
    "TorchTitan, Llama 3.1 8B, FP8, 128K, 8 H100": (131_072, dict(fsdp=2, context=4), 8.03),
    "TorchTitan, Llama 3.1 8B, FP8, 256K, 8 H100": (262_144, dict(context=8), 8.03),
    "NeMo, Llama 2 7B, FP8, 256K, 256 H100": (262_144, dict(context=8, tensor=4), 6.74),
    "NeMo, Llama 2 7B, FP8, 1M, 1024 H100": (1_048_576, dict(context=32, tensor=8), 6.74),
    "TRL, Qwen3 8B, bf16, 1M, 8 H100": (1_048_576, dict(context=8), 8.19),
    "MEMO, GPT 7B, 1M, 8 A800": (1_048_576, dict(context=8), None),  # a model of another shape
}


def run_named(part: str):
    (run,) = (run for run in RUNS if part in run.name)
    return run


def num_params(model) -> int:
    """Embedding, head, and per layer: q, k, v, o and three feed-forward matrices. Norms are below the precision."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    per_layer = model.model_dim * (heads * model.head_dim + 3 * model.ffn_dim)
    return model.num_layers * per_layer + 2 * model.vocab_size * model.model_dim


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_config_of_published_run_has_its_model_mesh_and_length(run):
    seq_len, mesh, billion_params = PUBLISHED[run.name]
    config = config_of(run)
    assert config.data.seq_len == seq_len
    assert vars(config.mesh) == dict(data=1, fsdp=1, context=1, tensor=1) | mesh
    assert config.mesh.num_devices == topology(run.topology).num_gpus
    assert billion_params is None or num_params(config.model) / 1e9 == pytest.approx(billion_params, abs=0.005)


def test_estimated_figure_full_attention_counts_all_pairs():
    """NeMo counts 6 FLOPs per matrix parameter and token, and 12 L D T^2 for attention without a mask."""
    config = config_of(run_named("NeMo, Llama 2 7B, FP8, 256K"))
    num_tokens = 262_144
    matrix_params = 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 4096 * 32_000
    flops = num_tokens * 6 * matrix_params + 12 * 32 * 4096 * num_tokens**2
    prediction = SimpleNamespace(step_seconds=2.0)
    figure = estimated_figure("TFLOP/s per GPU, full attention", config, 32, prediction)
    assert figure == pytest.approx(flops / 2.0 / 32 / 1e12, rel=1e-12)


def test_speed_ratio_above_one_if_estimate_is_faster():
    prediction = SimpleNamespace(step_seconds=190.0, tokens_per_second_per_device=13_334.0, mfu_causal=0.2615)
    ratios = {
        part: speed_ratio(run, estimated_figure(run.unit, config_of(run), 8, prediction))
        for part in ("8K, 8 H100", "TRL", "MEMO")
        for run in [next(run for run in RUNS if part in run.name)]
    }
    assert ratios == pytest.approx({"8K, 8 H100": 13_334 / 6667, "TRL": 380 / 190, "MEMO": 26.15 / 52.3})
