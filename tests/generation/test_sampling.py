"""The choice of tokens: greedy, temperature, top-p, and independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.core.errors import UserError
from jaxlc.generation.sampling import Sampling, choose_tokens

LOGITS = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))


def draws(count: int, temperature: float, top_p: float) -> np.ndarray:
    """Frequencies of the four tokens."""
    logits_BV = jnp.broadcast_to(LOGITS, (count, 4))
    indices_B = np.stack([np.arange(count), np.zeros(count, int)])
    sampling = Sampling(temperature=temperature, top_p=top_p)
    tokens_B, _ = choose_tokens(logits_BV, 0, indices_B, sampling)
    return np.bincount(np.asarray(tokens_B), minlength=4) / count


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [
        (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]),
        (0.5, 1.0, np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365),
        (1.0, 0.75, [0.625, 0.375, 0, 0]),
        (1.0, 0.5, [1, 0, 0, 0]),
        (1.0, 1e-50, [1, 0, 0, 0]),
        (1.1e-5, 1.0, [1, 0, 0, 0]),
    ],
)
def test_frequencies_equal_probabilities(temperature, top_p, expected):
    count = 4000
    frequencies = draws(count, temperature, top_p)
    deviations = np.sqrt(np.array(expected) * (1 - np.array(expected)) / count)
    assert (np.abs(frequencies - expected) <= 4 * deviations).all(), frequencies


def test_greedy_takes_the_largest_and_reports_its_log_probability():
    tokens_B, log_probs_B = choose_tokens(LOGITS[None, ::-1], 0, np.zeros((2, 1), int), Sampling())
    assert tokens_B.tolist() == [3] and np.allclose(log_probs_B, np.log(0.5))


def test_temperature_near_zero_is_greedy():
    assert Sampling(temperature=1e-50).is_greedy and not Sampling(temperature=0.01).is_greedy


def test_token_of_a_sequence_does_not_depend_on_its_batch():
    logits_BV = jax.random.normal(jax.random.key(0), (8, 50))
    indices_B = np.stack([np.arange(8), np.arange(8) + 3])
    sampling = Sampling(temperature=1.0, top_p=0.9)
    together, _ = choose_tokens(logits_BV, 1, indices_B, sampling)
    alone, _ = choose_tokens(logits_BV[5:6], 1, indices_B[:, 5:6], sampling)
    assert together[5] == alone[0]
    rounded_BV = 1e-6 * logits_BV  # its negative has the opposite order, and equal probabilities
    tokens_B, others_B = (
        choose_tokens(x, 1, indices_B, Sampling(temperature=1.0))[0]
        for x in (rounded_BV, -rounded_BV)
    )
    assert tokens_B.tolist() == others_B.tolist()


@pytest.mark.parametrize(
    "values",
    [
        dict(temperature=-1.0), dict(top_p=0.0), dict(top_p=1.5), dict(temperature=float("nan")), dict(seed=-1),
        dict(seed=2**32),
    ],
)  # fmt: skip
def test_value_out_of_range_raises(values):
    with pytest.raises(UserError, match="invalid value"):
        Sampling(**values)


def test_top_p_of_greedy_choice_raises():
    with pytest.raises(
        UserError, match="top_p=0.5 has no effect with temperature=0.0, which is greedy"
    ):
        Sampling(top_p=0.5)
    assert Sampling(temperature=0.7, top_p=0.5).top_p == 0.5
