"""The verbs of a training run: `train`, what checks its machines and its data before it starts, and
what compares its trace with the plan.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from jaxlc.cli.flags import check_output_file, import_jax
from jaxlc.config.command_line import ConfigFlags, ParsedCommand, VerbFlags, run_main
from jaxlc.config.values import From1
from jaxlc.core import UserError, errors, print_to_stderr, text
from jaxlc.core.files import displayed, full_disk_explained, make_writable, replacing, write_json
from jaxlc.runtime import peers


@dataclass(frozen=True, kw_only=True)
class TrainFlags(ConfigFlags):
    """usage: jaxlc train --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]

    Trains a model. If the work directory has checkpoints, training resumes from the latest valid
    one.
    """

    interrupted = (
        "interrupted; the same command resumes from the latest checkpoint, if there is one"
    )


def train_main(argv: Sequence[str]) -> NoReturn:
    """Runs the command line `argv`, program name first, and ends the process."""
    text.outlast()
    peers.exit_process(run_main(train, argv, flags=TrainFlags))


def train(command: ParsedCommand[TrainFlags]) -> int:
    """Returns the exit status: 0; after SIGTERM 143, SIGHUP 129, Ctrl-C 130; 1 if a loss or
    gradient is not finite.
    """
    peers.set_restart_hint(lambda: _latest_checkpoint(Path(command.workdir)))
    try:
        return _train(command)
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


def _train(command: ParsedCommand[TrainFlags]) -> int:
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


@dataclass(frozen=True, kw_only=True)
class PreflightFlags(ConfigFlags):
    """usage: jaxlc preflight --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]

    Checks the machines of a run before it starts: versions, clocks, host names, limits, free memory and
    disk, the shared file system, the speed of each device. Start it as the training command, with the
    same launcher and arguments. Exit status 0: the run can start; 2: the reasons are printed.
    """


def preflight_main(argv: Sequence[str]) -> NoReturn:
    """Runs the command line `argv`, program name first, and ends the process."""
    peers.exit_process(run_main(run_preflight, argv, flags=PreflightFlags))


def run_preflight(command: ParsedCommand[PreflightFlags]) -> int:
    import_jax()
    from jaxlc.preflight.check import check

    try:
        return check(command)
    except Exception as error:
        peers.report_failure(error)
        raise


@dataclass(frozen=True, kw_only=True)
class DataFlags(ConfigFlags):
    """usage: jaxlc data report --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]
           jaxlc data show --config=NAME[:VARIANT] [--config.SECTION.KEY=VALUE ...] [--num=3]

    report prints the documents and tokens of each source by length, and the shares and epochs of the
    run, and writes a picture of them to WORKDIR/data.png; of traces also groups, shared prefixes and
    rewards. show prints documents, rendered chats, groups of traces and prompts of rollouts as the run
    uses them, with the tokens that have a loss in green, or in brackets where the output has no colors.
    Sources that are not tokenized yet are tokenized, as a run would do. JAX does not start.
    """

    positional = ("action",)
    uses_devices = False
    interrupted = "interrupted; tokenized sources are kept in config.data.cache_dir, and the same command resumes"

    action: Literal["report", "show"]  # report or show
    # show: number of documents, prompts or groups of each source; default: 3
    num: From1[int] | None = None


def run_data(command: ParsedCommand[DataFlags]) -> int:
    return (_report_data if command.flags.action == "report" else _show_data)(command)


def _show_data(command: ParsedCommand[DataFlags]) -> int:
    from jaxlc.data.report import examples_of_stages

    examples = examples_of_stages(command.stages, command.flags.num or 3, print_to_stderr)
    _print_warnings(examples.warnings)
    print(examples.text(color=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    return 0


def _report_data(command: ParsedCommand[DataFlags]) -> int:
    if command.flags.num is not None:
        raise UserError("--num has no effect on report: remove it, or use show")
    from jaxlc.data.report import StageShares, open_shown, report_figure, report_text

    views = {}
    stages = []
    warnings = {}
    details = {}
    for stage in command.stages:
        source = open_shown(stage.config, print_to_stderr)
        warnings |= dict.fromkeys(source.warnings)
        views |= {view.name: view for view in source.views()}
        details |= dict.fromkeys(source.details())
        stages.append(StageShares.of(stage, source))
    stages = [stage for stage in stages if stage.shares]
    _print_warnings(warnings)
    print(report_text(list(views.values()), stages))
    if details:
        print("", *details, sep="\n")
    if not stages:
        return 0
    if errors.is_installed("matplotlib"):
        path = Path(command.workdir) / "data.png"
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


@dataclass(frozen=True, kw_only=True)
class ProfileFlags(VerbFlags):
    """usage: jaxlc profile TRACE [--plan=FILE] [--topology=GPU:DOMAINSxGPUS]

    Compares a trace of training steps with the plan's estimate, by class of kernels and by ring step.
    Trace the steps with --config.profile.steps=10:13; the trace is then in WORKDIR/profile.
    """

    positional = ("trace",)

    trace: str  # WORKDIR/profile, a trace directory, or a .xplane.pb file
    plan: str = ""  # JSON file of jaxlc plan --json; default: a plan of the traced step
    topology: str = ""  # GPUs of the run, such as h100:1x8; default: as recorded
    constants: str = ""  # JSON file of measured constants, as for jaxlc plan
    steps: int = 0  # number of traced steps; 0: as recorded
    json: str = ""  # output file for the comparison as JSON


def run_profile(command: ParsedCommand[ProfileFlags]) -> int:
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
