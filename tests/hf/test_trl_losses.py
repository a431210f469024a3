"""Losses of post-training against those of TRL, on random log-probabilities.

Needs JAXLC_TRANSFORMERS_PYTHON, as tests/hf/test_transformers.py.
"""

import itertools
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
    POLICY | dict(loss="cispo", clip_high=0.1),
    POLICY | dict(loss="cispo", ratio="sequence", kl=0.1),
    dict(loss="dpo", beta=0.1),
    dict(loss="dpo", beta=0.7),
    dict(loss="simpo", beta=2.0, target_margin=0.5),
    dict(loss="simpo", beta=0.3, target_margin=0.2, label_smoothing=0.1),
    dict(loss="kto", beta=0.1),
    dict(loss="kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.8),
    dict(loss="apo_zero_unpaired", beta=0.3, undesirable_weight=0.8),
]
# Each mode with each loss, and each other setting with several of them. Limits cut some tokens and
# some answers.
LIMITS = dict(token=(0.7, 1.3), sequence=(0.4, 2.5))
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
VARIANTS = (
    dict(),
    dict(delta=1.5),
    dict(off_policy_mask_threshold=0.05),
    dict(old_log_probs="policy"),
    dict(ratio="sequence", kl=0.1),
    dict(old_log_probs="policy", off_policy_mask_threshold=0.05, weight_min=0.0),
    dict(weight_max=0.0, kl=0.1),
)
for number, (loss, mode) in enumerate(
    itertools.product(("grpo", "dapo", "dr_grpo", "cispo"), ("", *MODES))
):
    for variant in (VARIANTS[number % len(VARIANTS)], VARIANTS[(number + 3) % len(VARIANTS)]):
        case = POLICY | dict(loss=loss, max_answer_tokens=20 * (loss == "dr_grpo"))
        if mode:
            low, high = LIMITS[mode.split("_")[0]]
            case |= dict(importance_weights=True, weight_mode=mode, weight_min=low, weight_max=high)
        case |= {name: x for name, x in variant.items() if mode or not name.startswith("weight")}
        if loss == "cispo":
            case.pop("delta", None)
        CASES.append(case)


def arrays() -> dict[str, np.ndarray]:
    """[answers, tokens], float64, in which terms that cancel leave no difference."""
    rng = np.random.default_rng(0)
    mask = (np.arange(WIDTH) < np.array(LENGTHS)[:, None]).astype(np.int64)
    log_probs, old, reference, noise = (rng.normal(-2, 0.4, mask.shape) for _ in range(4))
    # answers of both signs are above the threshold of the off-policy mask
    signs = np.resize([1, -1, -1, 1], len(LENGTHS))
    advantages = np.abs(rng.normal(size=len(LENGTHS))) * signs
    log_probs = dict(log_probs=log_probs, old=old, sampled=old + noise + 2, reference=reference)
    return log_probs | dict(mask=mask, advantages=advantages)


def loss_and_gradient(settings: PosttrainConfig, x: dict[str, np.ndarray]):
    """The loss, and its gradient with respect to the log-probabilities; the answers of a pair are
    in one sequence, and so are a labeled answer and a mismatched one.
    """
    is_pairwise, is_labeled = settings.is_pairwise, settings.is_labeled
    num_rows = len(LENGTHS) // 2 if is_pairwise else len(LENGTHS)

    def rows(x, other=None):
        if is_labeled:
            return jnp.concatenate([x, 0 * x if other is None else other], 1)
        if is_pairwise:
            return x.reshape(2, num_rows, WIDTH).swapaxes(0, 1).reshape(num_rows, -1)
        return x

    mask = x["mask"].astype(np.float64)
    sides = np.repeat([1.0, -1.0], num_rows) if is_pairwise else x["advantages"]
    sides = np.sign(sides) if is_labeled else sides
    segments = (
        np.repeat(np.arange(1, len(LENGTHS) + 1), WIDTH).reshape(-1, WIDTH) if is_pairwise else mask
    )
    others = ("old", "sampled") if settings.beta < 0.2 else ("sampled", "old")
    shares = mask / mask.sum(1, keepdims=True)
    batch = Batch(
        None, None, rows(mask), None, rows(segments * mask, 2 * mask).astype(np.int32),
        prefix_ids=rows(mask).astype(np.int32)[..., None],
        advantages=rows(sides[:, None] * mask),
        answer_weights=rows(shares, shares),
        old_log_probs=rows(x["old"]),
        sampled_log_probs=rows(x["sampled"]),
        reference_log_probs=rows(x["reference"], x[others[1]]),
    )  # fmt: skip
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(log_probs):
        return policy_sums(rows(log_probs, x[others[0]]), batch, settings).loss / denominator(
            batch, settings
        )

    return jax.tree.map(np.asarray, jax.value_and_grad(loss)(jnp.asarray(x["log_probs"])))


@pytest.fixture(scope="module")
def trl_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    inputs, out = (tmp_path_factory.mktemp("trl") / name for name in ("inputs.npz", "out.npz"))
    np.savez(inputs, **arrays())
    script = Path(__file__).with_name("trl_losses.py")
    command = [PYTHON, script, inputs, out, json.dumps(CASES)]
    assert subprocess.run(command).returncode == 0
    return dict(np.load(out))


def name_of(number: int) -> str:
    """The settings that differ from POLICY."""
    case = CASES[number]
    return ",".join(f"{name}={x}" for name, x in case.items() if POLICY.get(name) != x)


@pytest.mark.parametrize("number", range(len(CASES)), ids=name_of)
def test_loss_and_gradient_equal_trl(trl_results, number):
    with jax.enable_x64(True):
        loss, gradient = loss_and_gradient(PosttrainConfig(**CASES[number]), arrays())
    expected, expected_gradient = (trl_results[f"{x}{number}"] for x in ("loss", "gradient"))
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    largest = np.abs(expected_gradient).max()
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-12 * largest)
