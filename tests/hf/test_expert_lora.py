"""LoRA of experts, of shared experts and of dense layers on Hugging Face models: merged exports,
and adapters that `peft` opens."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax.nnx.traversals import unflatten_mapping
from safetensors.numpy import load_file, save_file

from jaxlc.checkpoints.export import _write_weights
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import LoraConfig, load
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS
from jaxlc.config.models.config_json import family_of
from jaxlc.config.models.pretrained import read_json
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.core.text import no_progress
from jaxlc.hf.adapters import read_adapters, write_adapters
from jaxlc.hf.load import paths_of
from jaxlc.models import decoder
from jaxlc.models.lora import is_adapter
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from tests.hf.comparison import (
    by_names_in_files,
    config_of,
    evaluate,
    needs_transformers,
    relative_error,
    run_jobs,
    tokens_of,
)
from tests.hf.models import write_model

RANK, SCALE = 3, 3.0
ALL = ("query", *EXPERT_PROJECTIONS)
MLP = ("mlp_gate", "mlp_up", "mlp_down")  # of shared experts, and of dense layers


class _Run:
    """A model with random parameters and adapters: the source of parameters of an export."""

    def __init__(self, directory, case: str, projections: tuple[str, ...], **train):
        directory.mkdir(exist_ok=True)
        self.base = write_model(directory / "base", case, dtype=np.float32)
        config = config_of(self.base, 16, {})
        config.precision.frozen = "fp32"
        config.lora = dict(rank=RANK, alpha=SCALE * RANK**0.5, rslora=True, projections=projections)
        config.train.update(train)
        self.config = load(config)
        self.step = build_step(self.config, make_mesh(self.config.mesh, jax.devices()[:1]))
        self.family = family_of(read_json(self.base / "config.json"), self.config.model)
        model = self.config.model
        self.abstract = dict(
            paths_of(decoder.abstract_params(model, model.vocab_size, self.config.lora))
        )
        rng = np.random.default_rng(0)
        self.by_path = {
            path: (rng.normal(size=x.shape) / 5 + path.endswith("norm/scale")).astype(np.float32)
            for path, x in self.abstract.items()
        }

    def read(self, paths):
        return {path: self.by_path[path] for path in paths}

    def export(self, directory, params=None):
        """The weights of `params`, with adapters merged unless these have none, in a copy of the
        base.
        """
        shutil.copytree(self.base, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
        weights = "F32", 10**9, {}, "", frozenset(), no_progress
        _write_weights(self.config, self.family, params or self, directory, *weights)
        return directory

    def merged(self):
        """The parameters with the products of adapters of feed-forward blocks."""
        weights = {path: x for path, x in self.by_path.items() if not is_adapter(path)}
        for path in self.by_path:
            if "/mlp/" in path and path.endswith("/a"):
                adapter = path.removesuffix("/a")
                weight = adapter.replace("/lora/mlp_", "/w_").replace("/lora", "")
                product = np.einsum(
                    "...ir,...ro->...io", self.by_path[path], self.by_path[f"{adapter}/b"]
                )
                weights[weight] = weights[weight] + SCALE * product
        return _tree(weights)


class _Base:
    """The parameters of a run without its adapters."""

    def __init__(self, run: _Run):
        self.read = run.read
        self.abstract = {path: x for path, x in run.abstract.items() if not is_adapter(path)}


def _tree(by_path):
    return unflatten_mapping(by_path, sep="/")


# A tensor for each expert, and two kinds of a tensor for all.
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
def test_export_merges_adapters_of_experts_into_weights(case, tmp_path):
    has_shared = case == "qwen3_5_moe"
    run = _Run(tmp_path, case, ("expert_up", "expert_down", *(["mlp_down"] if has_shared else [])))
    (file,) = run.export(tmp_path / "out").glob("*.safetensors")
    exported, expected = load_file(file), by_names_in_files(run.step, run.merged())
    (file,) = run.export(tmp_path / "unmerged", _Base(run)).glob("*.safetensors")
    base = load_file(file)
    assert exported.keys() == expected.keys() == base.keys()
    changed = set()
    for name, x in exported.items():
        np.testing.assert_allclose(x, expected[name], atol=1e-6, err_msg=name)
        changed |= {name} if np.abs(x - base[name]).max() > 1e-3 else set()
    assert changed and all("expert" in name and "gate_proj" not in name for name in changed)
    assert any("shared_expert.down_proj" in name for name in changed) == has_shared


def test_adapters_of_gate_and_up_are_one_parameter_of_peft(tmp_path):
    """`test_adapters_of_experts_open_in_peft_with_equal_logits` compares the values, where peft is
    installed.
    """
    run = _Run(tmp_path, "gpt_oss", ALL)
    write_adapters(run.config, run.family, run, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["rank_pattern"] == {r"mlp\.experts\.gate_up_proj": 2 * RANK}
    shapes = {
        name: x.shape for name, x in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    model, experts = run.config.model, "base_model.model.model.layers.1.mlp.experts"
    D, E, F = model.model_dim, model.experts.num_experts, model.experts.ffn_dim
    assert shapes[f"{experts}.base_layer.lora_A.weight"] == (E * 2 * RANK, D)
    assert shapes[f"{experts}.base_layer.lora_B.weight"] == (2 * F, 2 * RANK * E)
    assert shapes[f"{experts}.lora_A.weight"] == (E * RANK, F)
    assert shapes[f"{experts}.lora_B.weight"] == (D, RANK * E)
    # Elsewhere, the outputs of gate are before those of up, each with the ranks of its adapter.
    run = _Run(tmp_path / "halves", "qwen3_moe", ("expert_gate", "expert_up"))
    write_adapters(run.config, run.family, run, tmp_path / "halves")
    (lora_b, *_) = (
        x.reshape(2, -1, 2, RANK * run.config.model.experts.num_experts)
        for name, x in load_file(tmp_path / "halves" / "adapter_model.safetensors").items()
        if "lora_B" in name
    )
    assert [[lora_b[i, :, j].any() for j in (0, 1)] for i in (0, 1)] == [[1, 0], [0, 1]]
    run = _Run(tmp_path / "trained", "gpt_oss", ("query",), trainable=("*/expert_up",))
    with pytest.raises(
        Unsupported, match="adapters for peft with trained .*layers/mlp/expert_up; export without"
    ):
        write_adapters(run.config, run.family, run, tmp_path)


def test_adapters_of_groups_of_rows_are_one_module_with_the_product_of_all(tmp_path):
    """That of the ranks of all parts, each with the rows of its groups."""
    projections = ("query", "key", "value", "delta_step", "delta_decay")
    run = _Run(tmp_path, "qwen3_next", projections)
    write_adapters(run.config, run.family, run, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    adapters = load_file(tmp_path / "adapter_model.safetensors")
    (merged,) = run.export(tmp_path / "merged").glob("*.safetensors")
    (base,) = run.export(tmp_path / "unmerged", _Base(run)).glob("*.safetensors")
    merged, base = load_file(merged), load_file(base)
    assert config["rank_pattern"] == dict(in_proj_qkvz=3 * RANK, in_proj_ba=2 * RANK)
    changed = 0
    for name, weight in base.items():
        module, fused = f"base_model.model.{name.removesuffix('.weight')}", name.split(".")[-2]
        if f"{module}.lora_A.weight" in adapters:
            rank = config["rank_pattern"].get(fused, RANK)
            scale = config["alpha_pattern"].get(fused, config["lora_alpha"]) / rank**0.5
            a, b = adapters[f"{module}.lora_A.weight"], adapters[f"{module}.lora_B.weight"]
            assert len(a) == rank
            weight, changed = weight + scale * b @ a, changed + 1
        np.testing.assert_allclose(merged[name], weight, atol=1e-5, err_msg=name)
    assert changed == len(adapters) // 2 > 0


def _adapters_of(run: _Run, directory, **options):
    """The config of `run` that reads its adapters from files, and the shapes of the adapters."""
    directory.mkdir()
    write_adapters(run.config, run.family, run, directory, **options)
    own = replace(run.config.lora, init_from=str(directory))
    abstract = {path: x for path, x in run.abstract.items() if is_adapter(path)}
    return replace(run.config, lora=own), abstract


FULL_CASES = [
    ("phi3_window", ("key", "mlp_up")),
    ("kimi_linear", (*ALL, *MLP)),
    ("minimax_m2", ALL),
    ("granite_hybrid", ("query", "mlp_down", "delta_gate", "delta_step")),
    ("glm4_moe", MLP),
    ("deepseek_v3", ("query_down", "query_up", "latent", "key_value")),
    ("qwen3_5_hybrid", ("query", "delta_gate", "delta_decay")),
    ("qwen3_moe", ("expert_up",)),
]


@pytest.mark.parametrize(
    ("case", "projections"),
    [
        ("gpt_oss", ALL),
        ("qwen3_next", ("query", "key", "value", "delta_step", "mlp_up", "expert_down")),
        *(pytest.param(*case, marks=pytest.mark.full) for case in FULL_CASES),
    ],
)
def test_adapters_that_were_written_are_read(case, projections, tmp_path):
    run = _Run(tmp_path, case, projections)
    config, abstract = _adapters_of(run, tmp_path / "adapters")
    found = read_adapters(config, abstract)
    assert found.keys() == abstract.keys()
    for path, x in found.items():
        np.testing.assert_array_equal(x, run.by_path[path], err_msg=path)


def test_adapters_of_a_model_with_images_are_read(tmp_path):
    run = _Run(tmp_path, "qwen3_5_moe", ALL)
    config, abstract = _adapters_of(run, tmp_path / "adapters", has_images=True)
    for path, x in read_adapters(config, abstract).items():
        np.testing.assert_array_equal(x, run.by_path[path], err_msg=path)


def test_adapters_are_loaded_and_those_that_contradict_raise_with_all_values(tmp_path):
    run = _Run(tmp_path, "llama_tied", ("query", "mlp_down"))
    config, abstract = _adapters_of(run, tmp_path / "adapters")
    params, line = load_pretrained(build_step(config, run.step.mesh))
    assert line.endswith(f"; adapters {tmp_path / 'adapters'}")
    stored = dict(paths_of(params))
    for path in abstract:
        np.testing.assert_array_equal(stored[path], run.by_path[path])
    with pytest.raises(UserError) as error:
        read_adapters(replace(config, lora=LoraConfig(init_from=config.lora.init_from)), abstract)
    values = [
        f"rank={RANK}",
        f"alpha={config.lora.alpha}",
        "rslora=True",
        "projections=query,mlp_down",
    ]
    for value in values:
        assert f"use --config.lora.{value}" in str(error.value)
    files = tmp_path / "adapters" / "adapter_model.safetensors"
    tensors = load_file(files)
    name = "model.layers.1.self_attn.q_proj.lora_A.weight"
    full_name = f"base_model.model.{name}"
    for changed, problem in (
        ({full_name: tensors[full_name][:, 1:]}, f"{name} is missing or has another shape"),
        ({"base_model.model.model.norm.weight": np.ones(2, np.float32)}, "norm.weight has no proj"),
        ({full_name: np.full_like(tensors[full_name], np.nan)}, "has NaN or infinite"),
    ):
        save_file(tensors | changed, files)
        with pytest.raises(UserError, match=problem):
            read_adapters(config, abstract)
    settings = tmp_path / "adapters" / "adapter_config.json"
    fields = json.loads(settings.read_text())
    for changed in (
        dict(peft_type="IA3"),
        dict(use_dora=True),
        dict(lora_bias=True),
        dict(modules_to_save=["lm_head"]),
        dict(init_lora_weights="pissa"),
        dict(rank_pattern=dict(q_proj=2)),
        dict(alpha_pattern=dict(q_proj=2)),
    ):
        settings.write_text(json.dumps(fields | changed))
        with pytest.raises(Unsupported, match=f"has {next(iter(changed))}=.*merge it with"):
            read_adapters(config, abstract)


def test_gate_and_up_share_the_adapter_that_peft_gives_their_parameter(tmp_path):
    """lora_A [experts rank, in] is that of both, and lora_B [out, rank experts] has the outputs of
    both in turn."""
    run = _Run(tmp_path, "gpt_oss", ("expert_gate", "expert_up"))
    config, abstract = _adapters_of(run, tmp_path / "adapters")
    settings, files = (
        tmp_path / "adapters" / name
        for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    fields = json.loads(settings.read_text()) | dict(rank_pattern={}, alpha_pattern={})
    settings.write_text(json.dumps(fields))
    tensors, rng = load_file(files), np.random.default_rng(0)
    for name, x in tensors.items():
        sizes = (len(x) // 2, x.shape[1]) if "lora_A" in name else (len(x), x.shape[1] // 2)
        tensors[name] = rng.normal(size=sizes).astype(np.float32)
    save_file(tensors, files)
    found = read_adapters(config, abstract)
    num_experts = config.model.experts.num_experts
    (stack, (layer, *_)), *_ = config.model.layer_stacks.items()
    module = f"base_model.model.model.layers.{layer}.mlp.experts"
    a_EIr = tensors[f"{module}.lora_A.weight"].reshape(num_experts, RANK, -1).swapaxes(1, 2)
    b_OrE = tensors[f"{module}.lora_B.weight"].reshape(-1, RANK, num_experts)
    for first, part in enumerate(("expert_gate", "expert_up")):
        a, b = (found["/".join((*stack, "mlp/lora", part, x))] for x in "ab")
        np.testing.assert_array_equal(a[0], a_EIr)
        np.testing.assert_array_equal(b[0], b_OrE[first::2].transpose(2, 1, 0))


def test_rows_of_a_projection_that_the_config_does_not_name_raise(tmp_path):
    """Of a module of several projections, to which peft gives one adapter."""
    run = _Run(tmp_path, "qwen3_next", ("value", "delta_decay"))
    config, abstract = _adapters_of(run, tmp_path / "adapters")
    files = tmp_path / "adapters" / "adapter_model.safetensors"
    tensors = load_file(files)
    name = next(name for name in tensors if name.endswith("in_proj_qkvz.lora_B.weight"))
    save_file(tensors | {name: np.ones_like(tensors[name])}, files)
    with pytest.raises(UserError, match="in_proj_qkvz.lora_B.weight has rows of other projections"):
        read_adapters(config, abstract)


def test_adapters_of_a_model_with_images_name_its_modules(tmp_path):
    run = _Run(tmp_path, "qwen3_5_moe", ALL, trainable=("embedding",))
    write_adapters(run.config, run.family, run, tmp_path, has_images=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == r"model\.language_model\..*\.(in_proj_qkv|q_proj)"
    assert config["modules_to_save"] == ["model.language_model.embed_tokens"]
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.") for name in names)


def test_adapters_of_experts_that_have_another_name_raise(tmp_path):
    run = _Run(tmp_path, "granite_hybrid_moe", ALL)
    with pytest.raises(Unsupported, match="block_sparse_moe.experts.down_proj; export without"):
        write_adapters(run.config, run.family, run, tmp_path)


@needs_transformers
def test_adapters_of_experts_open_in_peft_with_equal_logits(tmp_path):
    tokens = tokens_of(16)
    cases = [(case, ALL) for case in ("qwen3_moe", "gpt_oss", "qwen3_5_moe", "glm4_moe")]
    cases += [("qwen3_moe", ("expert_up",)), ("gpt_oss", ("expert_gate", "expert_down"))]
    cases += [
        ("qwen3_5_moe", (*ALL, *MLP)),
        ("glm4_moe", MLP),
        ("qwen3_next", (*ALL, *MLP)),
        ("minimax_m2", ALL),
        ("qwen3_moe", ("mlp_up", "expert_down")),
        ("kimi_linear", (*ALL, *MLP)),
    ]
    runs, jobs = [], {}
    for number, (case, projections) in enumerate(cases):
        directory = tmp_path / str(number)
        # released files have another name of its routers than transformers
        train = dict(trainable=("*/router",)) if case == "minimax_m2" else {}
        run = _Run(directory, case, projections, **train)
        adapters = directory / "adapters"
        adapters.mkdir()
        write_adapters(run.config, run.family, run, adapters)
        base, merged = (
            run.export(directory / "weights", _Base(run)),
            run.export(directory / "merged"),
        )
        jobs[f"{number} peft"] = dict(
            job="peft_gradients", directory=str(base), adapters=str(adapters)
        )
        jobs[f"{number} merged"] = dict(job="gradients", directory=str(merged), float64=True)
        jobs[f"{number} base"] = dict(job="gradients", directory=str(base), float64=True)
        runs.append(run)
    expected = run_jobs(
        tmp_path, {key: job | dict(tokens=tokens.tolist()) for key, job in jobs.items()}
    )
    for number, run in enumerate(runs):
        from_peft, merged, base = (
            expected[f"{number} {name}"]["logits"] for name in ("peft", "merged", "base")
        )
        assert relative_error(merged, from_peft) <= 5e-6, cases[number]
        assert relative_error(base, from_peft) >= 1e-2, cases[number]
        if number == 1:
            logits, _ = evaluate(
                run.step, jax.tree.map(jax.numpy.array, _tree(run.by_path)), tokens
            )
            assert relative_error(logits, from_peft) <= 1e-5
