"""python -m jaxlc.train --config=FILE[:variant] [--config.a.b=value ...] [--workdir=DIR]"""

import sys

from jaxlc import runtime
from jaxlc.config.command_line import ParsedCommand, run_main


def main(command: ParsedCommand) -> int:
    """Returns the exit status: 0; 143 after SIGTERM, 130 after Ctrl-C; 1 at a loss that is not finite."""
    runtime.start(command.config.runtime)  # before anything imports jax
    from jaxlc.train import loop

    try:
        config_path = ":".join(filter(None, [command.config_path, command.variant]))
        return loop.run(command.config, command.workdir, config_path=config_path).exit_status
    except loop.TrainingStopped as stopped:
        print(f"error: {stopped}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from the newest checkpoint in {command.workdir}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv, description=__doc__))
