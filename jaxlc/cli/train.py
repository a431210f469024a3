"""usage: jaxlc train --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]

Trains a model. If the work directory has checkpoints, training resumes from the latest valid one.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.core import text
from jaxlc.runtime import peers


def main(argv: Sequence[str]) -> NoReturn:
    """Runs the command line `argv`, program name first, and ends the process."""
    text.outlast()
    kept = "interrupted; the same command resumes from the latest checkpoint, if there is one"
    peers.exit_process(run_main(train, argv, description=__doc__, interrupted=kept))


def train(command: ParsedCommand) -> int:
    """Returns the exit status: 0; after SIGTERM 143, SIGHUP 129, Ctrl-C 130; 1 if a loss or
    gradient is not finite.
    """
    peers.set_restart_hint(lambda: _latest_checkpoint(Path(command.workdir)))
    try:
        return _run(command)
    except (
        KeyboardInterrupt
    ) as interrupt:  # before the first step, after the last, or a second Ctrl-C
        peers.report_failure(interrupt)
        raise KeyboardInterrupt(
            f"interrupted; {_latest_checkpoint(Path(command.workdir))}"
        ) from None
    except Exception as error:
        peers.report_failure(error)
        raise


def _run(command: ParsedCommand) -> int:
    stages = command.stages
    from jaxlc.train import loop
    from jaxlc.train.reports.step_reports import TrainingStopped

    try:
        return loop.run(stages, command.workdir, config_path=command.flags.config).exit_status
    except TrainingStopped as stopped:
        print(f"error: {stopped}", file=sys.stderr)
        return 1


def _latest_checkpoint(workdir: Path) -> str:
    from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY, committed_steps

    steps = committed_steps(workdir / CHECKPOINTS_DIRECTORY)
    if not steps:
        return f"there is no checkpoint in {workdir}"
    return f"the latest checkpoint in {workdir} is of step {steps[-1]}; run the same command again to resume from it"
