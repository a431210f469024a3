"""The length of a run: in steps, tokens, or epochs of its data."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxlc.config import defaults, load
from jaxlc.config.frozen import Stage, to_dict
from jaxlc.config.schema import TrainConfig
from jaxlc.core.errors import UserError
from jaxlc.data import data_sources
from jaxlc.train.reports.manifest import stored_settings
from jaxlc.train.reports.metrics import METRICS_FILE, read_rows
from tests.train.runs import train, write_config

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")


def test_train_tokens_are_rounded_up_to_steps():
    config = defaults()
    config.data.seq_len, config.train.global_batch_size, config.train.tokens = 128, 2, 1000
    loaded = load(config)
    assert (loaded.train.steps, loaded.train.tokens) == (4, 0)
    assert load(loaded) == loaded


@pytest.mark.parametrize(
    "lengths, problem",
    [
        (dict(steps=7, tokens=9), r"config\.train\.steps=7 and config\.train\.tokens=9 are set"),
        (
            dict(steps=100, tokens=9),
            r"config\.train\.steps=100 and config\.train\.tokens=9 are set",
        ),
        (dict(steps=100, epochs=2.0), r"steps=100 and config\.train\.epochs=2\.0 are set"),
        (dict(steps=7, epochs=2.0), r"train\.steps=7 and config\.train\.epochs=2\.0 are set: keep"),
        (dict(steps=0, tokens=9, epochs=2.0), r"train\.tokens=9 and config\.train\.epochs=2\.0"),
        (dict(steps=0), r"invalid value 0 for config\.train\.steps: expected at least 1"),
    ],
)
def test_two_lengths_or_none_are_refused(lengths: dict, problem: str):
    config = defaults()
    config.train.update(lengths)
    with pytest.raises(UserError, match=problem):
        load(config)


def test_loaded_config_of_epochs_loads_again():
    config = defaults()
    config.train.epochs = 2.0
    loaded = load(config)
    assert load(loaded) == load(ConfigDict(to_dict(loaded))) == loaded
    assert load(defaults()).train.steps == TrainConfig().steps


def test_epochs_of_a_mixture_end_before_a_source_repeats(tmp_path: Path):
    for name, count in (("a", 40), ("b", 12)):
        lines = (json.dumps(dict(text=f"{name} {i} " * 9)) for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = defaults()
    config.data.update(seq_len=64, sources=(), cache_dir=str(tmp_path / "cache"))
    config.data.mixture = {
        name: dict(paths=str(tmp_path / f"{name}.jsonl"), share=0.5) for name in "ab"
    }
    config.train.update(global_batch_size=4, epochs=1.5)
    stage = Stage(name="", config=load(config))
    source = data_sources.open(stage.config, is_trained=False)
    epoch = source.train.num_sequences
    resolved = data_sources.with_epochs(stage, source).config.train
    assert (resolved.steps, resolved.epochs) == (int(np.ceil(1.5 * epoch / 4)), 0)
    # In one epoch, no source has more sequences than it consists of.
    assert all(share.num_epochs <= 1 for share in source.shares(epoch))
    assert any(share.num_epochs > 1 for share in source.shares(epoch + 2))


def test_run_of_epochs_stores_its_steps_and_resumes(tmp_path: Path):
    config, workdir = write_config(tmp_path), tmp_path / "run"
    lengths = dict(train__steps=0, train__epochs=0.5, train__eval_every_steps=0)
    lengths |= dict(model__num_layers=1, mesh__context=1, mesh__tensor=1, mesh__data=8)
    lengths |= dict(train__global_batch_size=8, train__eval_sequences=8)
    output = train(config, workdir, **lengths)
    (steps,) = re.findall(r"this run: (\d+) steps?, 0\.5", output)
    assert (
        stored_settings(workdir)["train.steps"]
        == int(steps)
        == read_rows(workdir / METRICS_FILE)[-1]["step"]
    )
    assert f"already trained to step {steps}" in train(config, workdir, **lengths)
