"""Hugging Face directories: values on a mesh, bytes read, and errors for bad input."""

import contextlib
import dataclasses
import functools
import importlib.machinery
import itertools
import json
import math
import re
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

import jaxlc
import jaxlc.train
from jaxlc.checkpoints.pretrained import keep_description, load_pretrained
from jaxlc.cli.flags import mesh_sizes
from jaxlc.config import PRESETS, load, with_settings
from jaxlc.config.command_line import parse
from jaxlc.config.models.config_json import MODEL_TYPE, config_json_of, family_of, settings_of
from jaxlc.config.models.families import FAMILIES
from jaxlc.config.models.model_schema import KindConfig, model_from
from jaxlc.config.models.pretrained import locate
from jaxlc.core import errors
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.evals.evaluate_run import results_directory
from jaxlc.hf.files import TensorFiles
from jaxlc.hf.load import layouts_of, paths_of, read_shard, shapes_of
from jaxlc.models.quantized import Nf4
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.state import lacks_host_memory
from jaxlc.step.step import build_step
from tests.hf.models import (
    CASES,
    FALCON_NAMES,
    FULL,
    FUSED,
    LINEAR,
    LLAMA3_ROPE,
    RELEASED_NAMES,
    SHARED_FIELDS,
    SLIDING,
    mixers_of,
    name_in_mixtral,
    number_of_experts,
    renamed,
    tensors_of,
    write_model,
    write_nf4_model,
    write_tensors,
)
from tests.models.plain_rope import with_rope
from tests.train.runs import write_untrained_run


def config_of(directory, **settings):
    return with_settings(
        load(ConfigDict({"model": {"init_from": str(directory)}})),
        {"data.seq_len": 64, "train.global_batch_size": 4, **settings},
    )


def loaded(directory, **mesh):
    config = config_of(directory, **{f"mesh.{axis}": size for axis, size in mesh.items()})
    step = build_step(config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))
    params, line = load_pretrained(step)
    return step, dict(paths_of(params)), line


