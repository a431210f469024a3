"""The comparison of loss curves: what its table and rows say of curves that are made up."""

import json

import numpy as np
import pytest

from benchmarks.loss_curves import compare, settings_of
from jaxlc.core.errors import UserError
from jaxlc.train.metrics import METRICS_FILE


def write_losses(path, losses):
    path.mkdir()
    rows = (json.dumps(dict(step=step, loss=loss)) for step, loss in enumerate(losses, 1))
    (path / METRICS_FILE).write_text("\n".join(rows) + "\n")


def test_differences_of_steps_and_of_their_means(tmp_path):
    """One step of 60 is 10% above, which is 0.5% of a mean of 20; the last 20 are 1% above."""
    reference = np.full(60, 2.0)
    losses = reference * np.r_[np.full(10, 1.0), 1.1, np.full(29, 1.0), np.full(20, 1.01)]
    write_losses(tmp_path / "bf16", reference)
    write_losses(tmp_path / "fp8", losses)
    table = compare(tmp_path)
    assert "| fp8 | 2.0200 | +1.00% | 1.00% | 10.00% |" in table
    of_bf16, of_fp8 = (json.loads(line) for line in (tmp_path / "precision.jsonl").read_text().splitlines())
    assert (of_bf16["largest_difference_of_means"], of_fp8["steps"]) == (0, 60)
    assert (tmp_path / "precision.png").stat().st_size > 10_000
    write_losses(tmp_path / "fp16", reference[:15])  # fewer than a mean is of: then it is of all
    assert "| fp8 | 2.0133 | +0.67% | 0.67% | 10.00% |" in compare(tmp_path)


def test_an_unknown_precision_is_a_sentence():
    with pytest.raises(UserError, match="no precision 'fp4' to compare; there are bf16, fp8"):
        settings_of("fp4")
