"""The configs of configs/recipes: their devices, their published figures, and their mini variants."""

import dataclasses
import itertools
import re

import pytest

from jaxlc.config import PRESETS, load_stages, read_config
from jaxlc.config.command_line import parse
from jaxlc.config.files import shipped_configs
from jaxlc.core.errors import UserError
from jaxlc.train import loop
from tests.advice import advised, flags
from tests.train import runs

RECIPES = sorted(name for name, path in shipped_configs().items() if path.parent.name == "recipes")
SMALL_GPUS = {"qlora_8b_24gb": "rtx4090", "qlora_4b_t4": "t4"}
VARIANTS = {"olmo3_64k": ("", "32b")}  # others: ""


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_stages_match_their_topology(name):
    for variant in VARIANTS.get(name, ("",)):
        for stage in load_stages(read_config(f"{name}:{variant}")):
            gpus, domains, size = re.fullmatch(
                r"(\w+):(\d+)x(\d+)", stage.config.runtime.topology
            ).groups()
            assert stage.config.mesh.num_devices == int(domains) * int(size)
            assert gpus == SMALL_GPUS.get(name, "h100")
            assert (
                stage.config.train.eval_sequences
                % (stage.config.mesh.data * stage.config.mesh.fsdp)
                == 0
            )


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_mini_keeps_the_stages(name):
    stages, mini = load_stages(read_config(name)), load_stages(read_config(f"{name}:mini"))
    assert [stage.name for stage in stages] == [stage.name for stage in mini]
    for stage, small in zip(stages, mini):
        memory = dataclasses.replace(
            small.config.memory, tile_tokens=stage.config.memory.tile_tokens
        )
        assert (stage.config.attention, stage.config.memory) == (small.config.attention, memory)
        scaling = stage.config.model.rope.scaling
        # llama3 is that of the preset
        assert scaling in (small.config.model.rope.scaling, "llama3")
        assert stage.config.model.layer_kinds == small.config.model.layer_kinds
        assert stage.config.optimizer.schedule == small.config.optimizer.schedule
        assert stage.optimizer_state == small.optimizer_state
        assert bool(stage.config.lora.rank) == bool(small.config.lora.rank)
        assert small.config.runtime.simulated_devices == small.config.mesh.num_devices


def test_recipe_figures_are_those_of_the_sources():
    """Gao et al. 2024 (arXiv:2410.02660): 20B tokens in steps of 4M and 8M, and 1B. The report of
    Olmo 3: 50B, 100B.
    """
    prolong = load_stages(read_config("extend_512k"))
    assert [(stage.num_steps, stage.config.tokens_per_step) for stage in prolong] == [
        (5000, 2**22), (2500, 2**23), (250, 2**22)
    ]  # fmt: skip
    assert [stage.config.optimizer.learning_rate for stage in prolong] == [1e-5, 5e-6, 2e-5]
    assert [stage.config.model.rope.theta for stage in prolong] == [8e6, 1.28e8, 1.28e8]
    assert [stage.optimizer_state for stage in prolong] == ["carry", "carry", "reset"]
    (sft,) = load_stages(read_config("sft_128k"))
    assert (sft.num_steps, sft.config.tokens_per_step, sft.config.optimizer.learning_rate) == (
        250,
        2**22,
        2e-5,
    )
    for stage in (prolong[2], sft):
        assert [source.chat_field for source in stage.config.data.mixture] == ["messages"]
    for stage, full in zip(prolong[:2], (dict(), dict(books_512k=0.05, code_512k=0.15))):
        assert abs(sum(source.share for source in stage.config.data.mixture) - 1) < 1e-9
        full_length = (
            source for source in stage.config.data.mixture if source.pool == "full_length"
        )
        assert {source.name: source.share for source in full_length} == full
    (lora,) = load_stages(read_config("lora_1m_1gpu"))
    assert lora.config.lora.rank == 32 and lora.config.model.rope.factor == 128
    (ultralong,) = load_stages(read_config("extend_1m"))
    assert 1e9 <= ultralong.num_tokens < 1.01e9 and not ultralong.config.attention.document_mask
    for variant, tokens in (("", 50e9), ("32b", 100e9)):
        (olmo,) = load_stages(read_config(f"olmo3_64k:{variant}"))
        assert (
            abs(olmo.num_tokens / tokens - 1) < 0.001 and not olmo.config.optimizer.decay_embeddings
        )


# Of each set of kinds of layers one; the others are marked full.
SAMPLE = ("qwen2.5-7b", "gpt-oss-20b", "glm-4.7-flash", "olmo-hybrid-7b", "nemotron-3-nano-30b-a3b")


@pytest.mark.parametrize(
    "preset", [x if x in SAMPLE else pytest.param(x, marks=pytest.mark.full) for x in PRESETS]
)
def test_recipe_with_any_model_loads_with_the_values_that_its_error_names(preset):
    for name in RECIPES:
        arguments = ["jaxlc", f"--config={name}", f"--config.model.preset={preset}"]
        try:
            parse(arguments)
        except UserError as error:
            values = [flags(settings) for settings in advised(str(error))]
            parse([*arguments, *itertools.chain(*values)])


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_mini_trains(name, tmp_path):
    """Two steps of each stage; with another number of devices in a process of its own."""
    config = read_config(f"{name}:mini")
    if config.runtime.simulated_devices != 8:
        output = runs.train_elsewhere(
            f"{name}:mini", tmp_path / "run", train__steps=2, data__cache_dir=tmp_path / "cache"
        )
        assert config.rollouts.source or "held-out loss" in output
        return
    config.data.update(cache_dir=str(tmp_path / "cache"), eval_fraction=0.1)
    config.train.steps = 2
    config.stages = [stage.changed(steps=2) for stage in config.stages]
    result = loop.run(config, tmp_path / "run")
    assert result.step == 2 * max(1, len(config.stages))
    if config.rollouts.source:  # rollouts have no held-out sequences
        assert result.evaluation is None
    else:
        assert result.evaluation.loss > 0