def expected_params(name, tensors=None):
    """The parameters, with the conversions written out for each tensor."""
    case, tensors = CASES[name], tensors_of(name) if tensors is None else tensors
    config = case.config
    if case.blocks:
        return nemotron_params(config, tensors)
    if config["model_type"] == "falcon_h1":
        for name, own in FALCON_NAMES.items():
            tensors = {x.replace(own, name): value for x, value in tensors.items()}
    L, D, N = (config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    K, H = config["num_key_value_heads"], config.get("head_dim") or D // N
    conversions = {
        "attention/wq": ("self_attn.q_proj.weight", lambda x: x.T.reshape(D, N, -1)),
        "attention/wk": ("self_attn.k_proj.weight", lambda x: x.T.reshape(D, K, H)),
        "attention/wv": ("self_attn.v_proj.weight", lambda x: x.T.reshape(D, K, H)),
        "attention/wo": ("self_attn.o_proj.weight", lambda x: x.T.reshape(N, H, D)),
        "mlp/w_gate": ("mlp.gate_proj.weight", lambda x: x.T),
        "mlp/w_up": ("mlp.up_proj.weight", lambda x: x.T),
        "mlp/w_down": ("mlp.down_proj.weight", lambda x: x.T),
    }
    if case.has_latents:
        mlp = {path: value for path, value in conversions.items() if path.startswith("mlp/")}
        conversions = latent_conversions(config) | mlp
    conversions |= {
        f"{path}/scale": (f"{norm}.weight", lambda x: x) for norm, path in case.norms.items()
    }
    for x in case.biases:
        shapes = dict(q=(N, -1), k=(K, H), v=(K, H), o=(D,))
        conversions[f"attention/b{x}"] = (
            f"self_attn.{x}_proj.bias",
            functools.partial(np.reshape, shape=shapes[x]),
        )
    if config["model_type"] in FUSED:
        conversions |= {
            "mlp/w_gate": ("mlp.gate_up_proj.weight", lambda x: x[: len(x) // 2].T),
            "mlp/w_up": ("mlp.gate_up_proj.weight", lambda x: x[len(x) // 2 :].T),
        }
    if config["model_type"] == "phi3":
        conversions["attention/wq"] = (
            "self_attn.qkv_proj.weight",
            lambda x: x[: N * H].T.reshape(D, N, H),
        )
        for i, x in enumerate("kv"):
            first = (N + i * K) * H
            conversions[f"attention/w{x}"] = (
                "self_attn.qkv_proj.weight",
                lambda x, first=first: x[first : first + K * H].T.reshape(D, K, H),
            )
    if config.get("mlp_bias"):
        conversions |= {
            f"mlp/b_{x}": (f"mlp.{x}_proj.bias", lambda x: x) for x in ("gate", "up", "down")
        }
    if config["model_type"] == "afmoe":
        conversions["attention/wg"] = (
            "self_attn.gate_proj.weight",
            lambda x: x.T.reshape(-1, N, H),
        )
    if case.has_sinks:
        conversions["attention/sinks"] = ("self_attn.sinks", lambda x: x)
    if case.qk_norm != "none":
        shape = (H,) if case.qk_norm == "head" else (-1, H)
        conversions |= {
            f"attention/{x}_norm/scale": (f"self_attn.{x}_norm.weight", lambda x: x.reshape(shape))
            for x in "qk"
        }
    if config["model_type"] == "falcon_h1":
        conversions = {
            x.replace("attention/", "attention/attention/"): y for x, y in conversions.items()
        }
        for path, (name, convert) in _mamba(config).items():
            conversions[path.replace("attention/", "attention/mamba2/")] = name, convert
    mlp = {path: value for path, value in conversions.items() if path.startswith("mlp/")}
    if config.get("hidden_act") == "relu2":
        mlp = {path: value for path, value in mlp.items() if "gate" not in path}
    blocks = {False: mlp, True: mlp}  # by whether the layer is dense, in a model with experts
    if config["model_type"] == "kimi_linear":
        blocks[False] = kimi_experts(config)
    elif config["model_type"].startswith("granitemoe"):
        blocks[False] = granite_conversions(config)
    elif config["model_type"] == "gpt_oss":
        blocks[False] = STACKED_EXPERTS
    elif number_of_experts(config):
        blocks[False] = expert_conversions(config)
    mixers = {FULL: {x: value for x, value in conversions.items() if not x.startswith("mlp/")}}
    kinds = list(zip(mixers_of(case), (layer in case.dense_layers for layer in range(L))))
    if LINEAR in mixers_of(case):
        norms = {
            f"{path}/scale": (f"{norm}.weight", lambda x: x)
            for norm, path in case.delta_norms.items()
        }
        if config["model_type"] == "kimi_linear":
            mixers[LINEAR] = norms | kimi_conversions(config)
        elif case.mixers:
            mixers[LINEAR] = norms | _mamba(config)
        else:
            mixers[LINEAR] = norms | delta_net_conversions(case)
    names = {FULL: "nope" if config["model_type"] == "olmo_hybrid" else "full"}
    if case.has_latents:
        names[FULL] = "latent"
    names[LINEAR] = "gated_delta_net"
    names |= {name: "full" if x == "rope" else x for name, x in case.mixers.items()}
    if config["model_type"] in ("afmoe", "exaone_moe"):  # each kind has its own stack
        kinds = [(name, is_dense) for name, (_, is_dense) in zip(config["layer_types"], kinds)]
        mixers[SLIDING] = mixers[FULL]
        names[SLIDING] = "sliding"
    stacks = dict.fromkeys(kinds, "")
    if len(stacks) > 1:
        stacks = {
            (mixer, is_dense): f"dense_{names[mixer]}/".replace(f"dense_{names[FULL]}", "dense")
            if is_dense
            else f"{names[mixer]}/"
            for mixer, is_dense in stacks
        }
    last = (L - case.first_layers) % case.group_layers
    params = {
        "embedding": tensors["model.embed_tokens.weight"],
        "final_norm/scale": tensors["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        params["head"] = tensors["lm_head.weight"].T
    for kind, stack in stacks.items():
        mixer, is_dense = kind
        for path, (name, convert) in {**mixers[mixer], **blocks[is_dense]}.items():
            converted = {
                i: convert(
                    *(
                        tensors[f"model.layers.{i}.{x}"]
                        for x in ([name] if isinstance(name, str) else name)
                    )
                )
                for i in range(L)
                if kinds[i] == kind
            }
            limits = dict(
                first_layers=(0, case.first_layers),
                layers=(case.first_layers, L - last),
                last_layers=(L - last, L),
            )
            for name, (start, stop) in limits.items():
                if own := [x for i, x in converted.items() if start <= i < stop]:
                    params[f"{name}/{stack}{path}"] = np.stack(own)
    return {path: value.astype(np.float32) for path, value in params.items()}


def _mamba(config):
    """As `conversions` in `expected_params`, of Mamba-2 in Granite 4 and Falcon-H1."""
    sizes = (config[f"mamba_{x}"] for x in ("n_groups", "d_state", "n_heads", "d_head"))
    mamba = mamba_conversions(*sizes)
    if not config.get("mamba_rms_norm", True):
        del mamba["attention/out_norm/scale"]
    return {path: (f"mamba.{x}", y) for path, (x, y) in mamba.items()}


def latent_conversions(config):
    """As `conversions` in `expected_params`, of a layer with latent attention."""
    N = config["num_attention_heads"]
    parts = {
        "wkv_down": ("kv_a_proj_with_mqa.weight", np.transpose),
        "kv_norm/scale": ("kv_a_layernorm.weight", np.asarray),
        "wkv_up": ("kv_b_proj.weight", lambda x: x.T.reshape(len(x.T), N, -1)),
        "wo": ("o_proj.weight", lambda x: x.T.reshape(N, -1, len(x))),
    }
    parts["wq"] = ("q_proj.weight", lambda x: x.T.reshape(len(x.T), N, -1))
    if config["q_lora_rank"]:
        del parts["wq"]
        parts |= {
            "wq_down": ("q_a_proj.weight", np.transpose),
            "q_norm/scale": ("q_a_layernorm.weight", np.asarray),
            "wq_up": ("q_b_proj.weight", lambda x: x.T.reshape(len(x.T), N, -1)),
        }
    return {
        f"attention/{path}": (f"self_attn.{name}", convert)
        for path, (name, convert) in parts.items()
    }


def expert_conversions(config):
    """As `conversions` in `expected_params`, of the feed-forward block of a layer with experts: a
    tensor for each, or for all of Qwen 3.5; and shared ones."""

    def stacked(*tensors):
        return np.stack([x.T for x in tensors])

    width, module = config.get("moe_intermediate_size"), "shared_experts"
    conversions = {"mlp/router": ("mlp.gate.weight", np.transpose)}
    has_shared = {*SHARED_FIELDS} & config.keys()
    if has_shared and config["model_type"] not in ("deepseek_v2", "mistral4"):
        conversions["mlp/choice_bias"] = ("mlp.gate.e_score_correction_bias", np.ravel)
    if "shared_expert_intermediate_size" in config:
        module = "shared_expert"
        conversions["mlp/shared_gate"] = ("mlp.shared_expert_gate.weight", np.transpose)
    for x in ("gate", "up", "down"):
        names = [
            f"mlp.experts.{expert}.{x}_proj.weight" for expert in range(number_of_experts(config))
        ]
        conversions[f"mlp/expert_{x}"] = names, stacked
        if has_shared or module == "shared_expert":
            name = f"mlp.{module}.{x}_proj.weight"
            conversions[f"mlp/shared/w_{x}"] = name, np.transpose
    if config["model_type"] == "qwen3_vl_moe_text":
        conversions |= {
            "mlp/expert_gate": ("mlp.experts.gate_up_proj", lambda x: x[..., :width]),
            "mlp/expert_up": ("mlp.experts.gate_up_proj", lambda x: x[..., width:]),
            "mlp/expert_down": ("mlp.experts.down_proj", np.asarray),
        }
    if config["model_type"] in ("qwen3_5_moe_text", "mistral4"):
        gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
        conversions |= {
            "mlp/expert_gate": (gate_up, lambda x: x[:, :width].swapaxes(1, 2)),
            "mlp/expert_up": (gate_up, lambda x: x[:, width:].swapaxes(1, 2)),
            "mlp/expert_down": (down, lambda x: x.swapaxes(1, 2)),
        }
    if config["model_type"] == "minimax_m2":
        conversions["mlp/choice_bias"] = ("mlp.e_score_correction_bias", np.asarray)

    def released(name):
        for x, own in RELEASED_NAMES.get(config["model_type"], {}).items():
            name = name.replace(x, own)
        is_mixtral = config["model_type"] in ("minimax_m2", "mixtral")
        return name_in_mixtral(name) if is_mixtral else name

    return {
        path: ([*map(released, x)] if isinstance(x, list) else released(x), y)
        for path, (x, y) in conversions.items()
    }


STACKED_EXPERTS = {
    "mlp/router": ("mlp.router.weight", np.transpose),
    "mlp/router_bias": ("mlp.router.bias", np.asarray),
    "mlp/expert_gate": ("mlp.experts.gate_up_proj", lambda x: x[..., ::2]),
    "mlp/expert_up": ("mlp.experts.gate_up_proj", lambda x: x[..., 1::2]),
    "mlp/gate_bias": ("mlp.experts.gate_up_proj_bias", lambda x: x[..., ::2]),
    "mlp/up_bias": ("mlp.experts.gate_up_proj_bias", lambda x: x[..., 1::2]),
    "mlp/expert_down": ("mlp.experts.down_proj", np.asarray),
    "mlp/down_bias": ("mlp.experts.down_proj_bias", np.asarray),
}


def granite_conversions(config):
    """As `conversions` in `expected_params`, of the feed-forward block of a layer of Granite 3
    or 4."""
    S, F = config.get("shared_intermediate_size"), config["intermediate_size"]
    stem, gate_up = "mlp/", "shared_mlp.input_linear.weight"
    conversions = {}
    if config["num_local_experts"]:
        stem, experts = "mlp/shared/", "block_sparse_moe.input_linear.weight"
        conversions = {
            "mlp/router": ("block_sparse_moe.router.layer.weight", np.transpose),
            "mlp/expert_gate": (experts, lambda x: x[:, :F].swapaxes(1, 2)),
            "mlp/expert_up": (experts, lambda x: x[:, F:].swapaxes(1, 2)),
            "mlp/expert_down": (
                "block_sparse_moe.output_linear.weight",
                lambda x: x.swapaxes(1, 2),
            ),
        }
    if not S:
        return conversions
    return conversions | {
        f"{stem}w_gate": (gate_up, lambda x: x[:S].T),
        f"{stem}w_up": (gate_up, lambda x: x[S:].T),
        f"{stem}w_down": ("shared_mlp.output_linear.weight", np.transpose),
    }


def kimi_conversions(config):
    """As `conversions` in `expected_params`, of Kimi Delta Attention."""
    H, K = (config["linear_attn_config"][x] for x in ("num_heads", "head_dim"))
    conversions = {f"w{x}": (f"{x}_proj.weight", lambda y: y.T.reshape(-1, H, K)) for x in "qkv"}
    conversions |= {
        f"conv_{x}": (f"{x}_conv1d.weight", lambda y: y[:, 0].T.reshape(-1, H, K)) for x in "qkv"
    }
    for name, x in dict(wf="f", wz="g").items():
        conversions[f"{name}_down"] = f"{x}_a_proj.weight", np.transpose
        conversions[f"{name}_up"] = f"{x}_b_proj.weight", lambda y: y.T.reshape(K, H, K)
    conversions |= {
        "wb": ("b_proj.weight", np.transpose),
        "log_decay": ("A_log", np.asarray),
        "decay_bias": ("dt_bias", lambda y: y.reshape(H, K)),
        "out_norm/scale": ("o_norm.weight", np.asarray),
        "wo": ("o_proj.weight", lambda y: y.T.reshape(H, K, -1)),
    }
    return {f"attention/{path}": (f"self_attn.{x}", y) for path, (x, y) in conversions.items()}


def kimi_experts(config):
    """As `conversions` in `expected_params`, of the experts of Kimi Linear."""
    conversions = {
        "mlp/router": ("gate.weight", np.transpose),
        "mlp/choice_bias": ("gate.e_score_correction_bias", np.asarray),
    }
    for part, x in dict(gate="w1", up="w3", down="w2").items():
        names = [f"block_sparse_moe.experts.{i}.{x}.weight" for i in range(config["num_experts"])]
        conversions[f"mlp/shared/w_{part}"] = f"shared_experts.{part}_proj.weight", np.transpose
        conversions[f"mlp/expert_{part}"] = names, lambda *y: np.stack([z.T for z in y])
    return {
        path: (x if isinstance(x, list) else f"block_sparse_moe.{x}", y)
        for path, (x, y) in conversions.items()
    }


def nemotron_params(config, tensors):
    """`expected_params` of Nemotron-H."""
    N, K, H = (config[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def stacked(*tensors):
        return np.stack([x.T for x in tensors])

    conversions = {
        "*": {
            "attention/wq": ("q_proj.weight", lambda x: x.T.reshape(-1, N, H)),
            "attention/wk": ("k_proj.weight", lambda x: x.T.reshape(-1, K, H)),
            "attention/wv": ("v_proj.weight", lambda x: x.T.reshape(-1, K, H)),
            "attention/wo": ("o_proj.weight", lambda x: x.T.reshape(N, H, -1)),
        },
        "-": {f"mlp/w_{x}": (f"{x}_proj.weight", np.transpose) for x in ("up", "down")},
        "E": {
            "mlp/router": ("gate.weight", np.transpose),
            "mlp/choice_bias": ("gate.e_score_correction_bias", np.asarray),
        },
        "M": mamba_conversions(
            *(
                config[x]
                for x in ("n_groups", "ssm_state_size", "mamba_num_heads", "mamba_head_dim")
            )
        ),
    }
    if config.get("moe_latent_size"):
        for i, x in enumerate(("down", "up"), 1):
            path = f"mlp/latent/w_{x}"
            conversions["E"][path] = f"fc{i}_latent_proj.weight", np.transpose
    for x in ("up", "down"):
        names = [f"experts.{i}.{x}_proj.weight" for i in range(number_of_experts(config))]
        conversions["E"][f"mlp/expert_{x}"] = names, stacked
        conversions["E"][f"mlp/shared/w_{x}"] = f"shared_experts.{x}_proj.weight", np.transpose
    params = {
        "embedding": tensors["backbone.embeddings.weight"],
        "final_norm/scale": tensors["backbone.norm_f.weight"],
        "head": tensors["lm_head.weight"].T,
    }
    pattern = config["hybrid_override_pattern"]
    stacks = model_of(settings_of(config, "config.json")).layer_stacks
    for stack, layers in stacks.items():
        (block,) = {pattern[i] for i in layers}
        norm = "attention_norm" if block in "M*" else "mlp_norm"
        own = conversions[block] | {f"{norm}/scale": ("../norm.weight", np.asarray)}
        for path, (names, convert) in own.items():
            values = []
            for i in layers:
                stem = f"backbone.layers.{i}.mixer."
                full = [stem + x for x in ([names] if isinstance(names, str) else names)]
                values.append(convert(*(tensors[x.replace("mixer.../", "")] for x in full)))
            params["/".join([*stack, path])] = np.stack(values)
    return params


def mamba_conversions(G, N, H, P):
    """As `conversions` in `expected_params`, of a layer with Mamba-2 of G groups and H heads."""
    shapes = dict(z=(H, P), v=(H, P), k=(G, N), q=(G, N), b=(H,))
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    rows = {x: slice(end - math.prod(shapes[x]), end) for x, end in zip(shapes, ends)}
    conversions = {
        f"w{x}": ("in_proj.weight", lambda y, x=x: y[rows[x]].T.reshape(-1, *shapes[x]))
        for x in shapes
    }
    for x in "vkq":
        part = slice(rows[x].start - H * P, rows[x].stop - H * P)
        shape = shapes[x]
        conversions[f"conv_{x}"] = (
            "conv1d.weight",
            lambda y, part=part, shape=shape: y[part, 0].T.reshape(-1, *shape),
        )
        conversions[f"bias_{x}"] = (
            "conv1d.bias",
            lambda y, part=part, shape=shape: y[part].reshape(shape),
        )
    conversions |= {
        "wo": ("out_proj.weight", lambda y: y.T.reshape(H, P, -1)),
        "log_decay": ("A_log", np.asarray),
        "decay_bias": ("dt_bias", np.asarray),
        "skip": ("D", np.asarray),
        "out_norm/scale": ("norm.weight", lambda y: y.reshape(H, P)),
    }
    return {f"attention/{path}": x for path, x in conversions.items()}


def delta_net_conversions(case):
    """As `conversions` in `expected_params`, of a layer with Gated DeltaNet."""
    G, K, H, V = (
        case.config[f"linear_{name}"]
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    )
    rows = dict(
        q=(slice(0, G * K), (G, K)),
        k=(slice(G * K, 2 * G * K), (G, K)),
        v=(slice(2 * G * K, None), (H, V)),
    )
    conversions = {
        "attention/wz": ("in_proj_z.weight", lambda x: x.T.reshape(-1, H, V)),
        "attention/wb": ("in_proj_b.weight", np.transpose),
        "attention/wa": ("in_proj_a.weight", np.transpose),
        "attention/wo": ("out_proj.weight", lambda x: x.T.reshape(H, V, -1)),
        "attention/log_decay": ("A_log", np.asarray),
        "attention/decay_bias": ("dt_bias", np.asarray),
        "attention/out_norm/scale": ("norm.weight", np.asarray),
    }
    if case.config["model_type"] == "qwen3_next":
        conversions |= fused_conversions(G, K, H, V)
    elif not case.delta_modules:
        conversions |= {
            f"attention/w{x}": (
                "in_proj_qkv.weight",
                lambda x, rows=rows: x[rows[0]].T.reshape(-1, *rows[1]),
            )
            for x, rows in rows.items()
        }
    else:
        conversions |= {
            f"attention/w{x}": (
                f"in_proj_{x}.weight",
                lambda x, shape=shape: x.T.reshape(-1, *shape),
            )
            for x, (_, shape) in rows.items()
        }
    for x, (part, shape) in rows.items():
        conversions[f"attention/conv_{x}"] = (
            "conv1d.weight",
            lambda x, part=part, shape=shape: x[part, 0].T.reshape(-1, *shape),
        )
    return {
        path: (f"linear_attn.{renamed(name, case)}", convert)
        for path, (name, convert) in conversions.items()
    }


def fused_conversions(G, K, H, V):
    """As `conversions` in `expected_params`, of tensors whose rows are those of each key head."""
    R = H // G

    def part(tensor, start, width, shape):
        heads = tensor.reshape(G, -1, tensor.shape[1])
        return heads[:, start : start + width].reshape(-1, tensor.shape[1]).T.reshape(-1, *shape)

    starts = dict(
        q=(0, K, (G, K)),
        k=(K, K, (G, K)),
        v=(2 * K, R * V, (H, V)),
        z=(2 * K + R * V, R * V, (H, V)),
    )
    gates = dict(b=(0, R, (H,)), a=(R, R, (H,)))
    names = {**dict.fromkeys(starts, "in_proj_qkvz"), **dict.fromkeys(gates, "in_proj_ba")}
    return {
        f"attention/w{x}": (
            f"{names[x]}.weight",
            lambda tensor, place=place: part(tensor, *place),
        )
        for x, place in (starts | gates).items()
    }


def model_of(settings):
    """The model with the result of `settings_of`."""
    kinds = settings.get("kinds", {}).items()
    own = dict(kinds=tuple(KindConfig(name=name, **x) for name, x in kinds))
    return model_from(PRESETS["tiny"].by_path | settings | own)


@pytest.mark.parametrize(
    ("model_type", "exported_type"), [("kimi_k2", "deepseek_v3"), ("iquestcoder", "llama")]
)
def test_models_with_the_layers_of_another_family_are_exported_as_such(model_type, exported_type):
    config = CASES[exported_type].config
    own = config | dict(model_type=model_type, auto_map={"AutoConfig": "configuration_own.Own"})
    settings = settings_of(own, "config.json")
    assert settings == settings_of(config, "config.json")
    exported = config_json_of(model_of(settings), own, seq_len=64, dtype="bfloat16")
    assert exported["model_type"] == exported_type and "auto_map" not in exported


def test_cases_contain_every_family():
    """They are those of the comparisons with transformers, logits and generated text included."""
    exported = {name for name, family in FAMILIES.items() if not family.exported_type}
    assert {case.config["model_type"] for case in CASES.values()} == exported


@pytest.mark.parametrize("case", CASES)
def test_load_on_a_mesh_equals_the_files(case, tmp_path):
    step, params, _ = loaded(write_model(tmp_path / "model", case), context=2, tensor=2)
    expected = expected_params(case)
    assert params.keys() == expected.keys() == dict(paths_of(step.abstract_state.params)).keys()
    for path, value in expected.items():
        assert params[path].sharding == dict(paths_of(step.abstract_state.params))[path].sharding
        array = np.asarray(params[path])
        if path in ("embedding", "head"):  # 61 ids are padded to 62 for tensor=2
            axis = int(path == "head")
            assert array.shape[axis] == 62
            assert not np.take(array, 61, axis).any()
            array = np.take(array, range(61), axis)
        np.testing.assert_array_equal(array, value, err_msg=path)


@pytest.mark.parametrize(
    ("case", "architecture", "prefix", "other"),
    [
        ("ministral3", "Mistral3ForConditionalGeneration", "language_model.", "vision_tower."),
        ("gemma3", "Gemma3ForConditionalGeneration", "model.language_model.", "vision_tower."),
        (
            "qwen3_5_hybrid",
            "Qwen3_5ForConditionalGeneration",
            "model.language_model.",
            "model.visual.",
        ),
        ("qwen3_5_hybrid", "Qwen3_5ForConditionalGeneration", "model.language_model.", "mtp."),
        (
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            "model.language_model.",
            "model.visual.",
        ),
    ],
)
def test_load_of_a_model_with_images_reads_its_language_model(
    case, architecture, prefix, other, tmp_path
):
    directory = write_model(tmp_path / "model", case)
    others = {f"{other}a": np.zeros(3, np.float32)}
    replaced = "" if prefix == "language_model." else "model."  # released, or by transformers 5
    rewrite(
        directory,
        lambda x: {name.replace(replaced, prefix, 1): value for name, value in x.items()} | others,
    )
    text = dict(CASES[case].config)
    content = dict(
        model_type=FAMILIES[text["model_type"]].multimodal_type, architectures=[architecture]
    )
    dtype = "dtype" if "dtype" in text else "torch_dtype"
    content[dtype] = text.pop(dtype)
    content["tie_word_embeddings"] = text["tie_word_embeddings"]
    text["tie_word_embeddings"] = not content["tie_word_embeddings"]  # transformers ignores it
    (directory / "config.json").write_text(
        json.dumps(content | dict(text_config=text, vision_config={"depth": 2}))
    )
    step, params, _ = loaded(directory)
    (tmp_path / "run").mkdir()
    line = keep_description(step.config.model, tmp_path / "run")
    assert line.startswith(f"untrained  1 tensor {other}*, SHA-256 ")
    assert step.config.model.rope.query_beta == (0.4 if case == "ministral3" else 0)
    for path, value in expected_params(case).items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)


def stack_experts(tensors):
    """One tensor for all experts of a layer, as `save_pretrained(save_original_format=False)`
    writes it.
    """
    stacked = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name in [name for name in tensors if name.endswith(".experts.0.up_proj.weight")]:
        stem = name.removesuffix(".0.up_proj.weight")
        gate, up, down = (
            np.stack([tensors[f"{stem}.{expert}.{x}_proj.weight"] for expert in range(8)])
            for x in ("gate", "up", "down")
        )
        stacked |= {
            f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1),
            f"{stem}.down_proj": down,
        }
    return stacked


def stack_minimax_experts(tensors):
    """As `stack_experts`, with the names of modules."""
    names = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return stack_experts(
        {".".join(names.get(x, x) for x in name.split(".")): y for name, y in tensors.items()}
    )


def transpose_experts(tensors):
    """nn.Linear of each expert, as `save_pretrained(save_original_format=False)` writes them."""
    return {x: y.swapaxes(1, 2).copy() if ".experts." in x else y for x, y in tensors.items()}


def split_experts(tensors):
    """A tensor for each expert."""
    split = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name in [name for name in tensors if name.endswith(".gate_up_proj")]:
        stem = name.removesuffix(".gate_up_proj")
        for expert, (gate_up, down) in enumerate(zip(tensors[name], tensors[f"{stem}.down_proj"])):
            parts = zip(("gate", "up", "down"), (*np.split(gate_up, 2), down))
            split |= {
                f"{stem}.{expert}.{x}_proj.weight": np.ascontiguousarray(part) for x, part in parts
            }
    return split


def rename_olmo_hybrid(tensors, cuts=(32, 64)):
    """The names of released files; save_pretrained cuts the convolution into equal parts."""
    names = {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    }
    result = {}
    for name, value in tensors.items():
        parts = zip("qkv", np.split(value, cuts)) if "conv1d" in name else ()
        result |= {
            name.replace("conv1d", f"{x}_conv1d"): np.ascontiguousarray(part) for x, part in parts
        }
        *layer, module, parameter = name.split(".")
        if "conv1d" not in name:
            result[".".join([*layer, names.get(module, module), parameter])] = value
    return result


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen3_moe", stack_experts),
        ("glm4_moe", stack_experts),
        ("qwen3_next", stack_experts),
        ("minimax_m2", stack_minimax_experts),
        ("qwen3_5_moe", split_experts),
        ("qwen3_vl_moe", transpose_experts),
        ("olmo_hybrid", rename_olmo_hybrid),
        ("olmo_hybrid", functools.partial(rename_olmo_hybrid, cuts=(24, 48))),
    ],
)
def test_load_of_tensors_as_other_programs_save_them_equals_the_files(case, change, tmp_path):
    directory = write_model(tmp_path / "model", case)
    rewrite(directory, change)
    _, params, line = loaded(directory, fsdp=2, tensor=2)
    assert f"{sum(x.nbytes for x in tensors_of(case).values()):,} bytes read" in line
    for path, value in expected_params(case).items():
        array = np.asarray(params[path])
        np.testing.assert_array_equal(array[tuple(map(slice, value.shape))], value, err_msg=path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_load_converts_every_dtype_to_float32(dtype, tmp_path):
    _, params, line = loaded(write_model(tmp_path / "model", "llama", num_files=1, dtype=dtype))
    tensors = tensors_of("llama", dtype)
    assert {x.dtype for x in params.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(
        params["embedding"], tensors["model.embed_tokens.weight"].astype(np.float32)
    )
    assert f"{sum(x.nbytes for x in tensors.values()):,} bytes read" in line


def test_load_reads_the_bytes_of_each_distinct_shard_once(tmp_path):
    """On fsdp=2 x tensor=2 with one process, norms are read once, although four devices have them."""
    _, _, line = loaded(write_model(tmp_path / "model", "llama"), data=2, fsdp=2, tensor=2)
    assert f"{sum(x.nbytes for x in tensors_of('llama').values()):,} bytes read" in line


@pytest.mark.parametrize(
    ("case", "shards"),
    [
        (
            "llama",
            {
                "layers/attention/wo": (1, 4),
                "layers/mlp/w_up": (1, 16),
                "embedding": (1, 8),
            },
        ),
        (
            "qwen3_next",  # of heads, also of a part of those of a key head, and of columns
            {
                "layers/gated_delta_net/attention/wk": (2, 2),
                "layers/gated_delta_net/attention/wz": (2, 4),
                "layers/gated_delta_net/attention/wa": (2, 2),
                "layers/dense_gated_delta_net/attention/wv": (1, 8),
            },
        ),
    ],
)
def test_read_shard_reads_only_its_share(case, shards, tmp_path):
    files = TensorFiles(write_model(tmp_path / "model", case))
    model = config_of(tmp_path / "model").model
    abstract = shapes_of(model)
    family = FAMILIES[CASES[case].config["model_type"]]
    layouts = layouts_of(family, model)
    for path, (cut, parts) in shards.items():
        param = abstract[path]
        index = [(0, size, 1) for size in param.shape]
        index[cut] = (param.shape[cut] // parts, 2 * param.shape[cut] // parts, 1)
        before = files.bytes_read
        shard = read_shard(files, layouts[path], tuple(index), param)
        assert files.bytes_read - before == math.prod(param.shape) * 2 // parts
        whole = expected_params(case)[path]
        np.testing.assert_array_equal(shard, whole[tuple(slice(*piece) for piece in index)])


def test_layouts_of_layers_of_different_shapes_name_their_layers():
    kinds = (KindConfig(name="wide", head_dim=64),)
    model = dataclasses.replace(
        PRESETS["tiny"], num_layers=7, layer_kinds=("full", "wide", "full"), kinds=kinds
    )
    layouts = layouts_of(FAMILIES["llama"], model)
    queries = {path: layout for path, layout in layouts.items() if path.endswith("/wq")}
    assert {path: list(layout.layers or ()) for path, layout in queries.items()} == {
        "layers/full/attention/wq": [0, 2, 3, 5],
        "layers/wide/attention/wq": [1, 4],
        "last_layers/full/attention/wq": [6],
    }
    assert queries["layers/wide/attention/wq"].names[1] == "model.layers.4.self_attn.q_proj.weight"
    assert queries["layers/wide/attention/wq"].stored_shape == (
        model.attention.num_heads * 64,
        model.model_dim,
    )


def test_config_takes_shape_and_tokenizer_of_the_model(tmp_path):
    directory = write_model(tmp_path / "model", "qwen3")
    config = config_of(directory)
    assert (config.model.model_dim, config.model.attention.qk_norm, config.model.rope.theta) == (
        32,
        "head",
        40000.0,
    )
    assert config.data.tokenizer == str(directory / "tokenizer.json")
    assert load(config) == config


def test_config_rope_may_be_overridden_and_shape_may_not(tmp_path):
    directory = str(write_model(tmp_path / "model", "llama"))
    assert (
        load(ConfigDict({"model": dict(init_from=directory, rope_theta=5e6)})).model.rope.theta
        == 5e6
    )
    with pytest.raises(
        UserError, match=r"model.num_layers=4 contradicts .*, which has 3.* also: .*vocab_size=9 "
    ):
        load(ConfigDict({"model": dict(init_from=directory, num_layers=4, vocab_size=9)}))


def test_init_from_of_a_command_replaces_the_shape_of_a_shipped_config(tmp_path):
    """extend_512k:mini sets the number of layers and of token ids of its own small model, and its
    RoPE.
    """
    directory = write_model(tmp_path / "model", "llama")
    command = ["program", "--config=extend_512k:mini", f"--config.model.init_from={directory}"]
    models = [stage.config.model for stage in parse(command).stages]
    own = [stage.config.model for stage in parse(command[:2]).stages]
    assert {(model.num_layers, model.vocab_size) for model in models} == {(3, 61)}
    assert [model.rope.theta for model in models] == [model.rope.theta for model in own]
    with pytest.raises(UserError, match="config.model.num_layers=5 contradicts"):
        parse([*command, "--config.model.num_layers=5"])


def test_config_that_was_loaded_does_not_need_the_model(tmp_path):
    directory = write_model(tmp_path / "model", "llama")
    config = config_of(directory)
    (directory / "config.json").unlink()
    assert load(config) == config


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("gemma3", dict(attention_bias=True), "attention_bias=True; only false"),
        (
            "olmo3",
            dict(layer_types=["linear_attention"] * 3),
            "layers of type linear_attention; in models of type olmo3",
        ),
        (
            "qwen3_5_hybrid",
            dict(mamba_ssm_dtype="bfloat16"),
            "mamba_ssm_dtype='bfloat16'; only float32",
        ),
        ("gemma3", dict(mlp_bias=True), "the unknown field mlp_bias=True"),
        ("llama", dict(hidden_act="gelu"), "hidden_act='gelu'; only silu"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (
            "llama",
            dict(final_logit_softcapping=30.0),
            "unknown field final_logit_softcapping=30.0 (capped logits)",
        ),
        ("llama", dict(num_local_experts=8), "unknown field num_local_experts=8, which"),
        (
            "llama",
            dict(quantization_config=dict(quant_method="mxfp4")),
            "(model_type llama) has weights that are quantized with mxfp4; use the model with weights in bfloat16,"
            " float16 or float32, or quantized with fp8",
        ),
        (
            "gpt_oss",
            dict(quantization_config=dict(quant_method="awq")),
            "quantized with awq; use the model with weights in bfloat16, float16 or float32, or quantized with fp8 or"
            " bitsandbytes or mxfp4",
        ),
        (
            "llama",
            dict(compression_config=dict(quant_method="compressed-tensors")),
            "quantized with compressed-tensors",
        ),
        (
            "llama",
            dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128])),
            "weight_block_size=[128]: expected two integers",
        ),
        (
            "llama",
            dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 0])),
            "weight_block_size=[128, 0]: expected two integers",
        ),
        ("llama", dict(is_causal=False), "is_causal=False; only true"),
        ("llama", dict(mlp_bias="false"), "mlp_bias='false': expected true or false"),
        (
            "qwen3_moe",
            dict(num_local_experts=4),
            "num_local_experts=4 and num_experts=8, which differ",
        ),
        ("qwen3_moe", dict(use_qk_norm=False), "use_qk_norm=False; only true"),
        (
            "llama",
            dict(rope_scaling=dict(type="proportional", factor=2.0)),
            "RoPE of type 'proportional'",
        ),
        (
            "llama",
            dict(rope_scaling=dict(rope_type="yarn", original_max_position_embeddings=8)),
            "without factor",
        ),
        ("llama", dict(rope_theta=None, rope_scaling=None), "rope_theta=null"),
        (
            "llama",
            dict(rope_theta=None, rope_parameters=dict(rope_type="default")),
            "rope_theta=null",
        ),
        (
            "llama",
            dict(rope_scaling=dict(LLAMA3_ROPE, rope_theta=7e4)),
            "which differ in model.rope.theta",
        ),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
            "which differ in model.rope.scaling",
        ),
        ("qwen3", dict(rope_theta=1e4), "which differ in model.rope.theta"),
        (
            "gemma3",
            dict(rope_parameters={FULL: dict(rope_theta=6e4)}),
            "which differ in model.rope.scaling",
        ),
        ("llama", dict(architectures=["LlamaForSequenceClassification"]), "only LlamaForCausalLM"),
        (
            "llama",
            dict(model_type="qwen3_vl_text", architectures=["Qwen3VLTextModel"]),
            "architectures ['Qwen3VLTextModel']; only a model of type qwen3_vl is supported",
        ),
        (
            "qwen3_moe",
            dict(
                model_type="minicpm3",
                kv_lora_rank=512,
                quantization_config=dict(quant_method="fp8"),
            ),
            "has model_type 'minicpm3'; supported are llama,",
        ),
        (
            "llama",
            dict(
                model_type="kimi_vl", text_config=dict(model_type="deepseek_v3", kv_lora_rank=512)
            ),
            "has model_type 'kimi_vl' (a model around one of type 'deepseek_v3'); supported are",
        ),
        (
            "llama",
            dict(model_type="another", mamba_n_heads=8, ssm_multipliers=[2.0], conv_L_cache=3),
            "model_type 'another' (state space layers and layers of short convolutions)$",
        ),
        (
            "llama",
            dict(a_field=1, mamba_d_state=16),
            "the unknown field mamba_d_state=16 (state space layers)",
        ),
        (
            "llama",
            dict(model_type="mistral3", text_config=dict(model_type="llama")),
            "has model_type 'mistral3' (a model around one of type 'llama')",
        ),
        (
            "llama",
            dict(
                model_type="gemma3n_text", intermediate_size=[8, 8], hidden_size_per_layer_input=8
            ),
            "has model_type 'gemma3n_text' (embeddings of each layer)",
        ),
        ("llama", dict(num_hidden_layers=None), "has no field num_hidden_layers"),
        ("llama", dict(num_hidden_layers=10**30), "expected an integer from 1 to 10000"),
        ("llama", dict(vocab_size=2**31), "vocab_size=2147483648: expected an integer from 1 to"),
        (
            "gemma3",
            dict(layer_types=None, sliding_window_pattern=2**31),
            "sliding_window_pattern=2147483648: expected an integer from 1 to 10000, or a string",
        ),
        (
            "qwen3_5_hybrid",
            dict(layer_types=None, full_attention_interval=2**31),
            "full_attention_interval=2147483648: expected an integer from 1 to 10000",
        ),
        ("llama", dict(num_hidden_layers=0), "has no field num_hidden_layers, or it is null or 0"),
        ("granite_hybrid_moe", dict(intermediate_size=None), "has no field intermediate_size"),
        ("nemotron_h_moe", dict(num_experts_per_tok=None), "has no field num_experts_per_tok"),
        (
            "nemotron_h",
            dict(attention_head_dim=8),
            "has attention_head_dim=8 and head_dim=16, which differ",
        ),
        ("llama", dict(hidden_sise=3), "did you mean hidden_size?"),
        (
            "mistral",
            dict(layer_types=["full_attention"] * 3),
            "layer_types=['full_attention', 'full_attention', 'full",
        ),
        ("qwen3_moe", dict(use_sliding_window=True), "use_sliding_window=True; only false"),
        (
            "gemma3",
            dict(hidden_activation="silu"),
            "hidden_activation='silu'; only gelu_pytorch_tanh",
        ),
        ("gemma3", dict(layer_types=["chunked_attention"] * 4), "layers of type chunked_attention"),
        (
            "gemma3",
            dict(layer_types=["full_attention"] * 3),
            "types of 3 layers, and num_hidden_layers=4",
        ),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (
            "smollm3",
            dict(layer_types=[FULL, SLIDING, FULL]),
            "layers of type sliding_attention without RoPE",
        ),
        (
            "smollm3",
            dict(layer_types=None, use_sliding_window=True),
            "layers of type sliding_attention without RoPE",
        ),
        (
            "smollm3",
            dict(sliding_window=None),
            "layers of type sliding_attention and no sliding_window",
        ),
        (
            "exaone4_hybrid",
            dict(layer_types=None, sliding_window_pattern="LXLG"),
            "layers of type X; in models of type exaone4",
        ),
        (
            "exaone4_hybrid",
            dict(sliding_window=None),
            "layers of type sliding_attention and no sliding_window",
        ),
        ("smollm3", dict(no_rope_layers=[1]), "types of 1 layers, and num_hidden_layers=3"),
        (
            "qwen3_window",
            dict(use_sliding_window=False),
            "sliding_attention without use_sliding_window",
        ),
        ("qwen3_next", dict(use_sliding_window=True), "use_sliding_window=True; only false"),
        (
            "minimax_m2",
            dict(attn_type_list=[0, 1, 1]),
            "layers of type lightning attention; in models of type minimax_m2 only full layers",
        ),
        ("minimax_m2", dict(scoring_func="softmax"), "scoring_func='softmax'; only sigmoid"),
        ("minimax_m2", dict(use_routing_bias=False), "use_routing_bias=False; only true"),
        (
            "qwen3",
            dict(layer_types=["full_attention", "sliding_attention"]),
            "layers of type sliding_attention",
        ),
        (
            "qwen3",
            dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))),
            "for full_attention layers",
        ),
    ],
)
def test_config_json_unsupported_field_raises(case, changes, words, tmp_path):
    directory = write_model(tmp_path / "model", case, **changes)
    with pytest.raises(UserError) as error:
        config_of(directory)
    assert words in f"{error.value}$"
    assert "\n" not in str(error.value)
    may_be_removed = "unknown field" in words and "did you mean" not in words and "(" not in words
    assert ("remove it" in str(error.value)) == may_be_removed


