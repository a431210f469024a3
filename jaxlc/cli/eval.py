"""usage: jaxlc eval SOURCE ... --lengths=TOKENS,TOKENS [--tasks=TASK,TASK]

Evaluates runs and Hugging Face directories at chosen context lengths: needle, passkey, RULER, loss
by position.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import jaxlc
from jaxlc.cli.flags import ModelFlags, import_jax, mesh_sizes
from jaxlc.config.checks.stage_checks import NEEDLE, eval_settings
from jaxlc.config.command_line import ParsedCommand, run_main
from jaxlc.config.schema import EvalSettings
from jaxlc.config.values import Tokens
from jaxlc.core.errors import UserError
from jaxlc.core.files import full_disk_explained, local_path, make_writable


@dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags, EvalSettings):
    positional = ("sources",)

    sources: tuple[str, ...]  # workdir of a run, Hugging Face directory or hub id; or several
    # needle, passkey, loss, ruler, or tasks of RULER, separated by commas
    tasks: tuple[str, ...] = (NEEDLE,)
    # context lengths in tokens, such as 4096,65536,1M; new tokens of the answer count
    lengths: tuple[Tokens, ...] = ()
    # directory of the results; default: SOURCE/evals, and runs/NAME/evals for a hub id
    out: str = ""
    step: tuple[int, ...] = ()  # checkpoints to use, separated by commas; default: the latest


def _evaluate(command: ParsedCommand[Flags]) -> int:
    """Evaluates all checkpoints of all sources and draws the figures."""
    flags = command.flags
    if not flags.lengths:
        raise UserError(
            "no --lengths: pass context lengths in tokens, such as --lengths=4096,65536"
        )
    if flags.simulated_devices:
        jaxlc.start(simulated_devices=flags.simulated_devices)
    settings = eval_settings(
        {field.name: getattr(flags, field.name) for field in fields(EvalSettings)}
    )
    import_jax()
    from jaxlc.evals.evaluate_run import check_before_loading, evaluate_run
    from jaxlc.evals.figures import draw_maps, draw_overlays
    from jaxlc.evals.predictions import comparison, step_directories

    for source in flags.sources:
        check_before_loading(source, settings)
    outs, scores, directories = (
        _directories(flags.sources, flags.out),
        dict[str, list](),
        dict[str, Path](),
    )
    report = functools.partial(print, flush=True)
    for source, name, out in zip(flags.sources, _names(flags.sources), outs, strict=True):
        with full_disk_explained(out, _kept):
            for step in flags.step or [None]:
                result = jaxlc.load(source, step=step, mesh=mesh_sizes(flags.mesh))
                label = name if result.is_pretrained else f"{name} step-{result.step}"
                if len(flags.sources) > 1 or len(flags.step) > 1:
                    print(label)
                scores[label] = evaluate_run(
                    result, settings, out, report, chat_template=flags.chat_template
                )
                _print_figures(draw_maps(scores[label], out))
                directories[label] = out / f"step-{result.step}"
    if len(scores) > 1:
        print("\n".join(["", *comparison(scores), ""]))
    if len(flags.sources) == 1 and not result.is_pretrained:
        # earlier evaluations as well
        directories = {path.name: path for path in step_directories(outs[0])}
    figures = local_path(flags.out) if flags.out else outs[0]
    with full_disk_explained(figures, _kept):
        _print_figures(draw_overlays(directories, figures))
    return 0


def _kept() -> str:
    return "finished predictions are kept; free space, then run the same command again to continue"


def _directories(sources: Sequence[str], out: str) -> list[Path]:
    """The directory of the results of each source: SOURCE/evals or, with `out`, a directory in it
    if there are several sources.

    Raises:
      UserError: a directory is not writable.
    """
    from jaxlc.evals.evaluate_run import results_directory

    if out:
        base = local_path(out)
        directories = [base] if len(sources) == 1 else [base / name for name in _names(sources)]
    else:
        directories = [results_directory(source) for source in sources]
    for directory in directories:
        if out or directory.parent.is_dir():  # another source is refused later
            make_writable(directory, "use a different directory, with --out")
    return directories


def _names(sources: Sequence[str]) -> list[str]:
    """The names of the directories of the sources, with numbers if two are equal."""
    names = [local_path(source).absolute().name for source in sources]
    is_unique = len(set(names)) == len(names)
    return names if is_unique else [f"{index}-{name}" for index, name in enumerate(names, 1)]


def _print_figures(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"figure {path}")


# (argv, program name first) -> exit status
main = functools.partial(
    run_main,
    _evaluate,
    description=__doc__,
    flags=Flags,
    interrupted="interrupted; finished predictions are kept, and the same command resumes",
)
