"""From a Hugging Face directory through a run and back."""

import contextlib
import dataclasses
import errno
import json
import operator
import os
import re
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file

import jaxlc
from jaxlc.checkpoints.pretrained import keep_description, load_pretrained
from jaxlc.cli import main_of
from jaxlc.config import PRESETS, load
from jaxlc.config.models.config_json import config_json_of, language_model_of, settings_of
from jaxlc.config.models.model_schema import KindConfig, model_from
from jaxlc.config.models.pretrained import copy_description, with_language_model
from jaxlc.config.models.rope_json import max_position_embeddings
from jaxlc.core.errors import UserError
from jaxlc.core.files import locked
from jaxlc.data.corpus import open_corpus
from jaxlc.data.data_sources import load_matching_tokenizer
from jaxlc.data.sequences.loader import Inputs
from jaxlc.data.texts.documents import Chat
from jaxlc.data.tokens import chat_templates
from jaxlc.hf.files import TensorWriter
from jaxlc.posttrain.traces import open_traces
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from tests.hf.models import (
    CASES,
    config_json_in_files,
    stored_tensors_of,
    tensors_of,
    write_model,
    write_tensors,
    write_tokenizer,
)
from tests.models.plain_rope import with_rope
from tests.train.runs import save_step_0, write_untrained_run

main = main_of("export")

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")


def batches(num_steps, vocab_size=60):
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, vocab_size, (2, 64))} for _ in range(num_steps)]


def config_of(init_from, **settings):
    config = ConfigDict(
        {
            "model": {"init_from": str(init_from)},
            "mesh": {"context": 2, "tensor": 2},
            "data": {"seq_len": 64},
            "precision": {"compute": "fp32"},
            "train": {"steps": 1, "global_batch_size": 2},
            "optimizer": {"learning_rate": 0.0},
        }
    )
    for path, value in settings.items():
        section, name = path.split("__")
        config[section][name] = value
    return config


def train(init_from, workdir, num_batches, **settings):
    """Trains on all eight devices of the tests."""
    config = config_of(init_from, mesh__data=2, **settings)
    return jaxlc.train.run(config, workdir, batches=batches(num_batches))


def tensors_in(directory):
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_array_equal(
            actual[name].view(np.uint8), value.view(np.uint8), err_msg=name
        )


# Names, RoPE and windows of these models change no weight; `test_config_json_is_written_as_it_was_read` has their
# config.json, and tests/hf/test_load.py the names of their tensors.
ONLY_NAMES = {
    "llama",
    "mistral_window",
    "ministral3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "smollm3",
    "granite",
}
ONLY_NAMES |= {"seed_oss", "exaone4", "exaone4_hybrid", "olmo2", "phi3", "qwen2_window", "qwen3_vl"}
ONLY_NAMES |= {"cwm", "mixtral", "olmoe", "solar_open", "glm", "ernie4_5", "dots1"}
ONLY_NAMES |= {"granitemoe", "granitemoeshared"}
# The layers of these hybrids are in granite_hybrid_moe, falcon_h1 and nemotron_h_latent.
ONLY_NAMES |= {"granite_hybrid", "falcon_h1_norm", "nemotron_h_moe"}


