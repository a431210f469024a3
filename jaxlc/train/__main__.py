"""python -m jaxlc.train --config=FILE[:variant] [--config.a.b=value ...] [--workdir=DIR]"""

import sys

from jaxlc.config.command_line import ParsedCommand, run_main


def main(command: ParsedCommand) -> int:
    from jaxlc.train import loop

    return loop.run(command.config, command.workdir).exit_code


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv, description=__doc__))
