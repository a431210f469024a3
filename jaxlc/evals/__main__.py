"""Evaluates runs and Hugging Face directories at chosen context lengths: needle, passkey, RULER, loss by position."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxlc
from jaxlc import runtime
from jaxlc.config.checks.eval_checks import LOSS, NEEDLE, PASSKEY, RULER, eval_settings
from jaxlc.config.values import parse_integer, parse_length
from jaxlc.core.errors import UserError
from jaxlc.generation.__main__ import mesh_sizes


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a UserError."""
    flags = _parser().parse_args(argv[1:])
    try:
        if flags.simulated_devices:
            jaxlc.start(simulated_devices=flags.simulated_devices)
        _evaluate(flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxlc eval", description=__doc__)
    add = parser.add_argument
    add("sources", metavar="SOURCE", nargs="+", help="workdir of a run, or a Hugging Face directory; or several")
    add("--tasks", default=NEEDLE, help=f"{NEEDLE}, {PASSKEY}, {LOSS}, {RULER}, or tasks of RULER, separated by commas")
    add("--lengths", required=True, help="context lengths in tokens, such as 4096,65536,1M")
    add("--num_examples", type=int, default=20, help="of each task, length and depth; documents of loss; default: 20")
    add("--depths", default="0,0.25,0.5,0.75,1", help="of needle and passkey, from 0 (start) to 1 (end)")
    add("--num_needles", type=int, default=1, help="needle: numbers in a text, of which one is asked for")
    add("--haystack", default="", help="files with prose, separated by commas; default: docstrings")
    add("--squad", default="", help="SQuAD 2.0 file, for qa_1")
    add("--hotpotqa", default="", help="HotpotQA file, for qa_2")
    add("--documents", default="", help="loss: files, directories or glob patterns, separated by commas")
    add("--text_field", default="text", help="loss: field of records that holds the document; default: text")
    add("--context_limits", default="1024", help="loss: tokens of the limited contexts; default: 1024")
    add("--chat", action="store_true", help="prompts are messages of a user in the chat template of the model")
    add("--batch_size", type=int, default=1, help="examples that are computed together; default: 1")
    add("--seed", type=int, default=42, help="of the examples; default: 42")
    add("--out", default="", help="directory of the results; default: SOURCE/evals")
    add("--step", default="", help="checkpoints to use, separated by commas; default: the latest")
    add("--mesh", help="sizes of mesh axes, such as context=4,tensor=2; default: the mesh of the run")
    add("--simulated_devices", type=int, default=0, help="number of CPU devices to simulate")
    return parser


def _evaluate(flags: argparse.Namespace) -> None:
    """Evaluates all checkpoints of all sources and draws the figures."""
    settings = eval_settings(
        dict(
            tasks=_split(flags.tasks),
            lengths=_lengths(flags.lengths, "lengths"),
            num_examples=flags.num_examples,
            depths=_split(flags.depths),
            num_needles=flags.num_needles,
            haystack=_split(flags.haystack),
            squad=flags.squad,
            hotpotqa=flags.hotpotqa,
            documents=_split(flags.documents),
            text_field=flags.text_field,
            context_limits=_lengths(flags.context_limits, "context_limits"),
            chat=flags.chat,
            batch_size=flags.batch_size,
            seed=flags.seed,
        )
    )
    steps = _steps(flags.step)
    runtime.import_jax()
    from jaxlc.evals.evaluate_run import evaluate_run
    from jaxlc.evals.pictures import draw_maps, draw_overlays
    from jaxlc.evals.score_rows import step_directories

    outs, directories = _directories(flags.sources, flags.out), dict[str, Path]()
    for source, out in zip(flags.sources, outs, strict=True):
        for step in steps or [None]:
            result = jaxlc.load(source, step=step, mesh=mesh_sizes(flags.mesh))
            rows = evaluate_run(result, settings, out, report=lambda row: print(row, flush=True))
            _print_figures(draw_maps(rows, out))
            directories[f"{source} step-{result.step}"] = out / f"step-{result.step}"
    if len(flags.sources) == 1:
        directories = {path.name: path for path in step_directories(outs[0])}  # earlier evaluations as well
    _print_figures(draw_overlays(directories, Path(flags.out).expanduser() if flags.out else outs[0]))


def _directories(sources: Sequence[str], out: str) -> list[Path]:
    """The directory of the results of each source: SOURCE/evals or, with `out`, a directory in it if there are several
    sources."""
    if not out:
        return [Path(source).expanduser() / "evals" for source in sources]
    names = [Path(source).name for source in sources]
    is_unique = len(set(names)) == len(names)
    base = Path(out).expanduser()
    if len(sources) == 1:
        return [base]
    return [base / (name if is_unique else f"{index}-{name}") for index, name in enumerate(names, 1)]


def _print_figures(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"figure {path}")


def _lengths(text: str, flag: str) -> tuple[int, ...]:
    return tuple(parse_length(part, flag) for part in _split(text))


def _steps(text: str) -> list[int]:
    try:
        return [parse_integer(part) for part in _split(text)]
    except ValueError as error:
        raise UserError(f"invalid --step={text}: expected numbers of checkpoints, such as 100,200") from error


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