ABSENT = (None, False, 0, [], {})


@pytest.mark.parametrize(
    ("case", "names", "setting", "expected"),
    [
        (
            "olmo_hybrid",
            ("rope_theta", "rope_parameters"),
            "layer_kinds",
            ("gated_delta_net", "nope"),
        ),
        (
            "olmo_hybrid",
            ("rope_parameters.rope_theta",),
            "layer_kinds",
            ("gated_delta_net", "nope"),
        ),
        ("qwen3_moe", ("shared_expert_intermediate_size", "qkv_bias"), "experts.num_experts", 8),
        ("qwen3_moe", ("mlp_only_layers", "num_local_experts"), "layer_kinds", ("full",)),
        (
            "llama",
            ("quantization_config", "attention_bias", "pruned_heads"),
            "attention.qkv_bias",
            False,
        ),
        ("llama", ("rope_scaling",), "rope.scaling", "none"),
        ("mistral_window", ("sliding_window",), "layer_kinds", ("full",)),
        ("llama", ("head_dim",), "attention.head_dim", 8),
        ("llama", ("num_key_value_heads",), "attention.num_kv_heads", 4),
        ("llama_tied", ("tie_word_embeddings",), "tie_embeddings", False),
        ("gemma3", ("layer_types",), "layer_kinds", ("sliding",)),
        ("glm4_moe", ("n_shared_experts", "first_k_dense_replace"), "experts.shared_ffn_dim", 0),
    ],
)
@pytest.mark.parametrize("value", ABSENT)
def test_config_json_part_that_is_absent_may_have_any_empty_value(
    case, names, setting, expected, value
):
    config = CASES[case].config
    for name in names:
        config = _changed(config, name.split("."), value)
    assert settings_of(config, "config.json")[setting] == expected


