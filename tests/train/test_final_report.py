"""The summary and plots, also if the metrics are missing or hold losses that were not finite."""

import dataclasses
import json

import numpy as np
import pytest

from jaxlc.evals.document_loss import DocumentSums
from jaxlc.train.evaluation import ContextGain, Evaluation
from jaxlc.train.reports.run_report import write_report
from tests.helpers import png_size, record_figures
from tests.step.synthetic import documents_evaluation, small_config

ROW = dict(
    step=1, loss=5.0, tokens_per_second=10.0, step_seconds=1.0, grad_norm=1.0, learning_rate=0.1
)


@pytest.mark.parametrize(
    "rows, words",
    [
        (
            [
                dict(step=0, eval_loss=4.5),
                ROW,
                ROW | dict(step=2, loss=4.0),
                dict(step=2, eval_loss=2.0),
            ],
            [
                "trained         2 steps",
                "5.000 -> 4.000 nats",
                "4.500 -> 2.000, over",
                "10 tokens/s",
            ],
        ),
        (
            [
                ROW | dict(step=2, flops_per_second_documents=4e9, mfu_documents=0.25),
                dict(step=2, eval_loss=2.0),
            ],
            [
                "model FLOP/s    4 GFLOP/s (documents, 25.0% of the bf16 peak; median)",
                "training loss   5.000 nats",
                "held-out loss   2.000, over",
            ],
        ),
        (
            [
                dict(step=1, stage="a", eval_loss=4.5),
                ROW | dict(step=2, stage="b"),
                dict(step=2, stage="b", eval_loss=2.0),
            ],
            ["training loss   5.000 nats", "held-out loss   2.000, over"],
        ),
        ([], ["training loss   unknown", "held-out loss   2.000"]),
        (
            [ROW | dict(loss=None), dict(step=1, eval_loss=None)],
            ["training loss   unknown", "held-out loss   2.000"],
        ),
    ],
    ids=["two_evaluations", "one_evaluation", "two_stages", "no_rows", "not_finite"],
)
def test_write_report_prints_losses_and_saves_plots(tmp_path, monkeypatch, rows, words):
    figures = record_figures(monkeypatch)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_config()
    summary = write_report(tmp_path, 2, config.tokens_per_step * 2, _evaluation())
    assert all(word in summary for word in words), summary
    loss_axes, position_axes = figures[0].axes[0], figures[2].axes[0]
    drawn_losses = list(loss_axes.lines[0].get_ydata())
    assert drawn_losses == [row["loss"] for row in rows if row.get("loss") is not None]
    np.testing.assert_allclose(position_axes.lines[0].get_ydata(), [3.0, 170 / 90])
    assert all(
        png_size(tmp_path / name)[0] > 800
        for name in ("loss.png", "optimizer.png", "loss_by_position.png")
    )
    assert "context gain" not in summary


@pytest.mark.parametrize(
    "num_documents, words",
    [
        (6, "0.250 nats per token [0.250, 0.250], 6 documents"),
        (2, "token, 2 documents (fewer than 5: no interval)"),
    ],
)
def test_write_report_prints_context_gain_in_one_line(tmp_path, num_documents, words):
    config = small_config()
    (tmp_path / "metrics.jsonl").write_text("")
    weight = np.ones((num_documents, 1))
    gain = ContextGain(
        documents=DocumentSums(edges=np.array([512, 1024]), weight=weight, loss=0.25 * weight)
    )
    evaluation = dataclasses.replace(_evaluation(), context_gain=gain)
    [line] = [
        line
        for line in write_report(tmp_path, 2, config.tokens_per_step * 2, evaluation).splitlines()
        if line.startswith("context gain    0.250")
    ]
    assert (
        words in line
        and "full context against the last 256 to 511 tokens, beyond token 512" in line
    )


def _evaluation() -> Evaluation:
    """A document with a loss of 3 at position 0, and of 170 / 90 after it; 2.0 overall."""
    return documents_evaluation(
        np.array([0, 1, 96]), np.array([[3.0, 170 / 90]]), np.array([[10.0, 90.0]])
    )
