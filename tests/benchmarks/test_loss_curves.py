"""The comparison of loss curves: its table, rows and plot for synthetic curves."""

import json

import numpy as np
import pytest

from benchmarks.loss_curves import compare, expert_settings, precision_settings
from jaxlc.config import load, read_config, with_settings
from jaxlc.core.errors import UserError
from jaxlc.train.reports.metrics import METRICS_FILE
from tests.helpers import record_figures


def write_losses(path, losses):
    path.mkdir()
    rows = (json.dumps(dict(step=step, loss=loss)) for step, loss in enumerate(losses, 1))
    (path / METRICS_FILE).write_text("\n".join(rows) + "\n")


def test_compare_reports_differences_of_steps_and_means(tmp_path, monkeypatch):
    """One of 60 steps is 10% higher, which is 0.5% of a mean of 20; the last 20 steps are 1%
    higher.
    """
    figures = record_figures(monkeypatch)
    reference = np.full(60, 2.0)
    losses = reference * np.r_[np.full(10, 1.0), 1.1, np.full(29, 1.0), np.full(20, 1.01)]
    write_losses(tmp_path / "bf16", reference)
    write_losses(tmp_path / "fp8", losses)
    table = compare(tmp_path, ["bf16", "fp8"])
    assert "| fp8 | 2.0200 | +1.00% | 1.00% | 10.00% |" in table
    bf16, fp8 = (json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines())
    assert (bf16["largest_difference_of_means"], fp8["steps"]) == (0, 60)
    losses_axes, difference_axes = figures[0].axes
    assert [line.get_label() for line in losses_axes.lines] == ["bf16", "fp8"]
    fp8 = difference_axes.lines[1]
    assert list(fp8.get_xdata()) == list(range(20, 61)) and fp8.get_ydata()[-1] == pytest.approx(
        1.0
    )
    assert (
        losses_axes.get_ylabel() == "nats per token"
        and difference_axes.get_ylabel() == "over bf16, %"
    )
    assert (tmp_path / "curves.png").exists()
    # fewer steps than the window: the mean is over all steps
    write_losses(tmp_path / "fp16", reference[:15])
    assert "| fp8 | 2.0133 | +0.67% | 0.67% | 10.00% |" in compare(
        tmp_path, ["bf16", "fp8", "fp16"]
    )


def test_unknown_precision_raises_user_error():
    with pytest.raises(UserError, match="invalid 'fp4' for --precisions: expected bf16, fp8"):
        precision_settings(["fp4"])


def test_experts_have_as_many_active_parameters_as_the_dense_model():
    config = load(read_config("quickstart"))
    dense, *experts = (
        with_settings(config, settings) for settings in expert_settings(config).values()
    )
    routers = (
        2 * dense.model.num_layers * dense.model.model_dim * experts[0].model.experts.num_experts
    )
    for config in experts:
        num_router_flops = 3 * routers * config.tokens_per_step
        assert config.step_flops(0).products == dense.step_flops(0).products + num_router_flops
