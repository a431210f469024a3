"""The choice of the next token from its logits."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxlc.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Raises:
      UserError: a value is out of range.
    """

    temperature: float = 0.0  # logits are divided by it; up to 1e-5: the token with the largest logit (greedy)
    top_p: float = 1.0  # sample from the smallest set of tokens with at least this probability (Holtzman et al. 2020)
    seed: int = 0
    # Log-probabilities are those of the logits divided by the temperature; False: of the logits.
    scales_log_probs: bool = False

    @property
    def is_greedy(self) -> bool:
        """Quotients of a smaller temperature than 1e-5 may not fit float32."""
        return self.temperature <= 1e-5

    def __post_init__(self):
        if not self.temperature >= 0:
            raise UserError(f"invalid value {self.temperature} for temperature: expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"invalid value {self.top_p} for top_p: expected more than 0 and at most 1")
        if self.top_p < 1 and self.is_greedy:
            raise UserError(
                f"top_p={self.top_p} has no effect with temperature={self.temperature}, which is greedy; set a"
                " temperature, such as 0.7"
            )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"invalid value {self.seed} for seed: expected 0 to 2^32 - 1")


@partial(jax.jit, static_argnames=("greedy", "scales_log_probs"))
def choose_tokens(
    logits_BV: jax.Array,
    seed: jax.Array,
    indices_B: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    greedy: bool,
    scales_log_probs: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(tokens_B int32, their log-probabilities_B before top-p, float32, at temperature 1 or that of sampling).

    The random numbers depend on the seed, the index of the sequence and the position only, so that a sequence gets the
    same tokens in any batch and on any mesh.

    Args:
      logits_BV: float32.
      indices_B: int32 [2, B]: the index of each sequence among the prompts, and the position of the token.
    """
    log_probs_BV = jax.nn.log_softmax(logits_BV / temperature if scales_log_probs else logits_BV)
    if greedy:
        tokens_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    else:
        tokens_B = jax.vmap(partial(_sample, jax.random.key(seed)), in_axes=(0, 0, 0, None, None))(
            logits_BV, *indices_B, temperature, top_p
        )
    return tokens_B, jnp.take_along_axis(log_probs_BV, tokens_B[:, None], axis=1)[:, 0]


def _sample(key: jax.Array, logits_V: jax.Array, sequence: jax.Array, position: jax.Array, temperature, top_p):
    key = jax.random.fold_in(jax.random.fold_in(key, sequence), position)
    probs_V = jax.nn.softmax(logits_V / temperature)
    order_V = jnp.argsort(-probs_V)
    sorted_V = probs_V[order_V]
    before_V = jnp.cumsum(sorted_V) - sorted_V  # probability of the more likely tokens
    sorted_V = jnp.where(before_V < top_p, sorted_V, 0.0)
    return order_V[jax.random.categorical(key, jnp.log(sorted_V))].astype(jnp.int32)
