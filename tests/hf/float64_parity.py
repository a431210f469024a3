"""Compares logits and gradients with those of transformers, with jaxlc in float64; for tests/hf/test_transformers.py.

    python -m tests.hf.float64_parity CASES.json

CASES.json is a list of `directory` (a model in float32), `num_tokens`, `mesh`, and `expected`, the .npz file of a job
`gradients` in float64. Prints the largest relative error of each case, its name, and the error of the logits. It runs
in a process of its own: before the package is imported, float32 is replaced by float64. So the errors that are left are
those of the algorithm, not of rounding.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import tests.conftest  # noqa: F401  simulated devices

jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64

import numpy as np  # noqa: E402

from jaxlc.checkpoints.pretrained_params import load_pretrained  # noqa: E402
from tests.hf.comparison import errors_of, step_of  # noqa: E402


def main(cases_path: str) -> None:
    for case in json.loads(Path(cases_path).read_text()):
        step = step_of(Path(case["directory"]), case["num_tokens"], case["mesh"])
        params = jax.tree.map(lambda x: x.astype(np.float64), load_pretrained(step)[0])
        errors = errors_of(step, params, dict(np.load(case["expected"])), case["num_tokens"])
        worst = max(errors, key=errors.__getitem__)
        print(errors[worst], worst, errors["logits"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
