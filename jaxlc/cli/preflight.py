"""usage: jaxlc preflight --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]

Checks the machines of a run before it starts: versions, clocks, host names, limits, free memory and
disk, the shared file system, the speed of each device. Start it as the training command, with the
same launcher and arguments. Exit status 0: the run can start; 2: the reasons are printed.
"""

from collections.abc import Sequence
from typing import NoReturn

from jaxlc.cli.flags import import_jax
from jaxlc.config.command_line import ConfigFlags, ParsedCommand, run_main
from jaxlc.runtime import peers


def main(argv: Sequence[str]) -> NoReturn:
    """Runs the command line `argv`, program name first, and ends the process."""
    peers.exit_process(run(argv))


def run(argv: Sequence[str]) -> int:
    """`main` without the end of the process; returns the exit status."""
    return run_main(_check, argv, description=__doc__)


def _check(command: ParsedCommand[ConfigFlags]) -> int:
    import_jax()
    from jaxlc.preflight.check import check

    try:
        return check(command)
    except Exception as error:
        peers.report_failure(error)
        raise
