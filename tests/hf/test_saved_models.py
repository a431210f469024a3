"""Models of every family that `transformers` itself has saved, and what it reads of our exports.

Needs JAXLC_TRANSFORMERS_PYTHON, as tests/hf/test_transformers.py. Nothing is renamed: the files are
those of save_pretrained, of random models that transformers makes from the configs of
tests/hf/models.py.
"""

import functools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxlc
from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY
from jaxlc.checkpoints.pretrained import keep_description, load_pretrained
from jaxlc.checkpoints.save import Checkpoints
from jaxlc.config import to_dict
from jaxlc.config.models.families import FAMILIES
from jaxlc.step.language_model import LanguageModel
from tests.hf.comparison import needs_transformers, relative_error, run_jobs, step_of, tokens_of
from tests.hf.models import CASES

pytestmark = needs_transformers
NUM_TOKENS = 48
# Arguments of save_pretrained. Names of modules instead of those of files are also what
# state_dict() has.
OPTIONS = {
    "files": {},
    "modules": dict(save_original_format=False),
    "shards": dict(max_shard_size="20KB"),
}
WITH_ALIASES = [
    x
    for x in CASES
    if (y := FAMILIES[CASES[x].config["model_type"]]).tensor_aliases or y.joined_tensors
]
# Models around a language model: their model_type.
WRAPPER_TYPES = {x: FAMILIES[CASES[x].config["model_type"]].multimodal_type for x in CASES}
WRAPPERS = {
    case: WRAPPER_TYPES[case] for case in ("gemma3", "ministral3", "qwen3_5_hybrid", "qwen3_5_moe")
}
ALONE = {  # the same, or "" for a language model
    case: WRAPPER_TYPES[case] if CASES[case].wrapper else "" for case in CASES
}
SAVED = [(case, "files", ALONE[case]) for case in CASES]
SAVED += [(case, "modules", ALONE[case]) for case in WITH_ALIASES]
SAVED += [("gpt_oss", "shards", ""), ("olmo_hybrid", "shards", "")]
SAVED += [(case, "files", wrapper) for case, wrapper in WRAPPERS.items()]
SAVED += [("ministral3", "modules", "mistral3")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories and logits of transformers by (case, options, wrapper)."""
    root = tmp_path_factory.mktemp("saved")
    directories = {key: root / "-".join(key) for key in SAVED}
    jobs = {
        (case, options, wrapper): dict(
            job="save",
            config=CASES[case].config,
            tokens=tokens_of(NUM_TOKENS).tolist(),
            directory=str(directories[case, options, wrapper]),
            wrapper=wrapper,
            **OPTIONS[options],
        )
        for case, options, wrapper in SAVED
    }
    return {
        key: (directories[key], result["logits"]) for key, result in run_jobs(root, jobs).items()
    }


@functools.cache
def loaded(directory):
    step = step_of(directory, NUM_TOKENS, {})
    params, _ = load_pretrained(step)
    return step, params, LanguageModel(step, params, None).logits(tokens_of(NUM_TOKENS))


def test_saved_models_are_of_every_family():
    exported = {name for name, family in FAMILIES.items() if not family.exported_type}
    assert {CASES[case].config["model_type"] for case, *_ in SAVED} == exported
    wrappers = {wrapper for *_, wrapper in SAVED}
    assert wrappers == {"", *(family.multimodal_type for family in FAMILIES.values())}


@pytest.mark.parametrize(("case", "options", "wrapper"), SAVED)
def test_saved_model_has_the_logits_of_transformers(case, options, wrapper, saved):
    directory, expected = saved[case, options, wrapper]
    assert expected.std() >= 1
    assert relative_error(loaded(directory)[2], expected) <= 1e-4


def test_exports_of_saved_models_have_their_logits_in_transformers(saved, tmp_path):
    """A model with images is exported as such a model, and as its language model."""
    jobs, expected = {}, {}
    for (case, options, wrapper), (directory, logits) in saved.items():
        if options != "files":
            continue
        step, params, _ = loaded(directory)
        workdir = tmp_path / f"{case}-{wrapper}"
        checkpoints = Checkpoints(workdir / CHECKPOINTS_DIRECTORY, keep=1, warn=print)
        checkpoints.save(
            1, step.init(params), dict(step=1, next_row=0, corpus="", config=to_dict(step.config))
        )
        checkpoints.close()
        keep_description(step.config.model, workdir)
        for text_only in (False, True) if wrapper else (False,):
            out = jaxlc.export(workdir, f"{workdir}-{text_only}", dtype="fp32", text_only=text_only)
            before, after = (
                json.loads((path / "config.json").read_text()) for path in (directory, out)
            )
            key = case, wrapper, text_only
            assert text_only or before.keys() <= after.keys(), key
            if wrapper and not text_only:
                assert_same_tensors(out, directory)
                assert before["architectures"] == after["architectures"], key
            tokens = tokens_of(NUM_TOKENS).tolist()
            jobs[key] = dict(job="logits", directory=str(out), tokens=tokens)
            expected[key] = logits
    for key, result in run_jobs(tmp_path, jobs).items():
        assert relative_error(result["logits"], expected[key]) <= 1e-4, key


def assert_same_tensors(actual, expected):
    """Of two directories with files in float32: names and bits, except those of experts, which have aliases."""
    parts = ({}, {})
    for tensors, directory in zip(parts, (actual, expected)):
        for path in directory.glob("*.safetensors"):
            tensors |= {x: y for x, y in load_file(path).items() if ".experts." not in x}
    assert parts[0].keys() == parts[1].keys()
    assert any("vision" in name or "visual" in name for name in parts[0])
    for name, x in parts[1].items():
        np.testing.assert_array_equal(parts[0][name].view(np.uint8), x.view(np.uint8), name)