@pytest.mark.parametrize(
    ("case", "place", "expected"),
    [("qwen3_next", "outside", 1.0), ("qwen3_next", "absent", 0.25), ("glm4_moe", "outside", 1.0)],
)
def test_null_partial_rotary_factor_is_1_as_in_transformers(case, place, expected):
    config = dict(CASES[case].config)
    config |= dict(rope_parameters=None, rope_scaling=None, rope_theta=1e4)
    config.pop("partial_rotary_factor", None)
    if place == "outside":
        config["partial_rotary_factor"] = None
    assert settings_of(config, "config.json")["rope.fraction"] == expected


def test_head_dim_of_nemotron_h_may_have_its_first_name():
    config = dict(CASES["nemotron_h"].config)
    head_dim = config.pop("head_dim")
    settings = settings_of(config | dict(attention_head_dim=head_dim), "config.json")
    assert settings["attention.head_dim"] == head_dim


@pytest.mark.parametrize(
    ("method", "groups"), [("group_limited_greedy", 4), ("greedy", 1), (None, 1)]
)
def test_groups_of_deepseek_v2_count_with_their_method_only(method, groups):
    config = CASES["deepseek_v2"].config | dict(n_group=4, topk_group=2, topk_method=method)
    settings = settings_of(config, "config.json")
    assert settings["experts.groups"] == groups


