"""Compares gradients and AdamW with those of torch and transformers, in float64; for
tests/hf/test_transformers.py.

    python -m tests.hf.float64_parity CASES.json

CASES.json is a list of `directory` (a model in float32), `mesh`, `num_tokens`, `gradients`,
`batches`, `optimizer` (fields of config.optimizer) and `trained`; `gradients` and `trained` are the
.npz files of the jobs `gradients` and `train` in float64. Prints a JSON object for each case:

    logits     their largest relative error
    gradients  the largest relative error of the gradient of a parameter, and its name
    updated    the largest error of a parameter after the first step, divided by the learning rate, and its name
    losses     the largest relative error of the loss of a step

It runs in a process of its own: before the package is imported, float32 is replaced by float64. So
the errors that are left are those of the algorithm, not of rounding.
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

from jaxlc.checkpoints.pretrained import load_pretrained  # noqa: E402
from tests.hf.comparison import batch_of, by_names_in_files, errors_of, step_of  # noqa: E402
from tests.hf.models import CHOICE_BIAS  # noqa: E402


def main(cases_path: str) -> None:
    for case in json.loads(Path(cases_path).read_text()):
        step = step_of(
            Path(case["directory"]), case["num_tokens"], case["mesh"], optimizer=case["optimizer"]
        )
        params = jax.tree.map(lambda x: x.astype(np.float64), load_pretrained(step)[0])
        errors = errors_of(step, params, dict(np.load(case["gradients"])), case["num_tokens"])
        result = dict(logits=float(errors.pop("logits")), gradients=_largest(errors))
        print(
            json.dumps(result | _errors_of_training(step, params, case)),
            flush=True,
        )


def _errors_of_training(step, params, case: dict) -> dict:
    expected, state, losses, errors = np.load(case["trained"]), step.init(params), [], {}
    for tokens in case["batches"]:
        state, metrics = step.jitted(state, batch_of(step, np.array(tokens)))
        losses.append(float(metrics.loss))
        if not errors:
            for name, array in by_names_in_files(step, state.params).items():
                if name.endswith(CHOICE_BIAS):  # no parameter
                    continue
                error = np.abs(array - expected[f"updated/{name}"]).max()
                errors[name] = error / case["optimizer"]["learning_rate"]
    return dict(
        updated=_largest(errors), losses=np.abs(np.array(losses) / expected["losses"] - 1).max()
    )


def _largest(errors: dict[str, float]) -> list:
    name = max(errors, key=errors.__getitem__)
    return [float(errors[name]), name]


if __name__ == "__main__":
    main(sys.argv[1])
