"""Packed sequences against `transformers`, document by document, for all ways to split them.

gpt-oss: sinks, biases, YaRN without truncation in all layers, alternating sliding and full layers,
experts. Qwen 3.5: two layers of Gated DeltaNet and a full one; or experts with a shared one,
between two layers of Gated DeltaNet. Qwen3-Next: the same with a dense layer. Olmo Hybrid: a layer
with attention between two of Gated DeltaNet. Ministral 3: queries are scaled by the position within
their document. MiniMax-M2: norms of all heads together, partial RoPE. DeepSeek V3: latent
attention, with yarn. Dense families: their windows, longrope, biases and multipliers.
"""

import dataclasses

import numpy as np
import pytest

from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import load
from jaxlc.step.step import build_step
from tests.hf.comparison import (
    assert_small,
    by_names_in_files,
    evaluate,
    needs_transformers,
    relative_error,
    run_jobs,
    step_of,
    tokens_of,
)
from tests.hf.models import CHOICE_BIAS, FULL, write_model

pytestmark = needs_transformers
DOCUMENTS = (40, 56)  # of both sequences
DENSE = ("exaone4_hybrid", "granite", "llama_tied", "olmo2", "phi3", "phi3_window", "seed_oss")
DENSE += ("qwen2_window", "qwen3_window")
MODELS = {
    "sliding": dict(case="gpt_oss"),
    "full": dict(case="gpt_oss", layer_types=[FULL] * 3),
    "delta_net": dict(case="qwen3_5_hybrid"),
    "olmo_hybrid": dict(case="olmo_hybrid"),
    "shared_expert": dict(case="qwen3_5_moe"),
    "query_scale": dict(case="ministral3"),
    "minimax_m2": dict(case="minimax_m2"),
    "qwen3_next": dict(case="qwen3_next"),
    "deepseek_v3": dict(case="deepseek_v3"),
    "mamba2": dict(case="granite_hybrid"),
    "mamba2_experts": dict(case="granite_hybrid_moe"),
    "nemotron_h": dict(case="nemotron_h_moe"),
    "kimi_linear": dict(case="kimi_linear"),
    "falcon_h1": dict(case="falcon_h1"),
    "falcon_h1_norm": dict(case="falcon_h1_norm"),
    **{case: dict(case=case) for case in DENSE},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_model(root / name, dtype=np.float32, **fields)
        for name, fields in MODELS.items()
    }


@pytest.fixture(scope="module")
def references(directories, tmp_path_factory):
    """For each model: the logits and gradients of all documents, as those of packed sequences."""
    jobs = {
        (name, index): dict(job="gradients", directory=str(directory), tokens=tokens.tolist())
        for name, directory in directories.items()
        for index, tokens in enumerate(
            np.split(tokens_of(sum(DOCUMENTS)), np.cumsum(DOCUMENTS)[:-1], axis=1)
        )
    }
    results = run_jobs(tmp_path_factory.mktemp("references"), jobs)
    # a document of n tokens has n - 1 losses
    weights = (np.array(DOCUMENTS) - 1) / (sum(DOCUMENTS) - len(DOCUMENTS))
    packed = {}
    for name in directories:
        parts = [results[name, index] for index in range(len(DOCUMENTS))]
        packed[name] = {"logits": np.concatenate([part["logits"] for part in parts], axis=1)}
        for key in parts[0]:
            if key.startswith("gradient/"):
                packed[name][key] = sum(
                    weight * part[key] for weight, part in zip(weights, parts, strict=True)
                )
    return packed


