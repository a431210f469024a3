"""Prints the largest relative errors of shared prefixes against separate rows, with the training
step in float64.

    python -m tests.step.float64_parity [--all]

It runs in a process of its own: before the package is imported, float32 is replaced by float64. So
the errors that are left are those of the algorithm, not of rounding.
"""

import sys

import jax
import jax.numpy as jnp

import tests.conftest  # noqa: F401  simulated devices

jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64

import numpy as np  # noqa: E402

from tests.step import test_policy_loss as policy_loss  # noqa: E402
from tests.step.synthetic import without_padding  # noqa: E402
from tests.tolerances import max_relative_error  # noqa: E402

CASES = [
    ("grpo", "recurrent tiles", dict(context=4, tensor=2), {}),
    ("", "sliding tiles", dict(context=4), dict(strategy="hybrid", ulysses_degree=2)),
]
MORE = [  # with --all
    ("grpo", "recurrent", dict(context=4, tensor=2), {}),
    ("grpo", "latent tiles", dict(context=4), dict(strategy="hybrid", ulysses_degree=2)),
    ("dapo", "sliding", dict(context=2), {}),
    ("dpo", "lora", dict(context=2), dict(strategy="all_gather")),
]


def main() -> None:
    for loss, kinds, mesh, attention in [*CASES, *(MORE if sys.argv[1:] == ["--all"] else [])]:
        params, gradients, expected = policy_loss.separate_rows(loss, kinds)
        config = policy_loss.config_with(
            loss, **policy_loss.KINDS[kinds], mesh=mesh, attention=attention
        )
        _, got, got_loss = policy_loss.results(config, loss, params)
        assert all(x.dtype == np.float64 for x in (got_loss, *jax.tree.leaves(got)))
        errors = jax.tree.map(
            lambda a, b: max_relative_error(without_padding(a, b), b), got, gradients
        )
        print(
            loss,
            kinds,
            max_relative_error(got_loss, expected),
            max(jax.tree.leaves(errors)),
            flush=True,
        )


if __name__ == "__main__":
    main()
