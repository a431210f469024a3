"""usage: python -m jaxlc.evals.harness --model_args path=SOURCE --tasks TASK,TASK [flags of `lm_eval run`]

Evaluates a run or a Hugging Face directory with lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).
Arguments of the model, as NAME=VALUE,NAME=VALUE: path, step, max_length, chat_template, seed, data, fsdp, context and
tensor.
"""

import sys
from collections.abc import Sequence

from jaxlc.core import extras
from jaxlc.core.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a UserError."""
    try:
        extras.require("lm_eval", "jaxlc.evals.harness")
        from lm_eval.__main__ import cli_evaluate

        from jaxlc.evals.harness_model import NAME

        sys.argv = [argv[0], "run", "--model", NAME, *argv[1:]]
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
