"""The verbs of a training run: `train`, what checks its machines and its data before it starts, what
compares its trace with the plan, and `checkpoint` and `export` for its stored weights.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import jaxlc
from jaxlc.cli.flags import check_output_file, import_jax
from jaxlc.config.command_line import ConfigFlags, ParsedCommand, VerbFlags, run_main
from jaxlc.config.models.config_json import is_own_format
from jaxlc.config.models.pretrained import CONFIG_FILE, read_json
from jaxlc.config.values import Above0, From1
from jaxlc.core import UserError, aligned, errors, print_to_stderr, progress_lines, text
from jaxlc.core.files import (
    displayed,
    full_disk_explained,
    local_path,
    make_writable,
    replacing,
    write_json,
)
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
    print("\n".join([report_text(list(views.values()), stages), *[""] * bool(details), *details]))
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


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags(VerbFlags):
    """usage: jaxlc checkpoint ls WORKDIR
           jaxlc checkpoint verify WORKDIR [--steps=STEP,...]
           jaxlc checkpoint rm WORKDIR [--steps=STEP,...] [--incomplete]

    ls lists the checkpoints of a run, with their size, the held-out loss of their step, and what is
    incomplete or was unreadable. verify reads all arrays of the checkpoints, in host memory and one at
    a time, and compares them with their checksums; its exit status is 1 if one of them is damaged. rm
    deletes the checkpoints of these steps, but never all of them, and with --incomplete what killed
    runs have left. No accelerator is used.
    """

    positional = ("action", "workdir")

    action: Literal["ls", "verify", "rm"]  # ls, verify or rm
    workdir: str  # workdir of the run
    steps: tuple[int, ...] = ()  # verify, rm: steps of the checkpoints; default of verify: all
    incomplete: bool = False  # rm: delete what killed runs have left, and what was unreadable


def run_checkpoint(command: ParsedCommand[CheckpointFlags]) -> int:
    actions = {"ls": _list, "verify": _verify, "rm": _remove}
    flags = command.flags
    if flags.action == "ls" and flags.steps:
        raise UserError("--steps has no effect on ls: remove it")
    if flags.action != "rm" and flags.incomplete:
        raise UserError(f"--incomplete has no effect on {flags.action}: remove it, or use rm")
    os.environ["JAX_PLATFORMS"] = "cpu"
    import_jax()
    from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY, existing_step

    directory = local_path(flags.workdir).absolute() / CHECKPOINTS_DIRECTORY
    for step in flags.steps:
        existing_step(directory, step)
    return actions[flags.action](directory, flags)


def _list(directory: Path, flags: CheckpointFlags) -> int:
    from jaxlc.checkpoints.files import existing_step, leftovers, stored_checkpoints

    unfinished = leftovers(directory)
    if not unfinished:
        existing_step(directory, None)
    rows = [("step", "stage", "GiB", "written", "held-out loss", "")]
    for item in stored_checkpoints(directory):
        loss = "" if item.eval_loss is None else f"{item.eval_loss:.4f}"
        rows.append(
            (
                str(item.step),
                item.stage,
                f"{item.num_bytes / 2**30:.3f}",
                item.written,
                loss,
                item.problem,
            )
        )
    print("\n".join(aligned(rows, "rlrlrl")))
    for path in unfinished:
        print(
            f"{path.name}: incomplete or unreadable; `jaxlc checkpoint rm {flags.workdir} --incomplete` deletes it"
        )
    return 0


def _verify(directory: Path, flags: CheckpointFlags) -> int:
    from jaxlc.checkpoints.files import committed_steps, existing_step, problem_of

    existing_step(directory, None)
    num_damaged = 0
    for step in flags.steps or committed_steps(directory):
        with progress_lines(f"reading step {step}"):
            problem = problem_of(directory / str(step))
        num_damaged += problem is not None
        print(f"step {step}: {problem or 'valid'}", flush=True)
    return 1 if num_damaged else 0


def _remove(directory: Path, flags: CheckpointFlags) -> int:
    from jaxlc.checkpoints.files import committed_steps, existing_step, leftovers, no_run_in, remove

    if not flags.steps and not flags.incomplete:
        raise UserError(
            "nothing to delete: name checkpoints with --steps=STEP,..., or use --incomplete"
        )
    if not flags.incomplete:
        existing_step(directory, None)
    if flags.steps and not set(committed_steps(directory)) - set(flags.steps):
        raise UserError(
            f"these are all checkpoints of the run: keep one, or delete the directory {displayed(directory)}"
        )
    with no_run_in(directory.parent):
        paths = [directory / str(step) for step in dict.fromkeys(flags.steps)]
        paths += leftovers(directory) if flags.incomplete else []
        for path in paths:
            remove(path)
    print(f"deleted {', '.join(path.name for path in paths) or 'nothing'}")
    return 0


@dataclass(frozen=True, kw_only=True)
class ExportFlags(VerbFlags):
    """usage: jaxlc export WORKDIR OUT [--step=STEP] [--dtype=bf16] [--adapters] [--text_only]
           [--base=MODEL] [--push_to_hub=ORGANIZATION/NAME]

    Writes the weights of a run as a Hugging Face directory, which transformers and other programs open.
    Of a model with images, or with layers of multi-token prediction, it copies the parts that were not
    trained from the model that the run started from.
    It needs no accelerator, and host memory for the largest parameter, stacked over the layers.
    """

    positional = ("workdir", "out")
    interrupted = "interrupted; nothing was written"

    workdir: str  # workdir of the run
    out: str  # directory to write, which must not exist or be empty
    step: int | None = None  # checkpoint to export; default: the latest
    dtype: Literal["bf16", "fp32"] = "bf16"  # data type of the weights, bf16 or fp32
    max_shard_gb: Above0[float] = 5.0  # size limit of a file in GB
    # write the adapters of LoRA alone, for peft, in float32, instead of merging them
    adapters: bool = False
    # write the language model alone, without the parts that were not trained
    text_only: bool = False
    # a run with NF4: merge into the weights of this model, a directory or hub id, instead of the dequantized ones
    base: str = ""
    # upload the export to this model of the Hugging Face hub, with a model card
    push_to_hub: str = ""
    public: bool = False  # push_to_hub: a new model is public, instead of private


def run_export(command: ParsedCommand[ExportFlags]) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    target = jaxlc.export(**vars(command.flags))
    print(f"wrote {target}")
    if command.flags.push_to_hub:
        print(f"uploaded to {command.flags.push_to_hub}")
    if not command.flags.adapters and is_own_format(read_json(target / CONFIG_FILE)):
        print(
            "model_type jaxlc: no family of transformers has its layers; jaxlc reads it (config.model.init_from)"
        )
    return 0
