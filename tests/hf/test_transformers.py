"""Logits, gradients and training against `transformers`, for the models of tests/hf/models.py.

One process of transformers computes all references, and a second one opens exported models; see
tests/hf/comparison.py.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import jaxlc
from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.cli import main_of
from jaxlc.config import PRESETS, load, to_dict
from jaxlc.config.models.config_json import MODEL_TYPE, config_json_of, settings_of
from jaxlc.config.models.families import FAMILIES
from jaxlc.config.models.model_schema import KindConfig, model_from
from jaxlc.hf.load import paths_of
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.language_model import LanguageModel
from jaxlc.step.step import build_step
from tests.hf.comparison import (
    MESHES,
    ORIGINAL_TOKENS,
    assert_small,
    config_of,
    errors_of,
    needs_transformers,
    relative_error,
    run_jobs,
    step_of,
    tokens_of,
)
from tests.hf.models import CASES, write_model
from tests.tolerances import FLOAT32_PARITY

logprobs_main = main_of("logprobs")

pytestmark = needs_transformers
# Number of tokens and first position: below and 4 times beyond the original context, and beyond 8192, where the
# reference is float64 because float32 angles are inaccurate.
SPANS = {"short": (16, 0), "long": (4 * ORIGINAL_TOKENS, 0), "far": (16, 20_000)}
RECURRENT = {"linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "linear_attn_config"}
FAR_CASES = ("llama", "qwen2", "gemma3")
STEPS, LEARNING_RATE, WEIGHT_DECAY = 20, 1e-3, 0.1
# Models whose mixers are compared in float64, and the scale of their matrices. Hybrids have the epsilon of released
# models, which amplifies rounding errors (`HYBRID_NORM_EPSILON`). In float32, the first steps of AdamW turn rounding
# errors of gradients near 0 into whole steps: with a scale of 4 and a learning rate of 0.01, a few entries of torch,
# too, differ from float64 by up to the learning rate.
FLOAT64_MODELS = {
    "qwen3_5_hybrid": ("qwen3_5_hybrid", 1.0),
    "olmo_hybrid": ("olmo_hybrid", 1.0),
    "qwen3_5_moe": ("qwen3_5_moe", 1.0),
    "granite": ("granite", 1.0),
    "phi3": ("phi3", 1.0),
    "ministral3": ("ministral3", 1.0),
    "qwen3_next": ("qwen3_next", 1.0),
    "minimax_m2": ("minimax_m2", 1.0),
    "mistral3": ("mistral", 1.0),
    "seed_oss": ("seed_oss", 1.0),
    "exaone4": ("exaone4_hybrid", 1.0),
    "olmo2": ("olmo2", 1.0),
    "qwen3_vl": ("qwen3_vl", 1.0),
    "qwen3_vl_moe": ("qwen3_vl_moe", 1.0),
    "glm4_moe_lite": ("glm4_moe_lite", 1.0),
    "mistral4": ("mistral4", 1.0),
    "deepseek_v3": ("deepseek_v3", 1.0),
    "granite_hybrid": ("granite_hybrid", 1.0),
    "granite_hybrid_moe": ("granite_hybrid_moe", 1.0),
    "falcon_h1": ("falcon_h1", 1.0),
    "falcon_h1_norm": ("falcon_h1_norm", 1.0),
    "nemotron_h": ("nemotron_h", 1.0),
    "nemotron_h_moe": ("nemotron_h_moe", 1.0),
    "nemotron_h_latent": ("nemotron_h_latent", 1.0),
    "kimi_linear": ("kimi_linear", 1.0),
    "deepseek_v2": ("deepseek_v2", 1.0),
    "qwen3_5_hybrid, sharp": ("qwen3_5_hybrid", 4.0),
    "olmo_hybrid, sharp": ("olmo_hybrid", 4.0),
    "qwen2, muon": ("qwen2", 1.0),
}
MUON = "qwen2, muon"  # trained with it
# Their layers are those of other families: in float64, they are compared on a mesh only.
ONLY_NAMES = {"mistral3", "seed_oss", "exaone4", "olmo2", "qwen3_vl", "qwen3_vl_moe"}
RELEASED_EPSILON, FLOAT64_STEPS = 1e-6, 2
# of logits and of gradients, by scale: sharp models amplify rounding errors in float64, too
FLOAT64_PARITY = {1.0: (1e-12, 1e-11), 4.0: (1e-9, 1e-9)}
FLOAT64_UPDATE = 1e-6  # of the learning rate, which is float32
MUON_UPDATE = 1e-8  # the same; of biases, which AdamW updates
FLOAT64_LOSS = 1e-6  # relative; the mean over tokens divides by a float32
FLOAT64_OPTIMIZER = dict(
    schedule="constant", warmup_steps=0, max_grad_norm=0.0, learning_rate=2**-7, weight_decay=0.125
)
# Hybrids are compared in float64: AdamW amplifies the rounding errors of the delta rule within a
# few steps.
TRAINED_CASES = ("qwen2", "gemma3", "olmo3")


def training_tokens() -> list[np.ndarray]:
    return [tokens_of(64, step) for step in range(STEPS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of all cases in float32."""
    root = tmp_path_factory.mktemp("models")
    return {case: write_model(root / case, case, dtype=np.float32) for case in CASES}