@pytest.mark.parametrize("changes", [dict(num_experts=None), dict(num_experts=4), {}])
def test_config_json_field_may_have_its_name_in_transformers(changes):
    config = {
        name: value for name, value in CASES["qwen3_moe"].config.items() if name != "num_experts"
    }
    settings = settings_of(config | dict(num_local_experts=4) | changes, "config.json")
    assert settings["experts.num_experts"] == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            dict(rope_scaling=dict(rope_type="linear", factor=2.0, rope_theta=70000.0)),
            (70000.0, "linear", 0),
        ),
        (
            dict(rope_parameters=dict(rope_type="linear", factor=2.0), rope_theta=3e4),
            (3e4, "linear", 0),
        ),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), (1e4, "yarn", 64)),
        (
            dict(rope_scaling=dict(LLAMA3_ROPE, original_max_position_embeddings=None)),
            (1e4, "llama3", 64),
        ),
        (
            dict(
                rope_scaling=dict(rope_type="linear", factor=2.0),
                rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=7e4),
            ),
            (7e4, "linear", 0),
        ),
        (
            dict(rope_theta=5e4, rope_parameters=dict(LLAMA3_ROPE, rope_theta=50_000)),
            (5e4, "llama3", 32),
        ),
        (dict(rope_scaling=dict(type="default")), (1e4, "none", 0)),
    ],
)
def test_config_json_rope_is_that_of_transformers(changes, expected):
    config = {
        name: value for name, value in CASES["llama"].config.items() if not name.startswith("rope_")
    } | changes
    settings = settings_of(config, "config.json")
    names = ("rope.theta", "rope.scaling", "rope.original_tokens")
    assert tuple(settings[name] for name in names) == expected


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("hidden_size", "32", "has hidden_size='32': expected an integer from 1 to 2^31 - 1"),
        ("rope_theta", [10000], "has rope_theta=[10000]: expected a finite number greater than 0"),
        ("tie_word_embeddings", "no", "has tie_word_embeddings='no': expected true or false"),
        ("rope_scaling.factor", "8", "has rope_scaling.factor='8': expected a finite number"),
        ("rope_scaling.factor", math.inf, "has rope_scaling.factor=inf: expected a finite number"),
        ("max_position_embeddings", -1, "has max_position_embeddings=-1: expected a finite number"),
        ("rope_scaling", "llama3", "has rope_scaling='llama3': expected an object"),
    ],
)
def test_config_json_wrong_type_names_the_field(path, value, words):
    with pytest.raises(UserError, match=re.escape(f"a/config.json {words}")):
        settings_of(_changed(CASES["llama"].config, path.split("."), value), "a/config.json")


@pytest.mark.parametrize("case", CASES)
def test_config_json_with_any_value_raises_no_other_error(case):
    """Every field of every family with a value of every type: a UserError, or the model is
    unchanged or has it.
    """
    config = CASES[case].config
    paths = [[name] for name in config]
    paths += [
        [name, inner]
        for name, value in config.items()
        if isinstance(value, dict)
        for inner in value
    ]
    for path, value in itertools.product(
        paths, ("32", [1], {"a": 1}, True, 1.5, 0, -1, "", [], {}, [None], None, False)
    ):
        with contextlib.suppress(UserError):
            settings_of(_changed(config, path, value), "config.json")


def _changed(config, path, value):
    """A copy of `config` with another value of a field, or of a field of an object in it."""
    name, *inner = path
    return config | {name: _changed(config[name], inner, value) if inner else value}


