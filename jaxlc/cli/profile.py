"""usage: jaxlc profile TRACE [--plan=FILE] [--topology=GPU:DOMAINSxGPUS]

Compares a trace of training steps with the plan's estimate, by class of kernels and by ring step.
Trace the steps with --config.profile.steps=10:13; the trace is then in WORKDIR/profile.
"""

import functools
import os
from dataclasses import dataclass

from jaxlc.cli.flags import check_output_file, write_json
from jaxlc.config.command_line import ParsedCommand, VerbFlags, run_main


@dataclass(frozen=True, kw_only=True)
class Flags(VerbFlags):
    positional = ("trace",)

    trace: str  # WORKDIR/profile, a trace directory, or a .xplane.pb file
    plan: str = ""  # JSON file of jaxlc plan --json; default: that of the traced step
    topology: str = ""  # GPUs of the run, such as h100:1x8; default: as recorded
    constants: str = ""  # JSON file of measured constants, as for jaxlc plan
    steps: int = 0  # number of traced steps; 0: as recorded
    json: str = ""  # output file for the comparison as JSON


def _compare(command: ParsedCommand[Flags]) -> int:
    flags = command.flags
    if flags.json:
        check_output_file("json", flags.json)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["JAX_PLATFORMS"] = "cpu"  # no GPU is needed to read a trace
    from jaxlc.profile import compare

    result = compare(
        flags.trace,
        plan=flags.plan,
        topology=flags.topology,
        constants=flags.constants,
        num_steps=flags.steps,
    )
    print(result)
    if flags.json:
        write_json(flags.json, result.to_json())
    return 0


# (argv, program name first) -> exit status
main = functools.partial(run_main, _compare, description=__doc__, flags=Flags)
