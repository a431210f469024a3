"""Files in FP8: values on a mesh, bytes read, errors, exports, and all bits against
`transformers`.
"""

import json
import math

import ml_dtypes
import numpy as np
import pytest

import jaxlc
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config.models.families import FAMILIES
from jaxlc.core.errors import UserError
from jaxlc.hf.load import open_files, read_shard, shapes_of
from tests.hf.comparison import by_names_in_files, needs_transformers, run_jobs
from tests.hf.models import CASES, tensors_of, write_model, write_tensors
from tests.hf.test_export import assert_same_bits, tensors_in
from tests.hf.test_export import config_of as run_config
from tests.hf.test_load import (
    change_config,
    config_of,
    expected_params,
    loaded,
    rewrite,
    split_experts,
    stack_experts,
)
from tests.train.runs import save_step_0

BLOCK = (24, 20)  # the last blocks of most matrices are smaller, and shards cut blocks
PLAIN = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "router.weight", "bias")


def quantized(tensors, block, scale_dtype=np.float32):
    """The tensors of files in FP8, with random scales, and the same weights in bfloat16.

    Args:
      block: None: a scale for each matrix, and a scale of activations.
    """
    rng, stored, whole = np.random.default_rng(0), {}, {}
    for name, x in tensors.items():
        if x.ndim < 2 or name.endswith(PLAIN) or "conv1d" in name:
            stored[name] = whole[name] = x
            continue
        *experts, rows, columns = x.shape
        parts = 2 if name.endswith("experts.gate_up_proj") else 1
        rows_of_block, columns_of_block = block or (rows // parts, columns)
        grid = *experts, math.ceil(rows / rows_of_block), math.ceil(columns / columns_of_block)
        weight = (8 * x.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.1, 2, grid).astype(scale_dtype)
        factors = scale.astype(np.float32).repeat(rows_of_block, -2).repeat(columns_of_block, -1)
        product = weight.astype(np.float32) * factors[..., :rows, :columns]
        whole[name] = product.astype(ml_dtypes.bfloat16)
        stored |= {name: weight, f"{name}_scale_inv": scale}
        if block is None:
            activation = name.removesuffix("weight") + "activation_scale"
            stored |= {
                name + "_scale_inv": scale if experts else scale.reshape(()),
                activation: scale,
            }
    return stored, whole


def write_fp8(directory, case, block, change=lambda x: x, **options):
    """Writes a model in FP8; returns its tensors in bfloat16, with the names of `tensors_of`."""
    write_model(directory, case)
    stored, whole = quantized(change(tensors_of(case)), block, **options)
    rewrite(directory, lambda _: stored, num_files=2)
    description = dict(
        quant_method="fp8",
        activation_scheme="dynamic" if block else "static",
        weight_block_size=block,
        modules_to_not_convert=["lm_head", "mlp.gate"],
    )
    change_config(directory, quantization_config=description)
    return split_experts(whole) if change is stack_experts else whole


@pytest.mark.parametrize(
    ("case", "block", "change", "scale_dtype", "num_tensor_ranks"),
    [
        ("llama", BLOCK, dict, np.float32, 1),
        ("mistral_window", None, dict, ml_dtypes.bfloat16, 2),
        ("qwen3_moe", BLOCK, dict, ml_dtypes.float8_e8m0fnu, 2),
        ("qwen3_moe", BLOCK, stack_experts, np.float32, 2),
        ("qwen3_moe", None, stack_experts, np.float32, 2),
        ("qwen3_5_hybrid", BLOCK, dict, np.float16, 2),  # one tensor for queries, keys and values
        ("gpt_oss", BLOCK, dict, np.float32, 2),  # gate and up are every second column
        ("qwen3_next", BLOCK, dict, np.float32, 2),  # rows of four projections of each key head
        ("deepseek_v3", BLOCK, dict, np.float32, 2),  # rows of the latent and of the rotated key
    ],
)
def test_fp8_weights_equal_their_definition(
    case, block, change, scale_dtype, num_tensor_ranks, tmp_path
):
    whole = write_fp8(tmp_path / "model", case, block, change, scale_dtype=scale_dtype)
    _, params, line = loaded(tmp_path / "model", fsdp=num_tensor_ranks, tensor=num_tensor_ranks)
    assert "rounded" not in line
    for path, value in expected_params(case, whole).items():
        array = np.asarray(params[path])[tuple(map(slice, value.shape))]
        np.testing.assert_array_equal(array, value, err_msg=path)


def test_read_shard_of_fp8_reads_only_its_bytes_and_their_scales(tmp_path):
    write_fp8(tmp_path / "model", "llama", BLOCK)
    model = config_of(tmp_path / "model").model
    files, layouts = open_files(tmp_path / "model", FAMILIES["llama"], model)
    param = shapes_of(model)["layers/mlp/w_down"]
    num_layers = param.shape[0]
    index = (0, num_layers, 1), (30, 48, 1), (16, 30, 1)  # rows 16 to 29 of the file
    shard = read_shard(files, layouts["layers/mlp/w_down"], index, param)
    blocks = 2 * 2  # rows 0 to 23 and 24 to 31, columns 20 to 39 and 40 to 47
    assert files.bytes_read == num_layers * (18 * 14 + blocks * 4)
    whole = expected_params("llama", quantized(tensors_of("llama"), BLOCK)[1])
    np.testing.assert_array_equal(shard, whole["layers/mlp/w_down"][:, 30:48, 16:30])


NAME = "model.layers.1.mlp.up_proj.weight"


def change_scale(change):
    return lambda x: x | {f"{NAME}_scale_inv": change(x[f"{NAME}_scale_inv"])}


def without(name):
    return lambda tensors: {other: x for other, x in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("block", "change", "words"),
    [
        (BLOCK, without(f"{NAME}_scale_inv"), f"has {NAME} in FP8 without its scales"),
        (BLOCK, change_scale(lambda x: x[:1]), "has shape [1, 2]; .* needs [2, 2]"),
        (BLOCK, change_scale(lambda x: x[0, :1].reshape(())), "has shape []; .* needs [2, 2]"),
        (None, change_scale(lambda x: np.ones((2, 1), np.float32)), "=null .* needs [1, 1]"),
        (BLOCK, change_scale(lambda x: x.astype(np.int32)), "scale_inv in .* has dtype I32"),
        (BLOCK, change_scale(lambda x: x * np.nan), f"{NAME} in .* has NaN or infinite values"),
        (BLOCK, change_scale(lambda x: x * 1e38), f"{NAME} in .* has NaN or infinite values"),
        (
            BLOCK,
            lambda x: x | {NAME: np.full_like(x[NAME], np.nan)},
            f"{NAME} in .* has NaN or infinite values",
        ),
        (
            BLOCK,
            lambda x: x | {NAME: x[NAME].astype(ml_dtypes.float8_e5m2)},
            "has dtype F8_E5M2; supported are F32, F16, BF16, and F8_E4M3 with scales",
        ),
    ],
)
def test_wrong_fp8_files_raise_one_line(block, change, words, tmp_path):
    write_fp8(tmp_path / "model", "llama", block)
    write_tensors(tmp_path / "model", change(quantized(tensors_of("llama"), block)[0]), num_files=2)
    with pytest.raises(UserError, match=words.replace("[", r"\[").replace("]", r"\]")) as error:
        loaded(tmp_path / "model")
    assert "\n" not in str(error.value)


def test_fp8_tensors_without_their_description_raise(tmp_path):
    write_fp8(tmp_path / "model", "llama", BLOCK)
    change_config(tmp_path / "model", quantization_config=None)
    with pytest.raises(UserError, match="F8_E4M3; .*with scales and quantization_config"):
        loaded(tmp_path / "model")


def test_export_of_fp8_model_is_in_bfloat16_without_quantization(tmp_path):
    whole = write_fp8(tmp_path / "model", "qwen3_moe", BLOCK)
    save_step_0(run_config(tmp_path / "model"), tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == CASES["qwen3_moe"].config
    assert_same_bits(tensors_in(out), whole)


def test_export_of_untrained_tensors_in_fp8_is_in_bfloat16(tmp_path):
    """Files of Qwen3-Next in FP8 have layers of multi-token prediction in FP8, too."""
    write_model(tmp_path / "model", "qwen3_5")
    rng = np.random.default_rng(0)
    others = {"mtp.fc.weight": rng.standard_normal((50, 30)).astype(ml_dtypes.bfloat16)}
    stored, whole = quantized(tensors_of("qwen3_5") | others, BLOCK)
    rewrite(tmp_path / "model", lambda _: stored, num_files=2)
    description = dict(quant_method="fp8", weight_block_size=BLOCK)
    change_config(tmp_path / "model", quantization_config=description)
    save_step_0(run_config(tmp_path / "model"), tmp_path / "run")
    assert_same_bits(tensors_in(jaxlc.export(tmp_path / "run", tmp_path / "out")), whole)


def test_export_of_adapters_of_an_fp8_model_takes_its_weights_as_bfloat16(tmp_path, capsys):
    """Scales and norms are float32; but training rounded no weight."""

    def with_float32_norms(tensors):
        return {name: x.astype(np.float32) if x.ndim == 1 else x for name, x in tensors.items()}

    write_fp8(tmp_path / "model", "llama", BLOCK, with_float32_norms)
    config = run_config(tmp_path / "model")
    config.lora = {"rank": 2}
    save_step_0(config, tmp_path / "run")
    jaxlc.export(tmp_path / "run", tmp_path / "out", adapters=True)
    assert "rounded" not in capsys.readouterr().err


@needs_transformers
def test_fp8_weights_equal_those_of_transformers_bit_for_bit(tmp_path):
    """transformers takes the size of blocks from the shape of the scales, so no block is cut here."""
    cases = dict(
        llama=(16, 8),
        qwen3=(16, 8),
        qwen3_moe=(8, 8),
        minimax_m2=(8, 8),
        ministral3=None,
        deepseek_v3=(4, 2),
    )
    jobs = {}
    for case, block in cases.items():
        write_fp8(tmp_path / case, case, block)
        jobs[case] = dict(job="weights", directory=str(tmp_path / case))
    for case, expected in run_jobs(tmp_path, jobs).items():
        step, _, _ = loaded(tmp_path / case)
        got = by_names_in_files(step, load_pretrained(step)[0])
        assert got.keys() == tensors_of(case).keys()
        for name in got:
            bits = expected[name]
            own = got[name].astype(ml_dtypes.bfloat16).view(np.uint16)
            np.testing.assert_array_equal(own, bits, err_msg=f"{case} {name}")
