"""The plan of generation of a small model, compared with values that follow from its shapes."""

import json

import numpy as np
import pytest

from jaxlc import plan
from jaxlc.config import load
from jaxlc.core import hardware
from jaxlc.core.errors import UserError
from jaxlc.generation.__main__ import main
from jaxlc.plan import generation_command
from jaxlc.plan.generation_plan import chunk_pairs
from jaxlc.simulate import efficiency
from tests.plan.gpus import small_config

PROMPT, NEW, BATCH, CONTEXT, TENSOR = 60_000, 100, 2, 2, 2
MODEL = load(small_config()).model


@pytest.fixture(scope="module")
def result():
    starting = []
    result = plan.plan_generation(
        small_config(), "h100:1x4", prompt_tokens=PROMPT, new_tokens=NEW, batch_size=BATCH, starting=starting.append
    )
    assert starting == ["a prefill chunk for h100:1x4", "a decoding step for h100:1x4"]
    return result


@pytest.mark.gpu_compiler
def test_memory_of_generation_follows_from_shapes(result):
    assert PROMPT + NEW <= result.cache_tokens <= 1.07 * (PROMPT + NEW)
    cache_bytes = 2 * 2 * MODEL.num_layers * BATCH * result.cache_tokens * MODEL.num_kv_heads * MODEL.head_dim
    assert result.cache_bytes == cache_bytes // (CONTEXT * TENSOR) and result.cache_dtype == "bfloat16"
    assert result.float32_params_bytes == pytest.approx(2 * result.weights_bytes, rel=0.01)
    # A decoding step copies neither the cache nor the keys or values of a layer, which would be temporary.
    assert result.decode.temp_bytes < result.cache_bytes / (2 * MODEL.num_layers)
    parts = result.prefill.peak_bytes, result.decode.peak_bytes
    assert result.device_peak_bytes == result.weights_bytes + result.cache_bytes + max(parts)
    assert result.fits


@pytest.mark.gpu_compiler
def test_times_of_generation_are_at_least_those_of_the_peaks(result):
    device = hardware.find("h100")
    pairs = BATCH * PROMPT * (PROMPT + 1) / 2
    flops = 4 * pairs * MODEL.num_heads * MODEL.head_dim * MODEL.num_layers
    seconds_at_peak = flops / (4 * device.bf16_flops_per_second)
    assert result.prefill.tokens == 4096
    assert seconds_at_peak / 0.8 < result.prefill.seconds_by_kind["attention"] < seconds_at_peak / 0.1
    assert result.prefill.seconds == pytest.approx(sum(result.prefill.seconds_by_kind.values()))
    read_seconds = result.cache_bytes * PROMPT / result.cache_tokens / device.memory_bandwidth_bytes_per_second
    kernel_seconds = read_seconds / efficiency.rates(device).memory + MODEL.num_layers * hardware.KERNEL_GAP_SECONDS
    assert result.decode.seconds_by_kind["attention"] == pytest.approx(kernel_seconds, rel=0.02)
    attention = {name: count for name, count in result.prefill.kernels.items() if "attention" in name}
    assert attention == {  # a ring over the chunk has two steps
        "cudnn attention forward": 2 * MODEL.num_layers, "cudnn_packed attention forward": MODEL.num_layers,
    }  # fmt: skip
    assert result.decode.kernels["pallas attention forward"] == MODEL.num_layers


@pytest.mark.gpu_compiler
def test_page_and_json_of_generation(result):
    text = str(result)
    assert max(map(len, text.splitlines())) <= 120
    for part in ("AOT-compiled", "ESTIMATED TIME", "prefill, tokens in the cache: cudnn (", "VERDICT: fits"):
        assert part in " ".join(text.split())
    values = json.loads(json.dumps(result.to_json()))
    assert values["device_peak_bytes"] == result.device_peak_bytes and values["fits"] is True
    assert values["prefill"]["seconds"] == result.prefill.seconds and values["decode"]["largest"][0]["bytes"] > 0


@pytest.mark.parametrize(("num_past", "window"), [(0, 7), (3, 7), (100, 7), (5, 40)])
def test_pairs_of_a_chunk_equal_those_of_its_mask(num_past, window):
    queries, keys = np.arange(num_past, num_past + 20)[:, None], np.arange(num_past + 20)
    causal = keys <= queries
    assert chunk_pairs(num_past, 20, None) == causal.sum()
    assert chunk_pairs(num_past, 20, window) == (causal & (keys > queries - window)).sum()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--advise"], "unknown flag --advise: expected one of"),
    (["--prompt_tokens=x"], "expected tokens, such as 131072, 32K or 1M (1M = 1,048,576)"),
    (["--prompt-tokens=5"], "unknown flag --prompt-tokens: use --prompt_tokens"),
    (["--batch_size=x"], "invalid --batch_size=x: expected an integer"),
    (["--new_tokens=0"], "invalid --new_tokens=0: expected at least 1"),
    (["--cache_dtype=int8"], "invalid value 'int8' for cache_dtype: expected bf16, fp16, fp32"),
    (["--config=extend_512k"], "choose one with --stage=NAME"),
])  # fmt: skip
def test_invalid_command_of_generation_prints_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(generation_command, "start_on_cpu", lambda: None)  # JAX has started
    assert main(["generate", "--plan", "--config=64k:h100", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_flag_of_the_plan_without_plan_names_it(capsys):
    assert main(["generate", "runs/x", "--prompt_tokens=5"]) == 2
    assert "unknown flag --prompt_tokens: use --plan --prompt_tokens" in capsys.readouterr().err


def test_mesh_of_another_size_raises():
    with pytest.raises(UserError, match="h100:1x8 has 8"):
        plan.plan_generation(small_config(), "h100:1x8", prompt_tokens=1000)