@pytest.fixture(scope="module")
def float64_models(tmp_path_factory):
    root = tmp_path_factory.mktemp("float64_models")
    # Norms of latents have this epsilon, too, and the other norms of these models another one.
    epsilon = {
        case: dict(rms_norm_eps=RELEASED_EPSILON) for case, x in CASES.items() if not x.has_latents
    }
    return {
        name: write_model(root / name, case, scale=scale, dtype=np.float32, **epsilon.get(case, {}))
        for name, (case, scale) in FLOAT64_MODELS.items()
    }


@pytest.fixture(scope="module")
def references(models, float64_models, tmp_path_factory):
    jobs = {}
    for case, directory in models.items():
        for span, (num_tokens, first_position) in SPANS.items():
            if span != "far" or case in FAR_CASES:
                arguments = dict(
                    tokens=tokens_of(num_tokens).tolist(), first_position=first_position
                )
                jobs[case, span] = dict(
                    job="gradients", directory=str(directory), float64=span == "far", **arguments
                )
    for case, directory in float64_models.items():
        tokens = tokens_of(SPANS["long"][0]).tolist()
        jobs[case, "float64"] = dict(
            job="gradients", directory=str(directory), tokens=tokens, float64=True
        )
        batches = [tokens.tolist() for tokens in training_tokens()[:FLOAT64_STEPS]]
        arguments = {name: FLOAT64_OPTIMIZER[name] for name in ("learning_rate", "weight_decay")}
        jobs[case, "float64 train"] = dict(
            job="train",
            directory=str(directory),
            batches=batches,
            float64=True,
            muon=case == MUON,
            **arguments,
        )
    for case in TRAINED_CASES:
        arguments = dict(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        batches = [tokens.tolist() for tokens in training_tokens()]
        jobs[case, "train"] = dict(
            job="train", directory=str(models[case]), batches=batches, **arguments
        )
    return run_jobs(tmp_path_factory.mktemp("references"), jobs)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case, span, mesh, models, references):
    if (case, span) not in references:
        pytest.skip("positions beyond 8192 are compared for some cases")
    num_tokens, first_position = SPANS[span]
    if MESHES[mesh] and span == "short" and RECURRENT & CASES[case].config.keys():
        pytest.skip("the fragments of a rank are shorter than the convolution")
    step = step_of(models[case], 32_768 if first_position else num_tokens, MESHES[mesh])
    params, _ = load_pretrained(step)
    expected = references[case, span]
    assert expected["logits"].std() >= 1
    assert_small(
        errors_of(step, params, expected, num_tokens, first_position), f"{case}, {span}, {mesh}"
    )


def test_gradients_and_adamw_equal_torch_in_float64(float64_models, references, tmp_path):
    """So their differences in float32 are rounding errors."""
    cases = []
    for case, directory in float64_models.items():
        optimizer = FLOAT64_OPTIMIZER | (dict(name="muon") if case == MUON else {})
        described = dict(directory=str(directory), num_tokens=SPANS["long"][0], optimizer=optimizer)
        described["batches"] = [tokens.tolist() for tokens in training_tokens()[:FLOAT64_STEPS]]
        for name, job in (("gradients", "float64"), ("trained", "float64 train")):
            described[name] = str(tmp_path / f"{case}, {name}.npz")
            np.savez(described[name], **references[case, job])
        meshes = [mesh for mesh in MESHES.values() if mesh or case not in ONLY_NAMES]
        cases += [described | dict(mesh=mesh) for mesh in meshes]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.hf.float64_parity", tmp_path / "cases.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases)
    for case, line in zip(cases, lines):
        name, result = Path(case["directory"]).name, json.loads(line)
        print(name, case["mesh"], line)
        _, scale = FLOAT64_MODELS[name]
        logits, gradients = FLOAT64_PARITY[scale]
        assert result["logits"] <= logits, (name, case["mesh"], line)
        assert result["gradients"][0] <= gradients, (name, case["mesh"], line)
        update_limit = MUON_UPDATE if name == MUON else FLOAT64_UPDATE
        assert result["updated"][0] <= update_limit, (name, case["mesh"], line)
        assert result["losses"] <= FLOAT64_LOSS, (name, case["mesh"], line)


