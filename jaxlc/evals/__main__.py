"""Evaluates a run or a Hugging Face directory at chosen context lengths: needle in a haystack and RULER."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxlc
from jaxlc.core import extras
from jaxlc.core.errors import UserError
from jaxlc.evals.evaluate_run import NEEDLE, ScoreRow, read_scores
from jaxlc.generation.__main__ import mesh_sizes


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a UserError."""
    parser = argparse.ArgumentParser(prog="jaxlc eval", description=__doc__)
    parser.add_argument("source", metavar="SOURCE", help="workdir of a run, or a Hugging Face directory")
    parser.add_argument("--tasks", default=NEEDLE, help="needle, ruler, or tasks of RULER, separated by commas")
    parser.add_argument("--lengths", required=True, help="context lengths in tokens, such as 4096,65536,1M")
    parser.add_argument("--num_examples", type=int, default=20, help="of each task, length and depth; default: 20")
    parser.add_argument("--depths", default="0,0.25,0.5,0.75,1", help="of needle, from 0 (start) to 1 (end)")
    parser.add_argument("--num_needles", type=int, default=1, help="numbers in a text, of which one is asked for")
    parser.add_argument("--haystack", default="", help="files with prose, separated by commas; default: docstrings")
    parser.add_argument("--squad", default="", help="SQuAD 2.0 file, for qa_1")
    parser.add_argument("--hotpotqa", default="", help="HotpotQA file, for qa_2")
    parser.add_argument("--batch_size", type=int, default=1, help="examples that are generated together; default: 1")
    parser.add_argument("--seed", type=int, default=42, help="of the examples; default: 42")
    parser.add_argument("--out", default="", help="directory of the results; default: SOURCE/evals")
    parser.add_argument("--step", type=int, help="checkpoint to use; default: the latest")
    parser.add_argument("--mesh", help="sizes of mesh axes, such as context=4,tensor=2; default: the mesh of the run")
    parser.add_argument("--simulated_devices", type=int, default=0, help="number of CPU devices to simulate")
    flags = parser.parse_args(argv[1:])
    try:
        if flags.simulated_devices:
            jaxlc.start(simulated_devices=flags.simulated_devices)
        rows = jaxlc.evaluate(
            flags.source,
            tasks=_split(flags.tasks),
            lengths=[_tokens(text) for text in _split(flags.lengths)],
            num_examples=flags.num_examples,
            depths=[_number(text) for text in _split(flags.depths)],
            num_needles=flags.num_needles,
            haystack=_split(flags.haystack),
            squad=flags.squad,
            hotpotqa=flags.hotpotqa,
            batch_size=flags.batch_size,
            seed=flags.seed,
            out=flags.out or None,
            step=flags.step,
            mesh=mesh_sizes(flags.mesh),
            report=lambda row: print(_line(row), flush=True),
        )
        _draw(rows, Path(flags.out or Path(flags.source) / "evals").expanduser())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _line(row: ScoreRow) -> str:
    depth = "" if row.depth is None else f" depth {row.depth:>4.0%}"
    score = f"{row.score:5.1f} ± {row.standard_error:.1f} %, {row.num_examples} examples, {row.seconds:,.0f} s"
    return f"{row.task:<16} {row.length:>10,}{depth}  {score}"


def _draw(rows: Sequence[ScoreRow], directory: Path) -> None:
    if not extras.is_installed("matplotlib"):
        return
    from jaxlc.evals import score_plots

    figures = {"scores.png": score_plots.score_figure(read_scores(directory))}  # of all checkpoints in the directory
    if any(row.task == NEEDLE for row in rows):
        figures["needle.png"] = score_plots.needle_figure(rows)
    for name, figure in figures.items():
        figure.savefig(directory / name)
        print(f"figure {directory / name}")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"invalid number {text!r}") from None


def _tokens(text: str) -> int:
    """1M is 2^20, 64K is 2^16."""
    scale = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    digits = text if scale == 1 else text[:-1]
    if not digits.isdecimal():
        raise UserError(f"invalid length {text!r}: expected a number of tokens, such as 65536, 64K or 1M")
    return int(digits) * scale


if __name__ == "__main__":
    sys.exit(main(sys.argv))
