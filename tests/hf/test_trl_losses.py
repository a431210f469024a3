"""Losses of post-training against those of TRL, on random log-probabilities.

Needs JAXLC_TRANSFORMERS_PYTHON, as tests/hf/test_transformers.py.
"""

import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.config.schema import PosttrainConfig
from jaxlc.posttrain.losses import denominator, policy_sums
from jaxlc.step.batch import Batch
from tests.hf.comparison import PYTHON, needs_transformers

pytestmark = needs_transformers
# of answers; for dpo, the first half is chosen and the other rejected
LENGTHS = (5, 1, 9, 12, 3, 7, 12, 2)
WIDTH = max(LENGTHS)
POLICY = dict(
    old_log_probs="record", clip_low=0.2, clip_high=0.28, max_answer_tokens=0, kl=0.0, ratio="token"
)
CASES = [
    POLICY | dict(loss="grpo"),
    POLICY | dict(loss="grpo", ratio="sequence", kl=0.05),
    POLICY | dict(loss="dapo", kl=0.1),
    POLICY | dict(loss="dr_grpo", max_answer_tokens=20),
    dict(loss="dpo", beta=0.1),
    dict(loss="dpo", beta=0.7),
]


def arrays() -> dict[str, np.ndarray]:
    """[answers, tokens]"""
    rng = np.random.default_rng(0)
    mask = (np.arange(WIDTH) < np.array(LENGTHS)[:, None]).astype(np.int64)
    log_probs, old, reference = (
        rng.normal(-2, 0.4, mask.shape).astype(np.float32) for _ in range(3)
    )
    advantages = rng.normal(size=len(LENGTHS)).astype(np.float32)
    return dict(log_probs=log_probs, old=old, reference=reference, mask=mask, advantages=advantages)


def loss_and_gradient(settings: PosttrainConfig, x: dict[str, np.ndarray]):
    """The loss, and its gradient with respect to the log-probabilities; the answers of a pair are
    in one sequence.
    """
    num_rows = len(LENGTHS) // 2 if settings.loss == "dpo" else len(LENGTHS)

    def rows(x):
        return (
            x.reshape(2, num_rows, WIDTH).swapaxes(0, 1).reshape(num_rows, -1)
            if settings.loss == "dpo"
            else x
        )

    mask = x["mask"].astype(np.float32)
    sides = np.repeat([1.0, -1.0], num_rows) if settings.loss == "dpo" else x["advantages"]
    segments = (
        np.repeat(np.arange(1, len(LENGTHS) + 1), WIDTH).reshape(-1, WIDTH)
        if settings.loss == "dpo"
        else mask
    )
    batch = Batch(
        None, None, rows(mask), None, rows(segments * mask).astype(np.int32),
        prefix_ids=rows(mask).astype(np.int32),
        advantages=rows(sides[:, None] * mask),
        answer_weights=rows(mask / mask.sum(1, keepdims=True)),
        old_log_probs=rows(x["old"]),
        reference_log_probs=rows(x["reference"]),
    )  # fmt: skip
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(log_probs):
        return policy_sums(rows(log_probs), batch, settings).loss / denominator(batch, settings)

    return jax.value_and_grad(loss)(jnp.asarray(x["log_probs"]))


@pytest.fixture(scope="module")
def trl_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    inputs, out = (tmp_path_factory.mktemp("trl") / name for name in ("inputs.npz", "out.npz"))
    np.savez(inputs, **arrays())
    script = Path(__file__).with_name("trl_losses.py")
    subprocess.run([PYTHON, script, inputs, out, json.dumps(CASES)], check=True)
    return dict(np.load(out))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_loss_and_gradient_equal_trl(trl_results, number):
    loss, gradient = loss_and_gradient(PosttrainConfig(**CASES[number]), arrays())
    np.testing.assert_allclose(loss, trl_results[f"loss{number}"], rtol=1e-6)
    np.testing.assert_allclose(gradient, trl_results[f"gradient{number}"], rtol=1e-5, atol=1e-7)
