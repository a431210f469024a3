"""The text of resolved settings, read back as a config file."""

import dataclasses

import pytest

from jaxlc.config import Stage, load_stages, read_config
from jaxlc.config.files import config_text


def stages_without_tokens(stages: tuple[Stage, ...]) -> list[Stage]:
    """With the length in steps only."""
    return [dataclasses.replace(stage, tokens=0, steps=stage.num_steps) for stage in stages]


def with_other_stages():
    """Stages with other sources, seeds, schedules and gates than the first one."""
    config = read_config("quickstart")
    config.model.update(layer_kinds="full,wide", kinds=dict(wide=dict(head_dim=64)))
    books, code = (
        dict(name="books", paths=("books",), min_tokens=5),
        dict(name="code", paths=("a", "b")),
    )
    config.data.mixture = [books, code]
    config.stages = [
        dict(name="one", tokens=500_000, max_eval_loss=9.5),
        dict(
            name="two",
            steps=7,
            schedule="continue",
            data=dict(mixture=[books, code | dict(share=0.5)]),
        ),
        dict(name="three", steps=2, data=dict(seed=0, seq_len=8192), model=dict(rope_theta=1e6)),
        dict(
            name="four",
            steps=2,
            optimizer_state="reset",
            data=dict(mixture=[books]),
            optimizer=dict(warmup_steps=1),
        ),
        dict(name="five", steps=1, data=dict(sources=("texts",))),
    ]
    return config


@pytest.mark.parametrize(
    "name", ["quickstart", "sft_128k:mini", "lora_1m_1gpu", "extend_512k:mini", "retrieval", ""]
)
def test_config_text_read_again_gives_equal_stages(name, tmp_path):
    stages = load_stages(read_config(name) if name else with_other_stages())
    path = tmp_path / "settings.py"
    path.write_text(config_text(stages))
    again = load_stages(read_config(str(path)))
    assert stages_without_tokens(again) == stages_without_tokens(stages)
    assert config_text(again) == path.read_text()
