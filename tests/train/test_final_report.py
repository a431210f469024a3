"""The summary, also where the metrics are gone or hold losses that were not finite."""

import json

import numpy as np
import pytest

from jaxlc.data import open_corpus
from jaxlc.train.evaluation import Evaluation, PositionSums
from jaxlc.train.final_report import write_report
from tests.train import runs
from tests.train.synthetic import small_config

ROW = dict(step=1, loss=5.0, tokens_per_second=10.0, step_seconds=1.0, grad_norm=1.0, learning_rate=0.1)


@pytest.fixture(scope="module")
def corpus_and_config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    runs.write_config(directory)
    data = dict(sources=(str(directory / "corpus"),), cache_dir=str(directory / "cache"), eval_fraction=0.3)
    config = small_config(data=data, model=dict(vocab_size=257))
    return open_corpus(config.data), config


@pytest.mark.parametrize(
    "rows, words",
    [
        ([ROW, ROW | dict(loss=4.0), dict(step=2, eval_loss=4.5)], ["5.000 -> 4.000", "4.500 -> 2.000", "10 tokens/s"]),
        ([], ["training loss   not known", "held-out loss   2.000"]),
        ([ROW | dict(loss=None), dict(step=1, eval_loss=None)], ["training loss   not known", "held-out loss   2.000"]),
    ],
    ids=["whole", "none", "not_finite"],
)
def test_summary_and_pictures(corpus_and_config, tmp_path, rows, words):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sums = PositionSums(np.array([10.0, 90.0]), np.array([30.0, 170.0]), np.array([100.0, 400.0]))
    corpus, config = corpus_and_config
    summary = write_report(tmp_path, config, corpus, Evaluation(2.0, np.array([0, 1, 96]), sums))
    assert all(word in summary for word in [*words, "unigram", "bigram"]), summary
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("loss.png", "loss_by_position.png"))
