"""usage: jaxlc data report --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]
       jaxlc data show --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--num=3]

report prints the documents and tokens of each source by length, and the shares and epochs of the
run, and writes a picture of them to WORKDIR/data.png; of traces also groups, shared prefixes and
rewards. show prints documents, rendered chats, groups of traces and prompts of rollouts as the run
uses them, with the tokens that have a loss in green, or in brackets where the output has no colors.
Sources that are not tokenized yet are tokenized, as a run would do. JAX does not start.
"""

import functools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxlc.config.command_line import ConfigFlags, ParsedCommand, run_main
from jaxlc.config.values import From1
from jaxlc.core import errors
from jaxlc.core.errors import UserError
from jaxlc.core.files import displayed, full_disk_explained, make_writable, replacing
from jaxlc.core.text import did_you_mean, print_to_stderr

PLOT_FILE = "data.png"


@dataclass(frozen=True, kw_only=True)
class Flags(ConfigFlags):
    positional = ("action",)
    uses_devices = False

    action: str  # report or show
    # show: number of documents, prompts or groups of each source; default: 3
    num: From1[int] | None = None


def _run(command: ParsedCommand[Flags]) -> int:
    actions = {"report": _report, "show": _show}
    action = command.flags.action
    if action not in actions:
        raise UserError(f"unknown command {action!r}: {did_you_mean(action, actions)}")
    return actions[action](command)


def _show(command: ParsedCommand[Flags]) -> int:
    from jaxlc.data.examples import examples_of_stages

    examples = examples_of_stages(command.stages, command.flags.num or 3, print_to_stderr)
    _print_warnings(examples.warnings)
    print(examples.text(color=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    return 0


def _report(command: ParsedCommand[Flags]) -> int:
    if command.flags.num is not None:
        raise UserError("--num has no effect on report: remove it, or use show")
    from jaxlc.data.examples import open_shown
    from jaxlc.data.report import StageShares, report_text

    views, stages, warnings, details = {}, [], {}, {}
    for stage in command.stages:
        source = open_shown(stage.config, print_to_stderr)
        warnings |= dict.fromkeys(source.warnings)
        views |= {view.name: view for view in source.views()}
        details |= dict.fromkeys(source.details())
        stages.append(StageShares.of(stage, source))
    stages = [stage for stage in stages if stage.shares]
    _print_warnings(warnings)
    print("\n".join([report_text(list(views.values()), stages), *[""] * bool(details), *details]))
    if not stages:
        return 0
    if errors.is_installed("matplotlib"):
        from jaxlc.data.report_figure import report_figure

        path = Path(command.workdir) / PLOT_FILE
        advice = "use a different --workdir"
        make_writable(path.parent, advice)
        with (
            full_disk_explained(path.parent, lambda: f"free space, or {advice}"),
            replacing(path) as out,
        ):
            report_figure(list(views.values()), stages).savefig(out, format="png")
        print(f"\nplot  {displayed(path)}")
    else:
        print(f"\nplot skipped, matplotlib is not installed: {errors.install_hint('matplotlib')}")
    return 0


def _print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print_to_stderr(f"warning: {warning}")


# (argv, program name first) -> exit status
main = functools.partial(
    run_main,
    _run,
    description=__doc__,
    flags=Flags,
    interrupted="interrupted; tokenized sources are kept in config.data.cache_dir, and the same command resumes",
)