# Fields of released files that the cases do not have, and the settings that they give.
RELEASED = {
    "DeepSeek-V3": (
        "deepseek_v3",
        dict(
            rope_parameters=None,
            rope_scaling=dict(
                type="yarn",
                factor=40,
                original_max_position_embeddings=4096,
                beta_fast=32,
                beta_slow=1,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
            rope_theta=10000,
            max_position_embeddings=163840,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            moe_layer_freq=1,
            aux_loss_alpha=0.001,
            seq_aux=True,
            ep_size=1,
            auto_map=dict(AutoConfig="configuration_deepseek.DeepseekV3Config"),
        ),
        {
            "rope.scaling": "yarn",
            "rope.query_mscale": 1.0,
            "rope.attention_factor": 1.0,
            "first_layer_kinds": ("dense",),
            "experts.router": "sigmoid",
        },
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        dict(
            scoring_func="softmax",
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            moe_layer_freq=1,
            aux_loss_alpha=0.001,
            seq_aux=True,
        ),
        {"latent.query_rank": 0, "experts.groups": 1, "rope.query_mscale": 0.707},
    ),
    "Falcon-H1 without multipliers": (
        "falcon_h1",
        dict(ssm_multipliers=None, mlp_multipliers=None, ssm_in_multiplier=None),
        {"mamba2.gate_multiplier": 1, "mlp_gate_multiplier": 1},
    ),
    "DeepSeek-V2, whose groups have no effect": (
        "deepseek_v2",
        dict(topk_method="greedy"),  # with n_group=4
        {"experts.groups": 1, "experts.groups_per_token": 1},
    ),
    "an older layer type, and a number that JSON does not have": (
        "olmo3",
        dict(layer_types=[SLIDING, "attention", SLIDING], initializer_range=math.inf),
        dict(layer_kinds=("sliding", "full")),
    ),
    "Ministral-3-8B": (
        "ministral3",
        dict(
            rope_parameters=dict(
                beta_fast=32.0,
                beta_slow=1.0,
                factor=16.0,
                llama_4_scaling_beta=0.1,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=16384,
                rope_theta=1000000.0,
                rope_type="yarn",
                type="yarn",
            ),
            max_position_embeddings=262144,
        ),
        {"rope.query_beta": 0.1, "rope.attention_factor": 1.0, "rope.theta": 1e6},
    ),
    # Mistral's own params.json has yarn.apply_scale=false
    "Mistral Small 4, without a factor of logits": (
        "mistral4",
        dict(
            rope_parameters=dict(
                beta_fast=32.0,
                beta_slow=1.0,
                factor=128.0,
                llama_4_scaling_beta=0.1,
                max_position_embeddings=1048576,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=8192,
                partial_rotary_factor=0.5,
                rope_theta=10000.0,
                rope_type="yarn",
                type="yarn",
            ),
            max_position_embeddings=1048576,
            head_dim=128,
        ),
        {"rope.query_beta": 0.1, "rope.attention_factor": 1.0, "rope.query_mscale": 0.0},
    ),
    "Granite 3.1 8B": (
        "granite",
        dict(
            attention_dropout=0.1,
            attention_multiplier=0.0078125,
            embedding_multiplier=12.0,
            logits_scaling=16.0,
            residual_multiplier=0.22,
            rope_scaling=None,
        ),
        {
            "attention.query_scale_dim": 16384,
            "embedding_multiplier": 12,
            "logits_scaling": 16,
            "residual_multiplier": 0.22,
        },
    ),
    "Phi-4-mini": (
        "phi3",
        dict(auto_map=dict(AutoConfig="configuration_phi3.Phi3Config")),
        {
            "rope.fraction": 0.75,
            "rope.scaling": "longrope",
            "attention.window": 0,
            "layer_kinds": ("full",),
        },
    ),
    "Phi-3-mini-128k, first release": (
        "phi3",
        dict(rope_scaling=dict(type="su", short_factor=[1.0] * 3, long_factor=[2.0] * 3)),
        {"rope.scaling": "longrope", "rope.long_factors": (2.0, 2.0, 2.0)},
    ),
    "Phi-4": (
        "phi3",
        dict(
            rope_scaling=None,
            original_max_position_embeddings=256,
            partial_rotary_factor=1.0,
            sliding_window=None,
        ),
        {"rope.fraction": 1, "rope.scaling": "none", "attention.window": 0},
    ),
    "Seed-OSS-36B": (
        "seed_oss",
        dict(
            attention_dropout=0.1,
            residual_dropout=0.1,
            attention_out_bias=False,
            rope_scaling=dict(rope_type="default"),
        ),
        {
            "attention.qkv_bias": True,
            "attention.out_bias": False,
            "rope.scaling": "none",
            "rope.theta": 3e4,
        },
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_config_json_of_a_released_model_is_read_and_written_unchanged(name):
    case, changes, expected = RELEASED[name]
    base = CASES[case].config | changes
    settings = settings_of(base, "config.json")
    assert settings | expected == settings
    model = model_of(settings)
    written = config_json_of(model, base, seq_len=16, dtype="bfloat16")
    written = json.loads(json.dumps(written))
    assert written == {name: value for name, value in base.items() if name != "auto_map"}


def test_window_that_gets_an_effect_with_the_length_of_the_run_is_removed():
    base = CASES["phi3"].config
    model = model_of(settings_of(base, "config.json"))
    written = config_json_of(model, base, seq_len=512, dtype="bfloat16")
    assert (written["sliding_window"], written["max_position_embeddings"]) == (512, 512)
    written = config_json_of(model, base, seq_len=1024, dtype="bfloat16")
    assert (written["sliding_window"], written["max_position_embeddings"]) == (None, 1024)


def test_config_json_rope_that_a_family_lacks_raises():
    base = CASES["phi3"].config
    with pytest.raises(Unsupported, match="of type 'yarn'; supported are default, longrope"):
        settings_of(base | dict(rope_scaling=LLAMA3_ROPE | dict(rope_type="yarn")), "config.json")
    model = model_of(settings_of(base, "config.json"))
    model = with_rope(model, scaling="linear")
    with pytest.raises(Unsupported, match="rope.scaling='linear' of a model of type phi3"):
        config_json_of(model, base, seq_len=16, dtype="bfloat16")


LAYERS = {  # model_type -> fields of config.json, layer_kinds, window
    "mistral": (dict(), ("sliding",), 4096),  # the window that transformers uses without the field
    "gemma3_text": (dict(sliding_window=512), (*["sliding"] * 5, "full"), 512),
    "gemma3_text pattern": (
        dict(sliding_window=8, sliding_window_pattern=3),
        ("sliding", "sliding", "full"),
        8,
    ),
    "olmo3": (dict(), (*["sliding"] * 3, "full"), 4096),
    "qwen2": (dict(), ("full",), 0),
    "qwen2 with a window": (dict(use_sliding_window=True, max_window_layers=0), ("sliding",), 4096),
    "qwen3 with a window": (
        dict(use_sliding_window=True, max_window_layers=1, sliding_window=8, num_hidden_layers=2),
        ("full", "sliding"),
        8,
    ),
    "qwen3 with a window after the last layer": (dict(use_sliding_window=True), ("full",), 0),
    "exaone4": (dict(), (*["sliding"] * 3, "nope"), 4096),
    "exaone4 length": (
        dict(sliding_window=8, sliding_window_pattern=2),
        ("sliding", "nope"),
        8,
    ),
    "exaone4 letters": (
        dict(sliding_window=8, sliding_window_pattern="LG", num_hidden_layers=4),
        ("sliding", "nope"),
        8,
    ),
    "exaone4 letters, and a last layer that is not sliding": (
        dict(sliding_window=8, sliding_window_pattern="LLG", num_hidden_layers=4),
        ("nope",),
        8,
    ),
    "exaone4 without a window": (
        dict(sliding_window=None, sliding_window_pattern="LG"),
        ("full",),
        0,
    ),
    "qwen3_5_text": (dict(), (*["gated_delta_net"] * 3, "full"), 0),
    "qwen3_5_moe_text": (dict(), (*["gated_delta_net"] * 3, "full"), 0),
    "qwen3_5_text interval": (dict(full_attention_interval=2), ("gated_delta_net", "full"), 0),
    "qwen3_next": (dict(), (*["gated_delta_net"] * 3, "full"), 0),
    "qwen3_next dense": (
        dict(decoder_sparse_step=2, full_attention_interval=2),
        ("dense_gated_delta_net", "full"),
        0,
    ),
    "smollm3": (dict(), (*["full"] * 3, "nope"), 0),
    "olmo_hybrid": (dict(), (*["gated_delta_net"] * 3, "full"), 0),
    "olmo_hybrid without RoPE": (
        dict(rope_parameters=dict(rope_theta=None, rope_type="default")),
        (*["gated_delta_net"] * 3, "nope"),
        0,
    ),
    "olmo_hybrid of two layers": (dict(num_hidden_layers=2), ("gated_delta_net", "full"), 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_config_json_without_layer_types_has_those_of_the_family(name):
    fields, kinds, window = LAYERS[name]
    family = FAMILIES[name.split()[0]]
    names = (
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
    )
    sizes = dict.fromkeys(names, 16)
    settings = settings_of({"model_type": family.model_type, **sizes, **fields}, "config.json")
    assert (settings["layer_kinds"], settings["attention.window"]) == (kinds, window)


@pytest.mark.parametrize("num_dense", [1, 3])
def test_config_json_of_glm_has_first_dense_layers(num_dense):
    """The 92 layers of GLM 4.6, and the 46 of GLM 4.5 Air."""
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"), 16
    )
    fields = dict(
        model_type="glm4_moe",
        num_hidden_layers=92 if num_dense == 3 else 46,
        first_k_dense_replace=num_dense,
    )
    settings = settings_of({**fields, **sizes}, "config.json")
    assert settings["first_layer_kinds"] == ("dense",) * num_dense and settings["layer_kinds"] == (
        "full",
    )
    kinds = (KindConfig(name="dense", feed_forward="dense"),)
    model = model_from(PRESETS["tiny"].by_path | settings | dict(kinds=kinds))
    assert family_of(None, model).model_type == "glm4_moe"
    assert (
        config_json_of(model, None, seq_len=16, dtype="float32")["first_k_dense_replace"]
        == num_dense
    )
    alternating = dataclasses.replace(model, first_layer_kinds=(), layer_kinds=("dense", "full"))
    assert family_of(None, alternating).model_type == MODEL_TYPE


@pytest.mark.parametrize(
    ("first", "last", "interval", "with_experts"),
    [
        (None, None, None, (1, 2, 3, 4, 5)),
        (0, 0, 1, (0,)),
        (2, -1, 1, (2, 3, 4, 5)),
        (1, 4, 2, (1, 3)),
        (0, 5, 3, (2, 5)),
    ],
)
def test_layers_of_ernie_in_a_range_have_experts(first, last, interval, with_experts):
    names = "start_index", "end_index", "interval"
    fields = {f"moe_layer_{x}": y for x, y in zip(names, (first, last, interval)) if y is not None}
    others = {x: y for x, y in CASES["ernie4_5_moe"].config.items() if "moe_layer" not in x}
    config = others | fields | dict(num_hidden_layers=6)
    model = model_of(settings_of(config, "config.json"))
    kinds = tuple("full" if layer in with_experts else "dense" for layer in range(6))
    assert model.kinds_of_layers == kinds
    written = config_json_of(model, None, seq_len=64, dtype="bfloat16")
    assert written["model_type"] == "ernie4_5_moe"
    assert model_of(settings_of(written, "config.json")).kinds_of_layers == kinds


@pytest.mark.parametrize("name", CASES)
def test_config_json_of_random_weights_describes_the_model(name):
    model = model_of(settings_of(CASES[name].config, "config.json"))
    fields = config_json_of(model, None, seq_len=2**20, dtype="float32")
    read = model_of(settings_of(fields, "config.json"))
    assert read.kinds_of_layers == model.kinds_of_layers and read.attentions == model.attentions
    assert (read.attention, read.experts) == (
        dataclasses.replace(model.attention, query_scale_dim=read.attention.query_scale_dim),
        model.experts,
    )


@pytest.mark.parametrize(
    ("name", "fields", "attentions"),
    [
        ("deepseek_v3", dict(first_k_dense_replace=3), {"latent"}),
        ("nemotron_h", dict(hybrid_override_pattern="M*M*M"), {"mamba2", "nope"}),
        ("granite_hybrid", dict(layer_types=[FULL] * 3, mamba_conv_bias=False), {"nope"}),
    ],
)
def test_config_json_may_have_settings_of_blocks_that_no_layer_has(
    name, fields, attentions, tmp_path
):
    fields = {**CASES[name].config, **fields}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = dict(init_from=str(tmp_path))
    loaded = load(ConfigDict(dict(model=model))).model
    assert loaded.attentions == attentions
    written = config_json_of(loaded, fields, seq_len=64, dtype="bfloat16")
    assert settings_of(written, "config.json") == settings_of(fields, "config.json")
    model["experts"] = dict(ffn_dim=32)
    with pytest.raises(UserError, match="experts.ffn_dim=32 has no effect"):
        load(ConfigDict(dict(model=model)))


@pytest.mark.parametrize("name", ["nemotron_h", "kimi_linear"])
def test_families_that_transformers_does_not_tie_are_not_tied(name):
    """transformers opens a file without lm_head.weight, whatever tie_word_embeddings is, with random values in it."""
    config = CASES[name].config
    model = model_of(settings_of(config, "config.json"))
    assert family_of(None, model).model_type == name
    tied = dataclasses.replace(model, tie_embeddings=True)
    assert family_of(None, tied).model_type == MODEL_TYPE
    with pytest.raises(Unsupported, match="tie_word_embeddings=True; only false is supported"):
        settings_of(config | dict(tie_word_embeddings=True), "config.json")


def test_config_json_of_any_order_has_all_layers(tmp_path):
    types = ["sliding_attention"] * 9 + ["full_attention"] * 9
    directory = write_model(tmp_path / "model", "gemma3", num_hidden_layers=18, layer_types=types)
    model = config_of(directory).model
    assert model.layer_kinds == ("sliding",) * 9 + ("full",) * 9 == model.kinds_of_layers
    assert [(x.kinds, x.num_iterations) for x in model.segments] == [
        (("sliding",), 9),
        (("full",), 9),
    ]


def remove_shard(directory):
    next(directory.glob("*-00002-*")).unlink()


def truncate_shard(directory):
    path = next(directory.glob("*-00002-*"))
    path.write_bytes(path.read_bytes()[:-1])


def cut_header(directory):
    path = next(directory.glob("*-00002-*"))
    path.write_bytes(path.read_bytes()[:100])


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(directory, change, num_files=1):
    """Replaces the tensors by `change` of them."""
    tensors = {}
    for path in directory.glob("*.safetensors*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    write_tensors(directory, change(tensors), num_files=num_files)


def change_shape(directory):
    rewrite(directory, lambda x: x | {"model.norm.weight": x["model.norm.weight"][:-1]})


def change_dtype(directory):
    rewrite(directory, lambda x: x | {"model.norm.weight": x["model.norm.weight"].astype(np.int32)})


def add_bias(directory):
    rewrite(
        directory, lambda x: x | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    )


def add_single_file(directory):
    write_tensors(directory, tensors_of("llama"), num_files=1)


def remove_head(directory):
    rewrite(
        directory, lambda x: {name: value for name, value in x.items() if name != "lm_head.weight"}
    )


def only_torch_files(directory):
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_shard, "has no file model-00002-of-00002.safetensors"),
        (truncate_shard, "file not fully covered"),
        (cut_header, "is not a valid safetensors file"),
        (change_shape, "has shape [31], and config.json implies [32]"),
        (change_dtype, "has dtype I32"),
        (add_bias, "has the tensor model.layers.0.self_attn.q_proj.bias"),
        (remove_head, "has no tensor lm_head.weight"),
        (
            add_single_file,
            "has model.safetensors and model.safetensors.index.json with other files",
        ),
        (only_torch_files, "it has pytorch_model.bin: PyTorch files are not read"),
    ],
)
def test_damaged_files_raise_one_line(damage, words, tmp_path):
    directory = write_model(tmp_path / "model", "llama")
    damage(directory)
    with pytest.raises(UserError) as error:
        loaded(directory)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_train_checks_files_of_weights_before_it_reads_data(tmp_path, monkeypatch):
    directory = write_model(tmp_path / "model", "llama")
    truncate_shard(directory)
    monkeypatch.setattr(
        "jaxlc.data.data_sources.open",
        lambda *_, **__: pytest.fail("read before the weights were checked"),
    )
    with pytest.raises(UserError, match="file not fully covered"):
        jaxlc.train.run(
            config_of(directory, **{"mesh.data": 4, "mesh.context": 2}), tmp_path / "run"
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_load_of_weights_that_are_not_finite_names_tensor_and_file(dtype, value, tmp_path):
    """The largest finite values are no problem."""
    name, largest = "model.layers.1.mlp.up_proj.weight", float(ml_dtypes.finfo(dtype).max)

    def change(tensors):
        for index, finite in enumerate((largest, -largest, -0.0)):
            tensors["model.layers.0.mlp.up_proj.weight"][1, index] = finite
        tensors[name][2, 3] = value
        return tensors

    directory = write_model(tmp_path / "model", "llama", dtype=dtype)
    rewrite(directory, change)
    with pytest.raises(
        UserError, match=rf"^{name} in {directory}/model.safetensors has NaN or infinite"
    ):
        loaded(directory)


@pytest.mark.parametrize("sizes", [dict(hidden_size=128, intermediate_size=320), {}])
def test_parts_of_weights_in_nf4_equal_those_of_the_whole(sizes, tmp_path):
    """Blocks of 64 are in one row; and in the small model, in several. Of the first, only the blocks
    of a part are read.
    """
    files = TensorFiles(write_nf4_model(tmp_path / "model", **sizes))
    tensor = files.tensors["model.layers.1.mlp.down_proj.weight"]
    rows, columns = tensor.shape
    codes, scales = tensor.codes.bytes.reshape(rows, -1), tensor.scales.bytes
    scales = scales if columns % 64 else scales.reshape(rows, -1)
    maxima = tensor.maxima.bytes.view(np.float32)
    whole = np.asarray(Nf4((codes, scales, maxima, tensor.offset), (1, 1)).dequantized()).T
    cuts = slice(None), slice(0, 64), slice(10, 30), slice(columns - 70, columns), slice(7, 7)
    for part in itertools.product((slice(None), slice(rows // 4, rows // 2)), cuts):
        read = files.read(tensor.name, *part)
        assert read.dtype == whole.dtype and (read == whole[part]).all()
    np.testing.assert_array_equal(files.read(tensor.name), whole)
    if sizes:
        before = files.bytes_read
        files.read(tensor.name, slice(0, rows // 4), slice(64, 160))
        blocks = rows // 4 * 2
        assert files.bytes_read - before == blocks * (32 + 1) + tensor.maxima.bytes.size


@pytest.mark.parametrize("frozen", ["nf4", "bf16"])
@pytest.mark.parametrize("part", ["nested_absmax", "quant_state.bitsandbytes__nf4"])
def test_load_of_nf4_files_with_nan_in_scales_names_tensor_and_file(part, frozen, tmp_path):
    directory, name = write_nf4_model(tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"

    def change(tensors):
        if part == "nested_absmax":
            tensors[f"{name}.{part}"][0] = np.nan
        else:
            state = json.loads(bytes(tensors[f"{name}.{part}"])) | dict(nested_offset=np.nan)
            tensors[f"{name}.{part}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return tensors

    rewrite(directory, change)
    config = config_of(directory, **{"precision.frozen": frozen, "lora.rank": 2})
    with pytest.raises(UserError, match=rf"^{name} in {directory}/.* has NaN or infinite"):
        load_pretrained(build_step(config, make_mesh(config.mesh, jax.devices()[:1])))


def test_nf4_files_with_missing_codes_are_refused(tmp_path):
    directory, name = write_nf4_model(tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    rewrite(directory, lambda x: x | {name: x[name][:-32]})
    with pytest.raises(UserError, match=rf"^{name} in .* has shape .* needs 768 values: download"):
        TensorFiles(directory)


def test_load_config_json_that_changed_since_raises(tmp_path):
    directory = write_model(tmp_path / "model", "llama")
    config = config_of(directory)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=2))
    step = build_step(config, make_mesh(config.mesh, jax.devices()[:1]))
    with pytest.raises(UserError, match="num_layers=2 contradicts"):
        load_pretrained(step)


@pytest.mark.parametrize("num_files", [1, 2])
@pytest.mark.parametrize("row", [None, 0, 59])
def test_tied_model_with_a_head_is_read_only_if_it_is_the_embedding(row, num_files, tmp_path):
    """transformers does not tie weights that differ: adapters with a trained head were merged, for
    example.
    """

    def add_head(tensors):
        head = tensors["model.embed_tokens.weight"].copy()
        if row is not None:
            head[row, 3] *= 2
        return tensors | {"lm_head.weight": head}

    directory = write_model(tmp_path / "model", "llama_tied")
    rewrite(directory, add_head, num_files=num_files)
    if row is None:
        _, params, _ = loaded(directory)
        assert "head" not in params
        return
    with pytest.raises(
        UserError, match="lm_head.weight in .* differs from the embedding.*tie_word_embeddings=true"
    ):
        loaded(directory, fsdp=4)
    change_config(directory, tie_word_embeddings=False)
    _, params, _ = loaded(directory)
    assert params["head"][3, row] == params["embedding"][row, 3] * 2


def test_tied_model_with_only_a_head_has_it_as_embedding(tmp_path):
    directory = write_model(tmp_path / "model", "llama_tied")
    rewrite(
        directory,
        lambda x: {
            name.replace("model.embed_tokens", "lm_head"): value for name, value in x.items()
        },
    )
    _, params, _ = loaded(directory)
    np.testing.assert_array_equal(params["embedding"], expected_params("llama_tied")["embedding"])


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_load_of_joined_tensors_of_several_dtypes(dtype, tmp_path):
    directory = write_model(tmp_path / "model", "olmo_hybrid")
    name = "model.layers.0.linear_attn.v_conv1d.weight"
    rewrite(directory, lambda x: (y := rename_olmo_hybrid(x)) | {name: y[name].astype(dtype)})
    if dtype == np.int32:
        with pytest.raises(UserError, match="conv1d.weight in .* has dtype I32"):
            loaded(directory)
        return
    _, params, _ = loaded(directory)
    expected = expected_params("olmo_hybrid")["layers/gated_delta_net/attention/conv_v"]
    np.testing.assert_allclose(
        params["layers/gated_delta_net/attention/conv_v"], expected, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("case", "change", "name", "dtype"),
    [
        ("llama", dict, "model.layers.1.mlp.up_proj.weight", ml_dtypes.bfloat16),
        ("qwen3_moe", dict, "model.layers.0.mlp.experts.7.up_proj.weight", np.float16),
        (
            "olmo_hybrid",
            rename_olmo_hybrid,
            "model.layers.0.linear_attn.v_conv1d.weight",
            np.float32,
        ),
    ],
)
def test_load_says_that_one_frozen_tensor_of_many_is_rounded(case, change, name, dtype, tmp_path):
    directory = write_model(tmp_path / "model", case)
    rewrite(directory, lambda x: (y := change(x)) | {name: y[name].astype(dtype)})
    config = config_of(directory, **{"lora.rank": 2})
    step = build_step(config, make_mesh(config.mesh, jax.devices()[:1]))
    _, line = load_pretrained(step)
    assert line.endswith("rounded to bf16 (config.precision.frozen)") == (
        dtype != ml_dtypes.bfloat16
    )


def test_load_of_a_tensor_in_two_files_reads_the_one_in_the_index(tmp_path):
    directory = write_model(tmp_path / "model", "llama")
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.norm.weight"
    for path in {*directory.glob("*.safetensors")} - {directory / index[name]}:
        save_file(load_file(path) | {name: np.zeros(32, np.float32)}, path, {"format": "pt"})
    _, params, _ = loaded(directory)
    np.testing.assert_array_equal(
        params["final_norm/scale"], expected_params("llama")["final_norm/scale"]
    )


def test_load_to_host_memory_gives_the_same_state(tmp_path):
    directory = write_model(tmp_path / "model", "llama")
    memory = {"memory.parameters": "host", "memory.optimizer": "host", "memory.remat": "full"}
    config = config_of(directory, **memory, **{"mesh.context": 2})
    mesh = make_mesh(config.mesh, jax.devices()[:2])
    if lacks_host_memory(mesh) is not None:
        pytest.skip(lacks_host_memory(mesh))
    step = build_step(config, mesh)
    state = step.init(load_pretrained(step)[0])
    for actual, expected in zip(
        jax.tree.leaves(state), jax.tree.leaves(step.abstract_state), strict=True
    ):
        assert (actual.shape, actual.dtype, actual.sharding) == (
            expected.shape,
            expected.dtype,
            expected.sharding,
        )
    assert state.params["embedding"].sharding.memory_kind == "pinned_host"
    expected = expected_params("llama")
    for path, param in paths_of(state.params):
        np.testing.assert_array_equal(param, expected[path], err_msg=path)


class FakeHub:
    """Stands in for the package huggingface_hub; it has the model org/tiny."""

    __spec__ = importlib.machinery.ModuleSpec("huggingface_hub", None)

    def __init__(self, directory):
        self.directory, self.requests = directory, []

    def snapshot_download(self, repo_id, allow_patterns):
        self.requests.append(allow_patterns)
        if repo_id != "org/tiny":
            raise ConnectionError("Cannot reach https://huggingface.co:\n offline")
        return str(self.directory)


def test_hub_id_downloads_the_weights_only_to_load_them(tmp_path, monkeypatch):
    hub = FakeHub(write_model(tmp_path / "cache", "llama"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    config = config_of("org/tiny")
    assert (config.model.init_from, config.model.num_layers) == ("org/tiny", 3)
    assert not any("*.safetensors" in patterns for patterns in hub.requests)
    loaded("org/tiny")
    assert "*.safetensors" in hub.requests[-1]
    assert jaxlc.load("org/tiny").workdir == tmp_path / "cache"
    assert results_directory("org/tiny") == Path("runs/tiny/evals")
    assert results_directory("cache") == Path("cache/evals")
    # checkpoints have paths that are valid in all directories
    config = config_of("cache")
    assert config.model.init_from == str(tmp_path / "cache")
    assert config.data.tokenizer == str(tmp_path / "cache" / "tokenizer.json")
    assert with_settings(config, {"data.tokenizer": "cache"}).data == dataclasses.replace(
        config.data, tokenizer=str(tmp_path / "cache")
    )


def test_hub_that_cannot_be_reached_raises_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="cannot download config.model.init_from 'org/other': the hub cannot be"
    ) as error:
        config_of("org/other")
    assert "huggingface.co" not in str(error.value)


def test_hub_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "is_installed", lambda package: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"needs the package huggingface_hub.*\[hf\]"):
        config_of("org/tiny")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nothing", "(no such directory)"),
        ("runs/quickstrat", "(no such directory, did you mean runs/quickstart?)"),
        (
            "runs/quickstart/chekpoints/3",
            "(no such directory, did you mean runs/quickstart/checkpoints/3?)",
        ),
        ("rnus/quickstart", "(no such directory, did you mean runs/quickstart?)"),
        ("quickstrat", "(no such directory, did you mean runs/quickstart?)"),
        ("models/tiny", "(no such directory)"),
        ("runs/nothing", "(no such directory)"),
        (".", "contains neither config.json nor checkpoints/"),
    ],
)
def test_init_from_without_a_model_raises(name, words, tmp_path, monkeypatch):
    """What looks like a path is not asked of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for directory in ("runs/quickstart/checkpoints/3", "models"):
        (tmp_path / directory).mkdir(parents=True)
    with pytest.raises(UserError, match="invalid value .* for config.model.init_from") as error:
        config_of(name)
    assert words in str(error.value)


def test_workdir_with_files_of_other_formats_is_a_run(tmp_path):
    write_untrained_run(tmp_path / "run")
    (tmp_path / "run" / "notes.bin").write_text("")
    assert locate(str(tmp_path / "run")).is_run


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("files", "name", "words"),
    [
        ({"model.gguf": "GGUF"}, "model.gguf", "has model.gguf: GGUF is not read"),
        ({"model-Q4_K_M.gguf": "GGUF"}, "", "has model-Q4_K_M.gguf: GGUF is not read"),
        (
            {"config.json": "{}", "a.gguf": ""},
            "",
            "has neither model.safetensors nor .* it has a.gguf: GGUF",
        ),
        (
            {"adapter_config.json": "{}", "adapter_model.safetensors": ""},
            "",
            "has adapter_config.json: use the base model",
        ),
        ({"model.safetensors": ""}, "model.safetensors", "expected a directory with config.json"),
        (
            {"config.json": "{}", "consolidated.safetensors": ""},
            "",
            "neither .* has consolidated.safetensors: exp",
        ),
        (
            {"config.json": "{}", "adapter_config.json": "{}"},
            "",
            "has adapter_config.json: use the base model",
        ),
        (
            {"config.json": "{}", "model.safetensors": LFS_POINTER},
            "",
            "model.safetensors is a pointer of Git LFS.*git lfs",
        ),
        (
            {"config.json": LFS_POINTER, "model.safetensors": ""},
            "",
            "config.json is a pointer of Git LFS.*git lfs pull",
        ),
    ],
)
def test_init_from_of_another_format_names_it(files, name, words, tmp_path):
    directory = write_model(tmp_path / "model", "llama")
    for path in directory.iterdir():
        if path.name != "config.json" or "config.json" not in files:
            path.unlink()
    for file, text in files.items():
        if text != "{}" or file != "config.json":
            (directory / file).write_text(text)
    with pytest.raises(UserError, match=words):
        loaded(directory / name)
    if "neither" not in words:
        with pytest.raises(UserError, match=words):
            jaxlc.load(directory / name)


def test_load_of_a_directory_on_every_mesh_that_divides_the_model(tmp_path):
    """The default of data.seq_len, which a directory does not have, is no limit."""
    directory = write_model(tmp_path / "model", "llama")
    loss = jaxlc.load(directory).model.loss("abc def ghi")
    assert jaxlc.load(directory, mesh=dict(context=3)).model.loss("abc def ghi") == pytest.approx(
        loss, rel=1e-3
    )
    with pytest.raises(
        UserError, match="the model does not split over the mesh .*num_heads=4 "
    ) as error:
        jaxlc.load(directory, mesh=dict(context=2, tensor=3))
    advice = re.search(
        r"use another mesh, such as --mesh=(\S+) \(in Python mesh=dict\((.*)\)\)$", str(error.value)
    )
    sizes = mesh_sizes(advice[1])
    assert jaxlc.load(directory, mesh=sizes).mesh.size == 6 and advice[2] == ", ".join(
        advice[1].split(",")
    )