@pytest.mark.parametrize(
    "case, mesh",
    [
        ("llama", "context=4"),
        ("gemma3", "context=2,tensor=2"),
        ("gpt_oss", "context=2"),
        ("granite", "context=2"),
    ],
)
def test_log_probs_equal_transformers(case, mesh, models, references, tmp_path):
    """`jaxlc logprobs`. Errors are compared with the largest log-probability, which may also be
    close to 0.
    """
    num_tokens, _ = SPANS["long"]
    traces, out = tmp_path / "traces.jsonl", tmp_path / "out.jsonl"
    rows = tokens_of(num_tokens)
    in_loss = [0] + [1] * (num_tokens - 1)
    traces.write_text(
        "".join(json.dumps(dict(tokens=row.tolist(), loss_mask=in_loss)) + "\n" for row in rows)
    )
    assert (
        logprobs_main(
            ["jaxlc logprobs", str(models[case]), str(traces), str(out), f"--mesh={mesh}"]
        )
        == 0
    )
    logits = references[case, "long"]["logits"].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for line, row, log_probs in zip(out.read_text().splitlines(), rows, expected):
        got = np.asarray(json.loads(line)["reference_log_probs"])[-(num_tokens - 1) :]
        errors = np.abs(got - log_probs[np.arange(num_tokens - 1), row[1:]])
        assert errors.max() <= FLOAT32_PARITY * np.abs(log_probs).max()


def _without(names, params):
    """Params without the parameters of these names."""
    if not isinstance(params, dict):
        return params
    return {name: _without(names, value) for name, value in params.items() if name not in names}


def _renamed(params, names: dict):
    if not isinstance(params, dict):
        return params
    return {names.get(name, name): _renamed(value, names) for name, value in params.items()}


def _without_skips(params):
    return jax.tree.map_with_path(lambda path, x: x * (path[-1].key != "skip"), params)


def _zero_biases(params):
    return jax.tree.map_with_path(lambda path, x: x * (not path[-1].key.startswith("b")), params)


def _without_gate(params):
    query = ("wq", "bq")
    return jax.tree.map_with_path(
        lambda path, x: jnp.split(x, 2, axis=-1)[0] if path[-1].key in query else x, params
    )


def _long_memory(params):
    """States of Gated DeltaNet that hardly decay."""
    return jax.tree.map_with_path(lambda path, x: x - 9 * (path[-1].key == "log_decay"), params)


def _in_another_order(params):
    """Values as if the rows of `in_proj_qkvz` were those of all heads."""
    return jax.tree.map_with_path(
        lambda path, x: x[..., ::-1, :] if path[-1].key == "wv" else x, params
    )


def _without_dense_block(params):
    return jax.tree.map_with_path(lambda path, x: x * (path[-1].key != "w_down"), params)


