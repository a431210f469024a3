"""LoRA on a Hugging Face model: small checkpoints, resuming, loading and export; gradients against
`peft`.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxlc
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import defaults, load
from jaxlc.config.kinds import projection_paths
from jaxlc.config.models.families import FAMILIES
from jaxlc.config.schema import MATMUL_NAMES
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.hf.adapters import WEIGHTS_FILE, adapter_settings, base_note, write_adapters
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from tests.hf.comparison import evaluate, needs_transformers, relative_error, run_jobs, tokens_of
from tests.hf.models import CASES, write_model, write_tokenizer
from tests.hf.test_export import batches, config_of, tensors_in
from tests.train.runs import rows, save_step_0

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")
STEPS, RANK, ALPHA = 4, 4, 6.0
SCALE = ALPHA / RANK**0.5
TRAINED = {"embedding": "model.embed_tokens", "final_norm/scale": "model.norm"}
MODULES = {
    **{name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
    "attention_projected": "self_attn.o_proj",
    **{f"mlp_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}

DENSE_CASES = ("exaone4_hybrid", "granite", "llama_tied", "olmo2", "seed_oss")
_LATENT_NAMES = ("query_down", "query_up", "latent", "key_value", "attention_projected")
_KIMI_NAMES = "delta_step", "decay_down", "decay_up", "gate_down", "gate_up", "latent", "key_value"
_DELTA_NAMES = (*MATMUL_NAMES, "delta_gate", "delta_step", "delta_decay")


def lora_config(model: Path, **settings):
    config = config_of(model, mesh__data=2, **settings)
    config.lora = dict(rank=RANK, alpha=ALPHA, rslora=True)
    config.precision.frozen = "fp32"
    config.optimizer = dict(learning_rate=0.03, schedule="constant", warmup_steps=0)
    config.train.update(checkpoint_frozen=False, trainable=tuple(TRAINED), checkpoint_every_steps=2)
    return config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "llama", "llama", dtype=np.float32)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """(workdir, result) of a run that was interrupted after two of four steps."""
    workdir = tmp_path_factory.mktemp("lora") / "run"
    jaxlc.train.run(lora_config(model, train__steps=2), workdir, batches=batches(STEPS))
    return workdir, jaxlc.train.run(
        lora_config(model, train__steps=STEPS), workdir, batches=batches(STEPS)
    )


def assert_same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_small_checkpoint_resumes_bitwise_and_loads(run, model, tmp_path, monkeypatch):
    workdir, result = run
    undisturbed = jaxlc.train.run(
        lora_config(model, train__steps=STEPS), tmp_path / "run", batches=batches(STEPS)
    )
    assert_same(result.params, undisturbed.params)
    checkpoint = workdir / "checkpoints" / str(STEPS)
    stored = json.loads((checkpoint / "checksums" / "metadata").read_text())
    blocks = {name: projection_paths()[name][0].split("/")[0] for name in MATMUL_NAMES}
    adapters = {f"layers/{block}/lora/{name}/{x}" for name, block in blocks.items() for x in "ab"}
    assert {name for name in stored if name.startswith("params/")} == {
        f"params/{x}" for x in adapters | {*TRAINED}
    }
    assert_same(jaxlc.load(workdir, mesh=dict(context=2)).params, _without_padding(result.params))
    monkeypatch.setattr("jaxlc.api.load", None)  # adapters are exported without the base
    written = load_file(jaxlc.export(workdir, tmp_path / "out", adapters=True) / WEIGHTS_FILE)
    query = result.params["layers"]["attention"]["lora"]["query"]["a"]
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    np.testing.assert_array_equal(written[name], query[1].T)


def _without_padding(params):
    """61 ids are padded to 62 in the run, and not on the mesh of `jaxlc.load`."""
    return params | {"embedding": params["embedding"][:61], "head": params["head"][:, :61]}


def test_resume_with_another_base_or_adapter_raises(run, model, tmp_path):
    workdir = shutil.copytree(run[0], tmp_path / "run")
    other = write_model(tmp_path / "other", "llama", dtype=np.float32)
    (file,) = (path for path in other.glob("*.safetensors") if "lm_head.weight" in load_file(path))
    save_file(
        load_file(file) | {"lm_head.weight": np.zeros((61, 32), np.float32)}, file, {"format": "pt"}
    )
    config = lora_config(other, train__steps=STEPS)
    with pytest.raises(
        UserError, match="the frozen parameters of .* are not those of config.model.init_from="
    ):
        jaxlc.train.run(config, workdir, batches=batches(STEPS))
    model.rename(gone := tmp_path / "gone")
    with pytest.raises(
        UserError, match=f"run/checkpoints/{STEPS} lacks .*: put back the model .*{model}"
    ):
        jaxlc.load(workdir)
    gone.rename(model)
    config = lora_config(model, train__steps=STEPS)
    config.lora.alpha = 7.0
    with pytest.raises(UserError, match="config.lora.alpha=6.0, and this config has 7.0"):
        jaxlc.train.run(config, workdir, batches=batches(STEPS))


def step_of(config):
    config = load(config)
    return build_step(config, make_mesh(config.mesh))


def pretrained_params(config):
    return load_pretrained(step_of(config))[0]


def test_lora_run_as_init_from_raises(run):
    with pytest.raises(
        UserError, match="has adapters, lacks the frozen parameters, .*: export the run"
    ):
        pretrained_params(config_of(run[0], mesh__data=2))


def test_full_run_as_base_is_converted_to_bf16(model, tmp_path, capsys):
    """And the start report says so; adapters for peft name no run as their base, and a base that is
    not in bf16.
    """
    save_step_0(config_of(model), tmp_path / "full")
    config, rounded = (
        lora_config(tmp_path / "full"),
        "; frozen weights are rounded to bf16 (config.precision.frozen)",
    )
    config.precision.frozen = "bf16"
    with_file = lora_config(model)
    with_file.precision.frozen = "bf16"
    for base, name, note in (
        (config, None, f"export it with `jaxlc export {tmp_path / 'full'} BASE --dtype=bf16`"),
        (
            with_file,
            str(model),
            f"rounded the frozen weights of {model} to bf16 (config.precision.frozen)",
        ),
        (lora_config(model), str(model), ""),
    ):
        workdir = tmp_path / str(id(base))
        assert load_pretrained(step_of(base))[1].endswith(rounded) == bool(note)
        save_step_0(base, workdir)
        out = jaxlc.export(workdir, tmp_path / f"{id(base)}-adapters", adapters=True)
        assert (
            json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == name
        )
        printed = capsys.readouterr().err
        assert note in printed and bool(note) == ("note: " in printed)
    params, full = pretrained_params(config), pretrained_params(config_of(model, mesh__data=2))
    assert_same(params["layers"]["mlp"]["w_up"], full["layers"]["mlp"]["w_up"].astype("bfloat16"))
    assert_same(params["embedding"], full["embedding"])  # trained, so float32
    assert np.any(params["layers"]["mlp"]["lora"]["mlp_up"]["a"])


def test_export_merges_adapters_into_weights(run, model, tmp_path):
    workdir, result = run
    exported, base = (
        tensors_in(jaxlc.export(workdir, tmp_path / "out", dtype="fp32")),
        tensors_in(model),
    )
    assert exported.keys() == base.keys()
    for projection, module in MODULES.items():
        block = result.params["layers"][projection_paths()[projection][0].split("/")[0]]["lora"][
            projection
        ]
        for layer, (a, b) in enumerate(zip(*(np.asarray(block[x]) for x in "ab"))):
            name = f"model.layers.{layer}.{module}.weight"
            expected = base[name] + SCALE * (a.reshape(-1, RANK) @ b.reshape(RANK, -1)).T
            np.testing.assert_allclose(exported[name], expected, atol=1e-6)
            assert np.abs(exported[name] - base[name]).max() > 1e-3
    np.testing.assert_array_equal(exported["lm_head.weight"], base["lm_head.weight"])
    assert (
        np.abs(exported["model.embed_tokens.weight"] - base["model.embed_tokens.weight"]).max()
        > 1e-3
    )


def test_generation_with_adapters_equals_that_of_merged_weights(run, model, tmp_path):
    """And differs from that of the base."""
    workdir, _ = run
    merged = jaxlc.export(workdir, tmp_path / "out", dtype="fp32")
    prompt = tokens_of(20)[:1]

    def generate(source):
        return jaxlc.generate(source, list(prompt), max_tokens=8, mesh=dict(context=2))[0]

    with_adapters, from_merged = generate(workdir), generate(merged)
    np.testing.assert_array_equal(with_adapters.tokens, from_merged.tokens)
    np.testing.assert_allclose(with_adapters.log_probs, from_merged.log_probs, atol=1e-4)
    assert np.abs(with_adapters.log_probs - generate(model).log_probs).max() > 1e-2


@pytest.mark.full
def test_training_starts_from_adapters_and_does_not_need_them_later(model, tmp_path, capsys):
    """The first loss is that of the next step of the run whose adapters they are."""
    config = lora_config(model, train__steps=3)
    config.train.update(trainable=(), checkpoint_every_steps=1)
    jaxlc.train.run(config, tmp_path / "before", batches=batches(3))
    adapters = tmp_path / "adapters"
    jaxlc.export(tmp_path / "before", adapters, step=2, adapters=True)
    config.lora.init_from = str(adapters)
    jaxlc.train.run(config, tmp_path / "after", batches=batches(3)[2:] * 3)
    assert losses(tmp_path / "after")[0] == losses(tmp_path / "before")[2]
    assert f"; adapters {adapters}" in capsys.readouterr().out
    shutil.move(adapters, tmp_path / "moved")
    loaded = jaxlc.load(tmp_path / "after", mesh={})
    prompt = [tokens_of(20)[0]]
    with_adapter = jaxlc.generate(model, prompt, max_tokens=4, adapter=tmp_path / "moved")[0]
    before = jaxlc.load(tmp_path / "before", step=2, mesh={})
    (expected,) = jaxlc.generate(before, prompt, max_tokens=4)
    np.testing.assert_allclose(with_adapter.log_probs, expected.log_probs, atol=1e-5)
    assert loaded.step == 3
    with pytest.raises(UserError, match="adapter has no effect: .* is no Hugging Face directory"):
        jaxlc.load(tmp_path / "after", adapter=adapters)


@pytest.mark.parametrize(
    ("base", "is_other"),
    [("org/Base", False), ("/moved/Base", False), (None, False), ("org/Base-Chat", True)],
)
def test_adapters_of_another_base_are_named(base, is_other, tmp_path):
    """Both names; the shapes of the two models are equal."""
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(base_model_name_or_path=base)))
    config = SimpleNamespace(
        lora=SimpleNamespace(init_from=str(tmp_path)), model=SimpleNamespace(init_from="x/Base")
    )
    note = base_note(config)
    assert bool(note) == is_other
    assert not is_other or ("org/Base-Chat" in note and "x/Base" in note)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(r="4"), r"has r='4': expected an integer from 1 to 2\^31 - 1"),
        (dict(lora_alpha=-8), "has lora_alpha=-8: expected a finite number greater than 0"),
        (dict(use_rslora="false"), "has use_rslora='false': expected true or false"),
        (dict(r=None), "has no field r"),
        (dict(lora_alpha=None), "has no field lora_alpha"),
    ],
)
def test_adapters_with_invalid_settings_raise(changes, words, model, tmp_path):
    content = dict(peft_type="LORA", r=4, lora_alpha=8) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    shutil.copy(model / "model-00001-of-00002.safetensors", tmp_path / "adapter_model.safetensors")
    config = defaults()
    config.model.init_from, config.lora.init_from = str(model), str(tmp_path)
    with pytest.raises(UserError, match=words):
        adapter_settings(load(config))


def losses(workdir: Path) -> list[float]:
    return [row["loss"] for row in rows(workdir) if "loss" in row]


@needs_transformers
def test_adapters_open_in_peft_with_equal_gradients(run, model, tmp_path):
    workdir, result = run
    adapters = jaxlc.export(workdir, tmp_path / "adapters", adapters=True)
    merged = jaxlc.export(workdir, tmp_path / "merged", dtype="fp32")
    tokens = tokens_of(16)
    jobs = {
        "peft": dict(
            job="peft_gradients",
            directory=str(model),
            adapters=str(adapters),
            tokens=tokens.tolist(),
        ),
        "merged": dict(job="gradients", directory=str(merged), tokens=tokens.tolist()),
    }
    expected = run_jobs(tmp_path, jobs)
    logits, gradients = evaluate(result.train_step, result.params, tokens, 0)
    assert relative_error(logits, expected["peft"]["logits"]) <= 1e-5
    assert relative_error(logits, expected["merged"]["logits"]) <= 1e-5
    ours = {}
    for projection, module in MODULES.items():
        block = gradients["layers"][projection_paths()[projection][0].split("/")[0]]["lora"][
            projection
        ]
        for layer, (a, b) in enumerate(zip(block["a"], block["b"])):
            prefix = f"model.layers.{layer}.{module}.lora"
            ours |= {
                f"{prefix}_A.default": a.reshape(-1, RANK).T,
                f"{prefix}_B.default": b.reshape(RANK, -1).T,
            }
    ours["model.embed_tokens.modules_to_save.default"] = gradients["embedding"][:61]
    ours["model.norm.modules_to_save.default"] = gradients["final_norm"]["scale"]
    theirs = {name: x for name, x in expected["peft"].items() if name.startswith("gradient/")}
    assert {f"gradient/base_model.model.{name}.weight" for name in ours} == theirs.keys()
    for name, gradient in ours.items():
        assert (
            relative_error(gradient, theirs[f"gradient/base_model.model.{name}.weight"]) <= 1e-5
        ), name


@needs_transformers
@pytest.mark.parametrize(
    ("case", "projections", "module"),
    [
        ("qwen3_5_hybrid", _DELTA_NAMES, "in_proj_qkv"),  # the adapters of three projections
        ("qwen3_5_hybrid", ("query", "value", "delta_gate"), "in_proj_z"),
        ("olmo_hybrid", _DELTA_NAMES, "a_proj"),
        ("qwen3_next", _DELTA_NAMES, "in_proj_ba"),  # of groups of rows
        ("qwen3_next", ("value", "delta_decay"), "in_proj_qkvz"),
        ("granite_hybrid", (*MATMUL_NAMES, "delta_gate", "delta_step"), "in_proj"),
        # peft refuses adapters of its out_proj
        (
            "nemotron_h",
            (*MATMUL_NAMES[:3], "mlp_up", "mlp_down", "delta_gate", "delta_step"),
            "in_proj",
        ),
        (
            "falcon_h1",
            ("query", "key", "value", "mlp_gate", "mlp_up", "mlp_down", "delta_gate", "delta_step"),
            "in_proj",
        ),
        ("kimi_linear", (*MATMUL_NAMES, *_KIMI_NAMES), "f_b_proj"),
        ("phi3_window", MATMUL_NAMES, "qkv_proj"),
        ("phi3_window", ("key", "mlp_up"), "gate_up_proj"),
        ("deepseek_v3", _LATENT_NAMES, "kv_a_proj_with_mqa"),
        ("deepseek_v2", ("query", "key_value"), "kv_b_proj"),
        *((case, MATMUL_NAMES, "down_proj") for case in DENSE_CASES),
    ],
)
def test_adapters_of_other_modules_open_in_peft_with_equal_logits(
    case, projections, module, tmp_path
):
    base = write_model(tmp_path / "base", case, dtype=np.float32)
    config = lora_config(base, train__steps=2)
    config.lora.projections = projections
    if CASES[case].config["tie_word_embeddings"]:  # peft's embedding and head would differ
        config.train.trainable = ("final_norm/scale",)
    result = jaxlc.train.run(config, tmp_path / "run", batches=batches(2))
    adapters = jaxlc.export(tmp_path / "run", tmp_path / "adapters", adapters=True)
    merged = jaxlc.export(tmp_path / "run", tmp_path / "merged", dtype="fp32")
    tokens = tokens_of(64)
    jobs = {
        "peft": dict(
            job="peft_gradients",
            directory=str(base),
            adapters=str(adapters),
            tokens=tokens.tolist(),
        ),
        "merged": dict(job="gradients", directory=str(merged), tokens=tokens.tolist()),
        "base": dict(job="gradients", directory=str(base), tokens=tokens.tolist()),
    }
    expected = run_jobs(tmp_path, jobs)
    assert any(f".{module}.lora_B" in name for name in expected["peft"])
    logits, _ = evaluate(result.train_step, result.params, tokens, 0)
    assert relative_error(logits, expected["peft"]["logits"]) <= 1e-4
    assert relative_error(logits, expected["merged"]["logits"]) <= 1e-4
    assert relative_error(logits, expected["base"]["logits"]) >= 1e-2


@pytest.mark.full
def test_adapters_that_peft_refuses_are_not_exported(tmp_path):
    base = write_model(tmp_path / "base", "falcon_h1", dtype=np.float32)
    config = lora_config(base, train__steps=1)
    config.lora.projections = ("attention_projected",)
    jaxlc.train.run(config, tmp_path / "run", batches=batches(1))
    with pytest.raises(Unsupported, match="modules out_proj peft 0.21 refuses"):
        jaxlc.export(tmp_path / "run", tmp_path / "adapters", adapters=True)


@pytest.mark.parametrize(("case", "projections", "words"), [
    ("falcon_h1", ("query", "attention_projected"), "of attention_projected .* modules out_proj peft 0.21 refuses"),
    ("afmoe", ("query", "attention_gate"), "of attention_gate .* gates of attention and of feed-forward blocks"),
    ("afmoe", ("value", "mlp_up", "mlp_gate"), "of mlp_gate .* modules gate_proj are gates"),
])  # fmt: skip
def test_adapters_that_peft_cannot_have_are_not_exported(tmp_path, case, projections, words):
    config = lora_config(write_model(tmp_path / "base", case, dtype=np.float32))
    config.lora.projections = projections
    family = FAMILIES[CASES[case].config["model_type"]]
    with pytest.raises(Unsupported, match=words):
        write_adapters(load(config), family, None, tmp_path)


_EXPERTS = ("expert_gate", "expert_up", "expert_down")
_EXPERT_PARAMS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Case -> fields of LoraConfig, and the projections.
WRITTEN_BY_PEFT = {
    "llama_tied": (
        dict(target_modules=["q_proj", "v_proj", "down_proj"]),
        ("query", "value", "mlp_down"),
    ),
    "qwen3_5_hybrid": (
        dict(
            target_modules=["q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z"],
            use_rslora=True,
        ),
        ("query", "key", "value", "delta_gate"),
    ),
    "qwen3_next": (
        dict(
            target_modules=["q_proj", "k_proj", "v_proj", "in_proj_qkvz"],
            target_parameters=_EXPERT_PARAMS,
        ),
        ("query", "key", "value", "delta_gate", *_EXPERTS),
    ),
    "phi3_window": (
        dict(target_modules=["qkv_proj", "gate_up_proj"]),
        ("query", "key", "value", "mlp_gate", "mlp_up"),
    ),
    "gpt_oss": (
        dict(target_modules=["q_proj"], target_parameters=_EXPERT_PARAMS),
        ("query", *_EXPERTS),
    ),
    "qwen3_moe": (
        dict(target_modules=["o_proj"], target_parameters=_EXPERT_PARAMS[:1]),
        ("attention_projected", "expert_gate", "expert_up"),
    ),
}


@needs_transformers
def test_adapters_that_peft_wrote_have_its_logits(tmp_path):
    """In the modules of one projection and of several, and in parameters of experts."""
    tokens, bases, jobs = tokens_of(64), {}, {}
    for case, (fields, _) in WRITTEN_BY_PEFT.items():
        bases[case] = write_model(tmp_path / case, case, dtype=np.float32)
        jobs[case] = dict(
            job="peft_save",
            directory=str(bases[case]),
            adapters=str(tmp_path / f"{case}-adapters"),
            tokens=tokens.tolist(),
            r=3,
            lora_alpha=5,
            **fields,
        )
    expected = run_jobs(tmp_path, jobs)
    for case, (_, projections) in WRITTEN_BY_PEFT.items():
        adapter = tmp_path / f"{case}-adapters"
        result = jaxlc.load(bases[case], adapter=adapter)
        assert set(result.config.lora.projections) == set(projections)
        config = lora_config(bases[case])
        config.lora = dict(vars(result.config.lora))
        config.train.trainable, config.mesh = (), dict(context=2)
        loaded = load(config)
        step = build_step(loaded, make_mesh(loaded.mesh, jax.devices()[:2]))
        logits, _ = evaluate(step, load_pretrained(step)[0], tokens)
        assert relative_error(logits, expected[case]["logits"]) <= 1e-4, case


# Modules of images have names of the language model, except in Qwen.
WRAPPERS = {
    "mistral": ("mistral3", MATMUL_NAMES),
    "gemma3": ("gemma3", ("query", "mlp_down")),
    "qwen3_5_moe": ("qwen3_5_moe", (*_DELTA_NAMES, *_EXPERTS)),
    "qwen3_vl_moe": ("qwen3_vl_moe", ("query", *_EXPERTS)),
}


@needs_transformers
def test_adapters_of_models_with_images_open_in_peft_on_the_whole_model(tmp_path):
    tokens = tokens_of(64).tolist()
    saved = {
        case: dict(job="save", config=CASES[case].config, tokens=tokens, wrapper=wrapper)
        for case, (wrapper, _) in WRAPPERS.items()
    }
    run_jobs(tmp_path, {x: job | dict(directory=str(tmp_path / x)) for x, job in saved.items()})
    results, jobs = {}, {}
    for case, (_, projections) in WRAPPERS.items():
        write_tokenizer(tmp_path / case, 60)
        config = lora_config(tmp_path / case, train__steps=2)
        config.lora.projections = projections
        config.train.trainable = ("final_norm/scale",)
        workdir, adapters = tmp_path / f"{case}-run", tmp_path / f"{case}-adapters"
        results[case] = jaxlc.train.run(config, workdir, batches=batches(2))
        jaxlc.export(workdir, adapters, adapters=True)
        jobs[case] = dict(
            job="peft_gradients", directory=str(tmp_path / case), adapters=str(adapters)
        )
        jobs[f"{case} base"] = dict(job="logits", directory=str(tmp_path / case))
    expected = run_jobs(tmp_path, {x: job | dict(tokens=tokens) for x, job in jobs.items()})
    for case, result in results.items():
        names = [name for name in expected[case] if name.startswith("gradient/")]
        prefix = "gradient/base_model.model.model.language_model."
        assert names and all(name.startswith(prefix) for name in names), case
        assert f"{prefix}norm.modules_to_save.default.weight" in names
        logits, _ = evaluate(result.train_step, result.params, np.array(tokens), 0)
        assert relative_error(logits, expected[case]["logits"]) <= 1e-4, case
        assert relative_error(logits, expected[f"{case} base"]["logits"]) >= 1e-2, case