@pytest.mark.parametrize(
    ("model", "mesh", "attention", "memory"),
    [
        ("sliding", dict(), dict(), dict()),
        ("sliding", dict(context=2), dict(), dict(remat="full", layers_per_remat_group=2)),
        ("sliding", dict(context=4), dict(), dict(offload=("residual",))),
        ("sliding", dict(context=8), dict(), dict()),
        ("sliding", dict(context=4, tensor=2), dict(strategy="hybrid", ulysses_degree=2), dict()),
        ("sliding", dict(context=2, tensor=2), dict(strategy="all_gather"), dict(remat="none")),
        ("sliding", dict(context=2, fsdp=2), dict(strategy="ulysses"), dict()),
        ("sliding", dict(context=4), dict(), dict(tile_tokens=12)),
        (
            "full",
            dict(context=2, tensor=2),
            dict(strategy="ring"),
            dict(tile_tokens=24, remat="full"),
        ),
        ("full", dict(context=2), dict(strategy="ulysses"), dict(tile_tokens=24)),
        (
            "sliding",
            dict(context=4),
            dict(strategy="hybrid", ulysses_degree=2),
            dict(tile_tokens=24, optimizer="host"),
        ),
        ("delta_net", dict(context=2, tensor=2), dict(), dict(offload=("residual",))),
        (
            "delta_net",
            dict(context=4),
            dict(strategy="all_gather"),
            dict(remat="full", layers_per_remat_group=3),
        ),
        ("delta_net", dict(context=8), dict(), dict()),
        ("olmo_hybrid", dict(context=2, tensor=2), dict(), dict()),
        ("olmo_hybrid", dict(context=4), dict(strategy="ulysses"), dict(remat="full")),
        (
            "shared_expert",
            dict(context=4, tensor=2),
            dict(),
            dict(remat="full", save=("mlp_gate",)),
        ),
        ("shared_expert", dict(context=8), dict(strategy="all_gather"), dict()),
        ("query_scale", dict(context=4, tensor=2), dict(), dict()),
        ("query_scale", dict(context=2), dict(strategy="ulysses"), dict(tile_tokens=24)),
        ("qwen3_next", dict(context=2, tensor=2), dict(), dict()),
        ("qwen3_next", dict(context=4), dict(), dict(remat="full")),
        ("minimax_m2", dict(context=2, tensor=2), dict(), dict()),
        ("deepseek_v3", dict(context=2, tensor=2), dict(), dict()),
        ("deepseek_v3", dict(context=4), dict(), dict(tile_tokens=12)),
        ("mamba2", dict(context=2, tensor=4), dict(), dict()),
        ("mamba2", dict(context=4), dict(), dict(tile_tokens=12)),
        ("mamba2_experts", dict(context=4, tensor=2), dict(strategy="all_gather"), dict()),
        ("nemotron_h", dict(context=2, tensor=4), dict(), dict(tile_tokens=24)),
        ("kimi_linear", dict(context=4, tensor=2), dict(), dict(tile_tokens=12)),
        ("falcon_h1", dict(context=4, tensor=2), dict(), dict()),
        ("falcon_h1", dict(context=4), dict(), dict(tile_tokens=12)),
        ("falcon_h1_norm", dict(context=2, tensor=4), dict(), dict(tile_tokens=24, remat="full")),
        *((case, dict(context=2, tensor=2), dict(), dict()) for case in DENSE),
        *((case, dict(context=4), dict(), dict(tile_tokens=12)) for case in DENSE),
        ("minimax_m2", dict(context=8), dict(strategy="all_gather"), dict()),
    ],
    ids=str,
)
def test_packed_documents_equal_transformers(
    model, mesh, attention, memory, directories, references
):
    step = step_of(directories[model], sum(DOCUMENTS), mesh)
    settings = dict(attention=attention, memory=memory)
    replaced = {
        name: dataclasses.replace(getattr(step.config, name), **values)
        for name, values in settings.items()
    }
    step = build_step(load(dataclasses.replace(step.config, **replaced)), step.mesh)
    assert step.config.model.attention.sinks == (model in ("sliding", "full"))
    if model not in DENSE:
        assert step.config.model.rope.sliding_scaling == (model == "sliding")
    expected, (params, _) = references[model], load_pretrained(step)
    logits, gradients = evaluate(step, params, tokens_of(sum(DOCUMENTS)), documents=DOCUMENTS)
    errors = {"logits": relative_error(logits, expected["logits"])}
    for name, gradient in by_names_in_files(step, gradients).items():
        if name.endswith(CHOICE_BIAS):  # no parameter
            continue
        errors[name] = relative_error(gradient, expected[f"gradient/{name}"])
    assert model in ("query_scale", "minimax_m2", "deepseek_v3", *DENSE) or any(
        any(x in name for x in (".sinks", ".linear_attn.", ".mamba.", "A_log")) for name in errors
    )
    assert_small(errors, f"{model}, {mesh}, {attention}, {memory}")