# What a model has -> case, settings of a model without it, and its parameters.
PARTS = {
    "scale of queries by the factor of yarn": (
        "deepseek_v3",
        {"rope.query_mscale": 0.0},
        lambda params: params,
    ),
    "interleaved RoPE": ("deepseek_v2", {"latent.interleaved": False}, lambda params: params),
    "epsilon of latents": ("deepseek_v3", {"latent.norm_epsilon": 0.3}, lambda params: params),
    "groups of a softmax router": (
        "deepseek_v2",
        {"experts.groups": 1, "experts.groups_per_token": 1},
        lambda params: params,
    ),
    "llama3 scaling": ("llama", {"rope.scaling": "none"}, lambda params: params),
    "llama3 scaling, tied": ("llama_tied", {"rope.scaling": "none"}, lambda params: params),
    "yarn scaling": ("qwen2", {"rope.scaling": "none"}, lambda params: params),
    "linear scaling": ("gemma3", {"rope.scaling": "none"}, lambda params: params),
    "window of all layers": ("mistral_window", {"attention.window": 256}, lambda params: params),
    "window of some layers": ("gemma3", {"attention.window": 256}, lambda params: params),
    "window of the last layers": ("qwen2_window", {"attention.window": 256}, lambda params: params),
    "window of layers of a type": (
        "qwen3_window",
        dict(layer_kinds=("full", "sliding")),
        lambda params: params,
    ),
    "RoPE base of sliding layers": (
        "gemma3",
        {"rope.sliding_theta": 60000.0},
        lambda params: params,
    ),
    "NoPE": ("smollm3", dict(layer_kinds=("sliding", "full", "full")), lambda params: params),
    "biases": ("qwen2", dict(), _zero_biases),
    "norm of heads": (
        "qwen3",
        {"attention.qk_norm": "none"},
        lambda params: _without(("q_norm", "k_norm"), params),
    ),
    "norm of projections": (
        "olmo3",
        {"attention.qk_norm": "none"},
        lambda params: _without(("q_norm", "k_norm"), params),
    ),
    "norms of outputs": (
        "olmo3",
        dict(norm_placement="pre"),
        lambda params: _renamed(
            params, {"attention_post_norm": "attention_norm", "mlp_post_norm": "mlp_norm"}
        ),
    ),
    "zero-centered norms": ("gemma3", dict(zero_centered_norm=False), lambda params: params),
    "scale of queries": ("gemma3", {"attention.query_scale_dim": 16}, lambda params: params),
    "scale of queries by position": (
        "ministral3",
        {"rope.query_beta": 0.0},
        lambda params: params,
    ),
    "scaled embeddings": ("gemma3", dict(scale_embeddings=False), lambda params: params),
    "activation": ("gemma3", dict(activation="silu"), lambda params: params),
    "output gate": ("qwen3_5", {"attention.gate": False}, _without_gate),
    "linear attention": ("qwen3_5_hybrid", dict(), _long_memory),
    "negative eigenvalues": (
        "olmo_hybrid",
        {"delta_net.negative_eigenvalues": False},
        lambda params: params,
    ),
    "partial RoPE": ("qwen3_5", {"rope.fraction": 1.0}, lambda params: params),
    "output bias": (
        "llama_tied",
        {"attention.out_bias": False},
        lambda params: _without(("bo",), params),
    ),
    "partial RoPE with factors": (
        "phi3",
        {"rope.fraction": 1.0, "rope.scaling": "none"},
        lambda params: params,
    ),
    "long factors of all layers": (
        "phi3",
        {"rope.long_factors": (1.0, 1.125, 1.25)},  # the short ones
        lambda params: params,
    ),
    "attention factor of longrope": (
        "phi3",
        {"rope.attention_factor": 1.0},
        lambda params: params,
    ),
    "window of all layers with longrope": (
        "phi3_window",
        {"attention.window": 256},
        lambda params: params,
    ),
    "longrope of sliding layers": (
        "phi3_window",
        {"rope.sliding_scaling": False},
        lambda params: params,
    ),
    "order of fused projections": (
        "phi3",
        dict(),
        lambda params: _renamed(params, dict(w_gate="w_up", w_up="w_gate")),
    ),
    "output bias without others": (
        "seed_oss",
        {"attention.out_bias": False},
        lambda params: _without(("bo",), params),
    ),
    **{
        setting: ("granite", {setting: value}, lambda params: params)
        for setting, value in {
            "attention.query_scale_dim": 0,
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1),
        }.items()
    },
    "RoPE of full layers, without sliding ones": (
        "exaone4",
        {"layer_kinds": ("nope",), "rope.scaling": "none"},
        lambda params: params,
    ),
    "no RoPE of full layers, with sliding ones": (
        "exaone4_hybrid",
        dict(layer_kinds=("sliding", "sliding", "sliding", "full")),
        lambda params: params,
    ),
    "norms of outputs only": (
        "olmo2",
        dict(norm_placement="pre"),
        lambda params: _renamed(
            params, {"attention_post_norm": "attention_norm", "mlp_post_norm": "mlp_norm"}
        ),
    ),
    "biases of dense layers": (
        "llama_tied",
        dict(mlp_bias=False),
        lambda params: _without(("b_gate", "b_up", "b_down"), params),
    ),
    "bias of the choice": (
        "glm4_moe",
        {"experts.choice_bias": False},
        lambda params: _without(("choice_bias",), params),
    ),
    "groups of experts": ("glm4_moe", {"experts.groups_per_token": 4}, lambda params: params),
    "gate of the shared expert": (
        "qwen3_5_moe",
        {"experts.shared_gate": False},
        lambda params: _without(("shared_gate",), params),
    ),
    "projections of each key head": ("qwen3_next", dict(), _in_another_order),
    "dense layers": ("qwen3_next", dict(), _without_dense_block),
    "weights of experts": ("qwen3_next", {"experts.renormalize": False}, lambda params: params),
    "rotated dimensions": ("minimax_m2", {"rope.fraction": 1.0}, lambda params: params),
    "norms of all heads": (
        "minimax_m2",
        {"attention.qk_norm": "none"},
        lambda params: _without(("q_norm", "k_norm"), params),
    ),
    "bias of the choice of MiniMax-M2": (
        "minimax_m2",
        {"experts.choice_bias": False},
        lambda params: _without(("choice_bias",), params),
    ),
    **{
        f"mamba2 {name}": ("granite_hybrid", {f"mamba2.{name}": value}, lambda params: params)
        for name, value in dict(norm="before_gate", smallest_step=0.0, largest_step=0.0).items()
    },
    "biases of convolutions": (
        "granite_hybrid",
        {"mamba2.conv_bias": False},
        lambda params: _without(("bias_q", "bias_k", "bias_v"), params),
    ),
    **{
        f"falcon_h1 {setting}": ("falcon_h1", {setting: value}, lambda params: params)
        for setting, value in {
            **dict.fromkeys(("embedding_multiplier", "logits_scaling"), 1.0),
            "attention.query_scale_dim": 0.0,
            "attention.output_multiplier": 1.0,
            **dict.fromkeys(("mlp_gate_multiplier", "mlp_output_multiplier"), 1.0),
            **{
                f"mamba2.{x}_multiplier": 1.0
                for x in ("gate", "value", "key", "query", "step", "output")
            },
        }.items()
    },
    "order of norm and gate": (
        "falcon_h1_norm",
        {"mamba2.norm": "before_gate"},
        lambda params: params,
    ),
    "skips of states": ("granite_hybrid", dict(), _without_skips),
    "sinks": ("gpt_oss", {"attention.sinks": False}, lambda params: _without(("sinks",), params)),
    "scaled RoPE of sliding layers": (
        "gpt_oss",
        {"rope.sliding_scaling": False},
        lambda params: params,
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_model_moves_its_logits(part, models, references):
    """So the comparison above would fail by far without it."""
    case, settings, change = PARTS[part]
    num_tokens, _ = SPANS["long"]
    step = step_of(models[case], num_tokens, {})
    params = change(load_pretrained(step)[0])
    model = model_from(step.config.model.by_path | settings)
    step = build_step(dataclasses.replace(step.config, model=model), step.mesh)
    logits = LanguageModel(step, params, None).logits(tokens_of(num_tokens))
    assert np.abs(logits - references[case, "long"]["logits"]).max() >= 0.1


@pytest.mark.parametrize("case", TRAINED_CASES)
def test_training_equals_adamw_of_torch(case, models, references, tmp_path):
    config = config_of(models[case], 64, dict(context=4, tensor=2))
    config.train.update(steps=STEPS)
    config.optimizer = dict(schedule="constant", warmup_steps=0, max_grad_norm=0.0)
    config.optimizer.update(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    batches = [{"tokens": tokens} for tokens in training_tokens()]
    jaxlc.train.run(config, tmp_path, batches=batches)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    np.testing.assert_allclose(losses, references[case, "train"]["losses"], rtol=1e-4)


def save(step, params, workdir: Path) -> Path:
    """Writes a checkpoint of `params` as if a run had made it."""
    checkpoints = Checkpoints(workdir / CHECKPOINTS_DIRECTORY, keep=1, warn=print)
    checkpoints.save(
        1, step.init(params), dict(step=1, next_row=0, corpus="", config=to_dict(step.config))
    )
    checkpoints.close()
    return workdir


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
NO_CONFIG = {"kimi_k2"}  # read as deepseek_v3
# transformers: the field has no effect within a model with images, and no default of the model
FIELDS = {
    "qwen3_vl_moe_text": {"tie_word_embeddings": True},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
}


def test_absent_fields_of_config_json_have_the_values_of_transformers(tmp_path):
    jobs = {
        name: dict(job="default_config", directory="", model_type=name)
        for name in FAMILIES.keys() - NO_CONFIG
    }
    for name, result in run_jobs(tmp_path, jobs).items():
        whole = json.loads(str(result["json"])) | FIELDS.get(name, {})
        whole["architectures"] = [x for x in [FAMILIES[name].architecture] if x]
        nulls = {"q_lora_rank", "n_group", "topk_group", "sliding_window"}
        whole = {key: x for key, x in whole.items() if x is not None or key in nulls}
        short = {key: whole[key] for key in (*SIZES, *FIELDS.get(name, ())) if key in whole}
        expected = settings_of(whole, "config.json")
        assert settings_of(dict(short, model_type=name), "config.json") == expected, name


def test_config_json_of_random_weights_is_the_same_model_in_transformers(tmp_path):
    jobs, expected = {}, {}
    for case, described in CASES.items():
        settings = settings_of(described.config, "config.json")
        kinds = settings.pop("kinds", {}).items()
        own = dict(kinds=tuple(KindConfig(name=name, **x) for name, x in kinds))
        model = model_from(PRESETS["tiny"].by_path | settings | own)
        fields = config_json_of(model, None, seq_len=64, dtype="float32")
        if fields["model_type"] == MODEL_TYPE:
            continue
        (tmp_path / case).mkdir()
        (tmp_path / case / "config.json").write_text(json.dumps(fields))
        jobs[case] = dict(job="read_config", directory=str(tmp_path / case))
        expected[case] = fields["model_type"], settings_of(fields, "config.json")
    for case, result in run_jobs(tmp_path, jobs).items():
        fields = json.loads(str(result["json"]))
        assert (fields["model_type"], settings_of(fields, "config.json")) == expected[case], case


TINY = {"model": dict(preset="tiny", vocab_size=257), "precision": {"compute": "fp32"}}


def test_exported_models_open_in_transformers(models, tmp_path):
    """With another RoPE and window than the model they started from, and from random weights."""
    num_tokens, _ = SPANS["long"]
    changes = {
        "qwen3": dict(
            rope=dict(theta=1e6, scaling="llama3", factor=4.0, original_tokens=32),
        ),
        "llama": dict(rope=dict(scaling="yarn", factor=4.0)),
        "mistral_window": dict(window=20),
        "gemma3": dict(window=20, rope=dict(sliding_theta=2000.0)),
        "olmo3": dict(rope=dict(factor=4.0)),
    }
    jobs, logits = {}, {}
    for case, settings in changes.items():
        step = step_of(models[case], num_tokens, dict(context=2, tensor=2), **settings)
        params = load_pretrained(step)[0]
        out = jaxlc.export(
            save(step, params, tmp_path / case), tmp_path / f"{case}-out", dtype="fp32"
        )
        logits[case] = LanguageModel(step, params, None).logits(tokens_of(num_tokens))
        jobs[case] = dict(
            job="gradients", directory=str(out), tokens=tokens_of(num_tokens).tolist()
        )
    trained = train_tiny(tmp_path / "tiny")
    out = jaxlc.export(tmp_path / "tiny", tmp_path / "tiny-out", dtype="fp32")
    prompt = list(b"the quick brown ")
    jobs["tiny"] = dict(job="generate", directory=str(out), prompt=prompt, num_tokens=16)
    results = run_jobs(tmp_path, jobs)
    for case in changes:
        assert relative_error(logits[case], results[case]["logits"]) <= 1e-4, case
    generated = results["tiny"]["tokens"]
    next_tokens = trained.model.logits(generated).argmax(-1)
    np.testing.assert_array_equal(next_tokens[len(prompt) - 1 : -1], generated[len(prompt) :])
    config = load(ConfigDict({"model": {"init_from": str(out)}}))
    imported, _ = load_pretrained(build_step(config, make_mesh(config.mesh, jax.devices()[:1])))
    for path, value in paths_of(imported):
        expected = np.asarray(dict(paths_of(trained.params))[path])[
            tuple(slice(size) for size in value.shape)
        ]
        np.testing.assert_array_equal(value, expected, err_msg=path)


def train_tiny(workdir: Path):
    """The tiny preset on the bytes of this file."""
    config = ConfigDict(TINY | {"mesh": dict(context=4, tensor=2), "data": dict(seq_len=256)})
    config.train = dict(steps=30, global_batch_size=2)
    config.optimizer = dict(learning_rate=3e-3, warmup_steps=5)
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)[: 2 * 30 * 256 // 4]
    rows = np.resize(text, (30, 2, 256)).astype(np.int32)
    return jaxlc.train.run(config, workdir, batches=[{"tokens": tokens} for tokens in rows])