@pytest.mark.parametrize("case", CASES)
def test_config_json_is_written_as_it_was_read(case):
    base = CASES[case].config
    settings = settings_of(base, "config.json")
    kinds = settings.pop("kinds", {}).items()
    kinds = tuple(KindConfig(name=name, **x) for name, x in kinds)
    model = model_from(PRESETS["tiny"].by_path | settings | dict(kinds=kinds))
    written = config_json_of(model, base, seq_len=64, dtype="bfloat16")
    assert json.loads(json.dumps(written)) == base


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.full] if x in ONLY_NAMES else []) for x in CASES],
)
def test_import_then_export_is_bit_identical(case, tmp_path):
    """61 ids are padded to 62 in the run."""
    source = write_model(tmp_path / "model", case)
    save_step_0(config_of(source), tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out", max_shard_gb=2e-5)
    tensors = stored_tensors_of(case)
    assert_same_bits(tensors_in(out), tensors)
    assert json.loads((out / "config.json").read_text()) == config_json_in_files(case)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert {path.name for path in out.glob("*.safetensors")} == set(index["weight_map"].values())
    for path in out.glob("*.safetensors"):
        sizes = [x.nbytes for x in load_file(path).values()]
        assert sum(sizes) <= 2e4 or len(sizes) == 1


def test_parts_that_are_not_trained_are_copied_unless_they_changed(tmp_path):
    """Of a model with images, also through a second run."""
    source = write_model(tmp_path / "model", "qwen3_vl")
    (source / "preprocessor_config.json").write_text("{}")
    config = save_step_0(config_of(source), tmp_path / "run")
    line = keep_description(config.model, tmp_path / "run")
    assert "3 tensors model.visual.*, SHA-256" in line and line.endswith(str(source))
    save_step_0(config_of(tmp_path / "run"), tmp_path / "second")
    # what a run leaves that ended before its first checkpoint
    shutil.copytree(tmp_path / "second" / "pretrained", tmp_path / "third" / "pretrained")
    save_step_0(config_of(write_model(tmp_path / "llama", "llama")), tmp_path / "third")
    assert_same_bits(
        tensors_in(jaxlc.export(tmp_path / "third", tmp_path / "out-3")), tensors_of("llama")
    )
    for run in ("run", "second"):
        out = jaxlc.export(tmp_path / run, tmp_path / f"out-{run}")
        assert_same_bits(tensors_in(out), stored_tensors_of("qwen3_vl"))
        assert json.loads((out / "config.json").read_text()) == config_json_in_files("qwen3_vl")
        assert (out / "preprocessor_config.json").is_file()
    for tensors in (tensors_of("qwen3_vl"), changed(stored_tensors_of("qwen3_vl")), None):
        if tensors:
            write_tensors(source, tensors, num_files=2)
        else:
            shutil.rmtree(source)
        with pytest.raises(UserError, match="restore it, or export with --text_only"):
            jaxlc.export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "pretrained" / "untrained.json").unlink()  # an older run
    with pytest.raises(UserError, match="export the language model alone, with --text_only"):
        jaxlc.export(tmp_path / "run", tmp_path / "out")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--text_only"]) == 0
    assert_same_bits(tensors_in(tmp_path / "out"), tensors_of("qwen3_vl"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["eos_token_id"]) == ("qwen3", 2)
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()


def changed(tensors):
    name = "model.visual.blocks.0.attn.qkv.weight"
    return tensors | {name: np.nextafter(tensors[name], np.float32(9))}


def test_unreadable_generation_config_raises_at_the_start_of_a_run(tmp_path):
    source = write_model(tmp_path / "model", "llama")
    (source / "generation_config.json").write_text("")
    with pytest.raises(UserError, match="cannot read .*/model/generation_config.json"):
        copy_description(str(source), tmp_path)


def test_layers_of_multi_token_prediction_are_copied(tmp_path):
    """In the dtypes of the files, also one that no weight has."""
    source = write_model(tmp_path / "model", "glm4_moe")
    others = {
        "model.layers.3.eh_proj.weight": np.ones((32, 64), np.float32),
        "model.layers.3.steps": np.arange(5),
        "model.layers.3.empty": np.zeros((0, 4), np.float16),
    }
    tensors = tensors_of("glm4_moe")
    write_tensors(source, tensors | others, num_files=3)
    save_step_0(config_of(source), tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out", max_shard_gb=2e-5)
    assert_same_bits(tensors_in(out), tensors | others)
    alone = jaxlc.export(tmp_path / "run", tmp_path / "alone", text_only=True)
    assert_same_bits(tensors_in(alone), tensors)


def test_config_json_of_a_model_with_images_has_another_rope_where_it_was():
    content = config_json_in_files("qwen3_vl_moe") | dict(eos_token_id=5)
    base = language_model_of(content)
    kinds = (KindConfig(name="dense", feed_forward="dense"),)
    settings = settings_of(base, "config.json") | {"kinds": kinds, "rope.theta": 7e6}
    longer = model_from(PRESETS["tiny"].by_path | settings)
    fields = config_json_of(longer, base, seq_len=512, dtype="float32")
    written = with_language_model(content, fields | dict(eos_token_id=[5, 6]))
    assert written["eos_token_id"] == written["text_config"]["eos_token_id"] == [5, 6]
    assert written["text_config"]["max_position_embeddings"] == 512
    rope = content["text_config"]["rope_parameters"]
    assert written["text_config"]["rope_parameters"] == rope | dict(rope_theta=7e6)
    assert written["dtype"] == written["text_config"]["dtype"] == "float32"
    assert settings_of(language_model_of(written), "config.json")["rope.theta"] == 7e6
    assert {**written, "text_config": 0} == {
        **content, "text_config": 0, "dtype": "float32", "eos_token_id": [5, 6]
    }  # fmt: skip
    assert with_language_model(content, base) == content


def test_export_fp32_is_bit_identical(tmp_path):
    source = write_model(tmp_path / "model", "llama", dtype=np.float32)
    save_step_0(config_of(source), tmp_path / "run")
    assert main(["jaxlc export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype=fp32"]) == 0
    assert_same_bits(tensors_in(tmp_path / "out"), tensors_of("llama", np.float32))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CASES["llama"].config | {
        "torch_dtype": "float32"
    }


def test_config_json_of_an_export_has_one_dtype_and_its_rope():
    """A base with both names of the dtype, and with the base of RoPE inside rope_scaling."""
    scaling = dict(rope_type="linear", factor=2.0, rope_theta=70_000.0)
    changes = dict(dtype="bfloat16", torch_dtype="bfloat16", rope_scaling=scaling)
    base = {
        name: value for name, value in CASES["llama"].config.items() if name != "rope_theta"
    } | changes
    model = model_from(PRESETS["tiny"].by_path | settings_of(base, "config.json"))
    written = config_json_of(model, base, seq_len=16, dtype="float32")
    assert written == base | dict(dtype="float32", torch_dtype="float32")
    longer = with_rope(model, factor=8.0)
    written = config_json_of(longer, base, seq_len=16, dtype="float32")
    assert (written["rope_theta"], written["rope_parameters"]["factor"]) == (70_000.0, 8.0)


def test_config_json_of_minimax_m2_names_the_rotated_dimensions_and_no_code():
    """rotary_dim gives the fraction unless another field does; released files name code of their own."""
    base = CASES["minimax_m2"].config | dict(auto_map=dict(AutoConfig="configuration.Config"))
    for changes, fraction in (
        ({}, 0.5),
        (dict(rotary_dim=None), 1.0),
        (dict(partial_rotary_factor=0.25), 0.25),
    ):
        settings = settings_of(base | changes, "config.json")
        assert settings["rope.fraction"] == fraction
        model = model_from(PRESETS["tiny"].by_path | settings)
        written = config_json_of(model, base | changes, seq_len=16, dtype="float32")
        assert "auto_map" not in written
        assert written.get("rotary_dim") == (base | changes)["rotary_dim"]
        longer = with_rope(model, factor=16.0)
        written = config_json_of(longer, base | changes, seq_len=16, dtype="float32")
        assert written["rotary_dim"] == 16 * fraction
        assert settings_of(written, "config.json")["rope.fraction"] == fraction


@pytest.mark.parametrize("adapters", [False, True])
def test_export_to_a_full_disk_prints_one_line_and_leaves_nothing(
    adapters, tmp_path, monkeypatch, capsys
):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = config_of(write_model(tmp_path / "model", "llama"))
    config.lora = dict(rank=2)
    save_step_0(config, tmp_path / "run")
    monkeypatch.setattr(*((Path, "write_bytes") if adapters else (TensorWriter, "write")), write)
    command = ["jaxlc export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main([*command, f"--adapters={adapters}"]) == 1
    assert re.fullmatch(
        r"error: cannot write to .*\(No space left on device\): .*\n", capsys.readouterr().err
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def test_columns_are_written_to_memory_of_space_that_the_file_has(tmp_path, monkeypatch):
    """A write to mapped memory without space on the disk would kill the process."""
    memmap, sizes = np.memmap, []

    def mapped(file, *args):
        sizes.append(os.fstat(file.fileno()).st_size)
        return memmap(file, *args)

    monkeypatch.setattr(np, "memmap", mapped)
    tensor = np.arange(24, dtype=np.float32).reshape(4, 6)
    with TensorWriter(tmp_path, {"a": ("F32", (4, 6))}, 10**9) as files:
        for columns in (slice(0, 6, 2), slice(1, 6, 2)):
            files.write("a", tensor[:, columns], (slice(None), columns))
    path = tmp_path / "model.safetensors"
    assert min(sizes) == path.stat().st_size
    np.testing.assert_array_equal(load_file(path)["a"], tensor)


def test_run_from_a_model_resumes_exports_and_starts_another_run(tmp_path, capsys):
    source = write_model(tmp_path / "model", "llama_tied")
    settings = dict(optimizer__learning_rate=1e-3, optimizer__warmup_steps=0, model__rope_theta=5e5)
    settings |= dict(train__checkpoint_every_steps=1)
    train(source, tmp_path / "run", 1, train__steps=2, **settings)
    resumed = train(source, tmp_path / "run", 2, train__steps=2, **settings)
    assert "resuming from step 1" in capsys.readouterr().out
    shutil.rmtree(source)  # the run has copies of config.json and the tokenizer
    assert np.isfinite(jaxlc.load(tmp_path / "run").model.loss("abc def"))
    out = jaxlc.export(tmp_path / "run", tmp_path / "out")
    content = json.loads((out / "config.json").read_text())
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 5e5
    assert content["max_position_embeddings"] == 64
    embedding = np.asarray(resumed.params["embedding"])[:61]
    again = jaxlc.load(out)
    assert (again.step, again.config.model.rope.theta) == (0, 5e5)
    np.testing.assert_array_equal(
        again.params["embedding"], embedding.astype(ml_dtypes.bfloat16).astype(np.float32)
    )
    assert np.isfinite(again.model.loss("abc def"))
    with pytest.raises(
        UserError, match="step has no effect: .* is a Hugging Face directory, not a run"
    ):
        jaxlc.load(out, step=1)
    # The weights of a run are those of its checkpoint, and the optimizer is new.
    config = save_step_0(config_of(tmp_path / "run"), tmp_path / "second")
    assert config.data.tokenizer == str(source / "tokenizer.json")
    assert config.model.rope.theta == 5e5
    assert_same_bits(
        tensors_in(jaxlc.export(tmp_path / "second", tmp_path / "out2")), tensors_in(out)
    )
    assert (tmp_path / "out2" / "tokenizer.json").is_file()


END = 0  # id of <|im_end|>
_SPECIAL_TOKENS = ("<|im_end|>", "<s>", "</s>", "<unk>", "<|im_start|>")
_QUESTION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def write_chat_model(directory, text_files):
    """A base model whose logits are all 0, so that it continues every text with token 0, the end of
    turn of ChatML.
    """
    write_model(directory, "llama")
    tensors = tensors_of("llama")
    write_tensors(
        directory, tensors | {"model.norm.weight": 0 * tensors["model.norm.weight"]}, num_files=2
    )
    write_tokenizer(directory, 60, _SPECIAL_TOKENS)
    for name in ("generation_config.json", "chat_template.jinja"):
        (directory / name).unlink()
    for name, content in text_files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def objects_in(directory, *names):
    return [json.loads((directory / f"{name}.json").read_text()) for name in names]


def test_export_of_a_chat_run_of_a_base_model_stops_at_the_end_of_turn(tmp_path):
    """The base has no template and no generation_config.json; its tokenizer truncates to 32 tokens."""
    files = {"tokenizer_config.json": dict(bos_token="<s>", eos_token="</s>", model_max_length=32)}
    files["special_tokens_map.json"] = dict(bos_token="<s>", eos_token="</s>")
    source = write_chat_model(tmp_path / "model", files)
    (tmp_path / "own.jinja").write_text(chat_templates.TEMPLATES["chatml"])
    save_step_0(
        config_of(source, data__chat_template=str(tmp_path / "own.jinja")), tmp_path / "run"
    )
    (tmp_path / "own.jinja").unlink()
    # A run on plain text that starts from it keeps the template, and has shorter sequences.
    save_step_0(config_of(tmp_path / "run", data__seq_len=32), tmp_path / "second")
    outs = [jaxlc.export(tmp_path / name, tmp_path / f"out-{name}") for name in ("run", "second")]
    for out in outs:
        config, generation, tokenizer, older = objects_in(
            out, "config", "generation_config", "tokenizer_config", "special_tokens_map"
        )
        assert generation == dict(bos_token_id=1, pad_token_id=60, eos_token_id=[END, 2])
        assert config["eos_token_id"] == [END, 2] and config["max_position_embeddings"] == 64
        assert tokenizer == dict(bos_token="<s>", eos_token="<|im_end|>", model_max_length=64)
        assert older == dict(bos_token="<s>", eos_token="<|im_end|>")
        exported = chat_templates.load_chat_template("", out / "tokenizer.json")
        assert (
            exported.source == (out / "chat_template.jinja").read_text()
            and "endgeneration" not in exported.source
        )
        expected = (
            chat_templates.ChatTemplate(chat_templates.TEMPLATES["chatml"], {})
            .render(Chat(_QUESTION), "x")
            .text
        )
        assert exported.render(Chat(_QUESTION), "x").text == expected
    for directory in (tmp_path / "second", outs[0]):
        generation = jaxlc.generate(directory, "hi", max_tokens=4, chat=True)
        assert (generation.tokens.tolist(), generation.text, generation.finish_reason) == (
            [END],
            "",
            "stop",
        )
    # The base has no template, and does not stop there.
    generation = jaxlc.generate(source, "hi", max_tokens=4, chat=True, chat_template="chatml")
    assert generation.tokens.tolist() == [END]
    assert jaxlc.generate(source, "hi", max_tokens=4).tokens.tolist() == [END] * 4


def test_export_of_a_chat_run_replaces_the_template_of_its_base_and_keeps_generation_settings(
    tmp_path,
):
    settings = dict(temperature=0.6, do_sample=True, bos_token_id=1, eos_token_id=[2, 7])
    tokenizer = dict(eos_token="</s>", chat_template="{{ 'older' }}", tokenizer_class="X")
    files = {"generation_config.json": settings, "tokenizer_config.json": tokenizer}
    source = write_chat_model(tmp_path / "model", files | {"chat_template.jinja": "{{ 'base' }}"})
    save_step_0(config_of(source, data__chat_template="chatml"), tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out")
    assert "<|im_start|>" in (out / "chat_template.jinja").read_text()
    assert objects_in(out, "generation_config") == [settings | dict(eos_token_id=[END, 2, 7])]
    assert objects_in(out, "tokenizer_config") == [
        dict(eos_token="<|im_end|>", tokenizer_class="X")
    ]
    # A run on text keeps all files, except an empty generation_config.json.
    (source / "generation_config.json").write_text("{}")
    save_step_0(config_of(source), tmp_path / "texts")
    out = jaxlc.export(tmp_path / "texts", tmp_path / "out-texts")
    assert not (out / "generation_config.json").exists()
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    # The tokenizer of a run may be another one, for instance with tokens for the markers of a
    # template.
    own = write_chat_model(
        tmp_path / "own", {"chat_template.jinja": chat_templates.TEMPLATES["chatml"]}
    )
    write_tokenizer(own, 59, (*_SPECIAL_TOKENS, "<|more|>"))
    mixture = dict(chats=dict(paths="x", chat_format="messages"))
    save_step_0(
        config_of(source, data__tokenizer=str(own), data__mixture=mixture), tmp_path / "other"
    )
    out = jaxlc.export(tmp_path / "other", tmp_path / "out-other")
    assert (out / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
    assert "endgeneration" not in (out / "chat_template.jinja").read_text()
    assert objects_in(out, "tokenizer_config") == [
        dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>")
    ]


@pytest.mark.parametrize(
    ("seq_len", "base", "scaling", "longest"),
    [
        (64, 512, {}, 512),
        (1024, 512, {}, 1024),
        (
            64,
            512,
            dict(rope_scaling="yarn", rope_scaling_factor=9.0, rope_scaling_original_tokens=32),
            512,
        ),
        (
            64,
            32,
            dict(rope_scaling="yarn", rope_scaling_factor=9.0, rope_scaling_original_tokens=32),
            288,
        ),
        (
            64,
            32,
            dict(
                rope_scaling="dynamic_ntk", rope_scaling_factor=9.0, rope_scaling_original_tokens=32
            ),
            32,
        ),
    ],
)
def test_max_position_embeddings_is_the_longest_context(seq_len, base, scaling, longest):
    assert (
        max_position_embeddings(load(ConfigDict({"model": scaling})).model, seq_len, base)
        == longest
    )


def test_export_that_fails_leaves_no_files(tmp_path):
    write_untrained_run(tmp_path / "run")
    with pytest.raises(UserError, match="the run has no adapters .*: export it without --adapters"):
        jaxlc.export(tmp_path / "run", tmp_path / "out", adapters=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    jaxlc.export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(
        UserError, match="out exists already: remove it, or export to a different directory"
    ):
        jaxlc.export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UserError, match="/proc is a mount point: .*, such as one in it"):
        jaxlc.export(tmp_path / "run", "/proc")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    partial = tmp_path / "empty.partial"  # of an export that was killed, or that writes
    partial.mkdir()
    (partial / "file").touch()
    with (
        locked(tmp_path / "empty.lock", print),
        pytest.raises(UserError, match="process .* writes to .*empty: wait for its end"),
    ):
        jaxlc.export(tmp_path / "run", tmp_path / "link")
    assert [path.name for path in partial.iterdir()] == ["file"]
    jaxlc.export(tmp_path / "run", tmp_path / "link")
    shutil.rmtree(tmp_path / "out")
    jaxlc.export(tmp_path / "run", tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "empty").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    shutil.rmtree(next(tmp_path.glob("run/checkpoints/*/state")))  # as by a run that goes on
    with pytest.raises(UserError, match=r"the checkpoint of step \d+ in .* cannot be read"):
        jaxlc.export(tmp_path / "run", tmp_path / "last")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "out", "run"]


def test_export_of_step_that_does_not_exist_raises(tmp_path, capsys):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    assert main(["jaxlc export", str(tmp_path), str(tmp_path / "out"), "--step=3"]) == 2
    assert "no checkpoint of step 3" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"nothing does not exist: pass the workdir of a run"):
        jaxlc.export(tmp_path / "nothing", tmp_path / "out")


def test_export_of_a_run_from_random_weights_has_a_config_json(tmp_path):
    settings = ConfigDict(
        {
            "model": dict(
                vocab_size=257,
                num_layers=2,
                model_dim=32,
                num_heads=4,
                num_kv_heads=2,
                qk_norm="head",
            ),
            "mesh": {"context": 4, "tensor": 2},
            "data": {"seq_len": 64},
            "train": {"steps": 1, "global_batch_size": 2},
        }
    )
    config = save_step_0(settings, tmp_path / "run")
    out = jaxlc.export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    content = json.loads((out / "config.json").read_text())
    assert (content["model_type"], content["max_position_embeddings"]) == ("qwen3", 64)
    shape = settings_of(content, "config.json")
    assert {name: operator.attrgetter(name)(config.model) for name in shape} == shape


@pytest.mark.parametrize(
    "changes",
    [
        dict(query_scale_dim=64),
        dict(
            qkv_bias=True,
            attention_sinks=False,
            layer_kinds=("full", "sliding"),
            window=8,
            sliding_rope_theta=500.0,
        ),
        dict(num_experts=4, experts_per_token=2, expert_ffn_dim=8, expert_bias=True),
    ],
)
def test_layers_of_no_family_are_exported_with_their_settings(changes, tmp_path, capsys):
    """Of sinks without experts, of a RoPE of sliding layers that config.json cannot have, or of
    biases of experts with sinks.
    """
    model = dict(num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, attention_sinks=True)
    model |= changes
    config = save_step_0(ConfigDict({"model": model, "data": {"seq_len": 64}}), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype=fp32"]) == 0
    assert "no family of transformers has its layers; jaxlc reads it" in capsys.readouterr().out
    loaded = load(
        ConfigDict({"model": dict(init_from=str(tmp_path / "out")), "data": {"seq_len": 64}})
    )
    model = dataclasses.replace(loaded.model, init_from="", preset=config.model.preset)
    assert model == config.model
    params = load_pretrained(build_step(loaded, make_mesh(loaded.mesh, jax.devices()[:1])))[0]
    saved = jaxlc.load(tmp_path / "run").params
    jax.tree.map(np.testing.assert_array_equal, params, saved)


@pytest.mark.parametrize(
    "content, message",
    [
        (dict(model_type="jaxlc"), "config.json has no object 'model'"),
        (
            dict(model_type="jaxlc", model=dict(num_layer=2)),
            "unknown setting model.num_layer: it is of",
        ),
        (
            dict(model_type="jaxlc", model=dict(num_layers="two")),
            "invalid value 'two' for .*model.num_layers",
        ),
        (
            dict(model_type="jaxlc", model=dict(num_layers=2)),
            "config.json has no setting model.activation",
        ),
    ],
)
def test_invalid_own_settings_raise(content, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        load(ConfigDict({"model": dict(init_from=str(tmp_path))}))


def test_tokens_that_the_model_lacks_are_refused_only_where_they_occur(tmp_path):
    """As <image_soft_token> of Gemma 3 1B, which has no row for it."""
    directory = write_model(tmp_path / "model", "gemma3")
    write_tokenizer(directory, 61)
    content = json.loads((directory / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append(dict(id=61, content="<image>", **flags))
    (directory / "tokenizer.json").write_text(json.dumps(content))
    texts = [tmp_path / name for name in ("without.txt", "with.jsonl")]
    texts[0].write_text("a document of words " * 20)
    texts[1].write_text(
        "".join(json.dumps(dict(text=text)) + "\n" for text in ("a", "b <image>") for _ in range(9))
    )
    config = config_of(
        directory, data__seq_len=8, data__eval_fraction=0.5, data__cache_dir=str(tmp_path / "cache")
    )
    config = load(config)
    tokenizer = load_matching_tokenizer(config)
    assert (tokenizer.vocab_size, config.model.vocab_size) == (62, 61)
    message = r"document 10 has the token 61 \('<image>'\), and the model has tokens 0 to 60: remove its text"
    for path, words in zip(texts, ("", message)):
        data = dataclasses.replace(config.data, sources=(str(path),))
        with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
            open_corpus(data, Inputs(tokenizer=tokenizer, vocab_size=config.model.vocab_size))
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps(dict(prompt="a", completion="b<image>")) + "\n")
    with_traces = config_of(directory, data__traces=(str(traces),), data__seq_len=8)
    with pytest.raises(UserError, match="token 61, expected 0 to 60"):
        open_traces(load(with_traces), tokenizer)
    with pytest.raises(UserError, match="token 61, expected 0 to 60"):
        jaxlc.load(directory).model.loss("a <image>")


def test_training_with_a_tokenizer_of_another_model_raises(tmp_path):
    source = write_model(tmp_path / "model", "llama")
    (tmp_path / "texts").mkdir()
    for i in range(8):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document {i} " * 40)
    settings = dict(
        data__sources=(str(tmp_path / "texts"),), data__cache_dir=str(tmp_path / "cache")
    )
    settings |= dict(mesh__data=2)
    with pytest.raises(
        UserError, match="has 257 tokens and the model 61; set --config.data.tokenizer"
    ):
        jaxlc.train.run(config_of(source, data__tokenizer="bytes", **settings), tmp_path / "run")
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"cannot read data.tokenizer '.*model/tokenizer.json'"):
        jaxlc.train.run(config_of(source, **settings), tmp_path / "run")
