"""The verbs for the stored weights of a run: `checkpoint` and `export`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jaxlc
from jaxlc.cli.flags import import_jax
from jaxlc.config.command_line import ParsedCommand, VerbFlags
from jaxlc.config.models.config_json import is_own_format
from jaxlc.config.models.pretrained import CONFIG_FILE, read_json
from jaxlc.config.values import Above0
from jaxlc.core import UserError, aligned, progress_lines
from jaxlc.core.files import displayed, local_path


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags(VerbFlags):
    """usage: jaxlc checkpoint ls WORKDIR
           jaxlc checkpoint verify WORKDIR [--steps=STEP,...]
           jaxlc checkpoint rm WORKDIR [--steps=STEP,...] [--incomplete]

    ls lists the checkpoints of a run, with their size, the held-out loss of their step, and what is
    incomplete or was unreadable. verify reads all arrays of the checkpoints, in host memory and one at
    a time, and compares them with their checksums; its exit status is 1 if one of them is damaged. rm
    deletes the checkpoints of these steps, after it has read the latest one that is kept, and with
    --incomplete what killed runs have left. No accelerator is used.
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
    kept = set(committed_steps(directory)) - set(flags.steps)
    if flags.steps and not kept:
        raise UserError(
            f"these are all checkpoints of the run: keep one, or delete the directory {displayed(directory)}"
        )
    with no_run_in(directory.parent):
        if flags.steps:
            _check_one_is_valid(directory, sorted(kept, reverse=True))
        paths = [directory / str(step) for step in dict.fromkeys(flags.steps)]
        paths += leftovers(directory) if flags.incomplete else []
        for path in paths:
            remove(path)
    print(f"deleted {', '.join(path.name for path in paths) or 'nothing'}")
    return 0


def _check_one_is_valid(directory: Path, steps: Sequence[int]) -> None:
    """Raises UserError if no checkpoint of these steps is valid; it reads them until one is."""
    from jaxlc.checkpoints.files import problem_of

    problems = []
    for step in steps:
        with progress_lines(f"reading step {step}, which is kept"):
            problem = problem_of(directory / str(step))
        if problem is None:
            return
        problems.append(f"step {step}: {problem}")
    raise UserError(
        f"no checkpoint that would be kept is valid ({'; '.join(problems)}): keep another one"
    )


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
