"""Compares a trace of training steps with the plan's estimate, by class of kernels and by ring step.

Trace the steps with --config.profile.steps=10:13; the trace is then in WORKDIR/profile. Untested on GPUs.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlc.core.errors import UserError
from jaxlc.profile import compare


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a UserError."""
    parser = argparse.ArgumentParser(prog="jaxlc profile", description=__doc__)
    parser.add_argument("trace", metavar="TRACE", help="WORKDIR/profile, a trace directory, or a .xplane.pb file")
    parser.add_argument("--plan", default="", help="JSON file of jaxlc plan --json; default: of the traced step")
    parser.add_argument("--topology", default="", help="GPUs of the run, such as h100:1x8; default: as recorded")
    parser.add_argument("--constants", default="", help="JSON file of measured constants, as for jaxlc plan")
    parser.add_argument("--steps", type=int, default=0, help="number of traced steps; default: as recorded")
    parser.add_argument("--json", default="", help="output file for the comparison as JSON")
    flags = parser.parse_args(argv[1:])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["JAX_PLATFORMS"] = "cpu"  # no GPU is needed to read a trace
    try:
        result = compare(
            flags.trace, plan=flags.plan, topology=flags.topology, constants=flags.constants, num_steps=flags.steps
        )
        print(result)
        if flags.json:
            _write(result.to_json(), Path(flags.json))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(values: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write --json={path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv))
