"""Shows that a model uses its context: trains one config with the ring, with a window and with a
broken ring.

    python -m benchmarks.retrieval --config=retrieval --out=runs/retrieval_variants

Writes retrieval.jsonl with the loss by position and the retrieval scores of each variant,
retrieval.png, and a workdir per variant. The same command resumes an interrupted comparison.
"""

import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax
import numpy as np

from benchmarks.broken_ring import broken_ring
from benchmarks.environment import environment_info
from jaxlc.config import ModelConfig
from jaxlc.config.command_line import ConfigFlags, ParsedCommand, run_main
from jaxlc.config.values import From1
from jaxlc.core.errors import UserError
from jaxlc.core.plot_style import AMBER, BLUE, RED, new_figure, style_axes
from jaxlc.data.texts.sources import retrieval_prompt
from jaxlc.runtime.start import start

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxlc.train import Result

WINDOW = 256
# Tokens from an entry to the question. In zigzag order over 4 ranks, the rank of the last 512 tokens also has the first
# 512, which no distance reaches.
DISTANCES = (100, 200, 400, 700, 1500, 2500, 3300)
# Name -> (label, color)
VARIANTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "full": ("full context", BLUE),
        "window": (f"window of {WINDOW} tokens", AMBER),
        "broken": ("broken ring", RED),
    }
)


@dataclass(frozen=True, kw_only=True)
class Flags(ConfigFlags):
    __doc__ = __doc__  # the text of --help

    variants: tuple[str, ...] = tuple(VARIANTS)  # variants to train
    num_examples: From1[int] = 40  # questions of each distance
    out: str = "runs/retrieval_variants"  # output directory


@contextlib.contextmanager
def windowed() -> Iterator[None]:
    """Inside, layers of kind `nope`, which attend to all earlier tokens, have a window of WINDOW
    tokens.
    """
    with mock.patch.object(ModelConfig, "window_of", _window_of):
        jax.clear_caches()
        yield
    jax.clear_caches()


def _window_of(self: ModelConfig, kind: str) -> int:
    return self.attention.window if kind == "sliding" else WINDOW


_CHANGES = MappingProxyType(
    {"full": contextlib.nullcontext, "window": windowed, "broken": broken_ring}
)


def main(command: ParsedCommand[Flags]) -> int:
    """Returns the exit status: 0, or that of a training run that was interrupted."""
    start(command.stages[-1].config.runtime)
    from jaxlc import train

    out, num_examples = Path(command.flags.out), command.flags.num_examples
    rows = []
    for name in command.flags.variants:
        if name not in VARIANTS:
            raise UserError(f"invalid {name!r} for --variants: expected {', '.join(VARIANTS)}")
        print(f"\n{name}", flush=True)
        with _CHANGES[name]():
            begin = time.perf_counter()
            result = train.run(command.stages, out / name)
            if result.exit_status:
                return result.exit_status
            seconds = time.perf_counter() - begin
            rows.append(variant_row(name, result, num_examples) | dict(run_seconds=seconds))
        print(summary(rows[-1]), flush=True)
    with (out / "retrieval.jsonl").open("w") as file:
        file.writelines(json.dumps(row | environment_info()) + "\n" for row in rows)
    figure(rows).savefig(out / "retrieval.png")
    print(f"{out / 'retrieval.jsonl'}, {out / 'retrieval.png'}")
    return 0


def variant_row(name: str, result: "Result", num_examples: int) -> dict[str, Any]:
    """Loss by position and retrieval scores of a trained variant, a line of retrieval.jsonl."""
    evaluation = result.evaluation or result.evaluate()
    by_position = evaluation.by_position()
    return dict(
        variant=name,
        steps=result.step,
        eval_loss=evaluation.loss,
        by_position={key: np.asarray(values).tolist() for key, values in by_position.items()},
        num_examples=num_examples,
        scores={str(distance): score(result, distance, num_examples) for distance in DISTANCES},
    )


def score(result: "Result", distance: int, num_examples: int) -> float:
    """Percent of questions at the end of a sequence of full length whose number is the most probable continuation.

    Args:
      distance: tokens from the only entry of a name to the question. Those that the sequence does not contain give NaN.
    """
    num_tokens = result.config.data.seq_len - 3  # length of the prompt; the others are the number
    if distance >= num_tokens:
        return float("nan")
    rng = random.Random(f"questions {distance}")
    correct = []
    for _ in range(num_examples):
        prompt, number = retrieval_prompt(rng, num_tokens, distance)
        tokens = result.tokenizer.encode(f"{prompt} {number}".encode())
        predicted = np.asarray(result.model.logits(tokens[:-1], slice(-3, None)).argmax(-1).ravel())
        correct.append((predicted == tokens[-3:]).all())
    return 100 * float(np.mean(correct))


def summary(row: Mapping[str, Any]) -> str:
    """Lines of the loss by position and of the scores."""
    positions = row["by_position"]
    losses = zip(positions["first_position"], positions["last_position"], positions["loss"])
    return "\n".join(
        [f"  {first:>6,} to {last:>6,}  loss {loss:.3f}" for first, last, loss in losses]
        + [
            f"  distance {int(distance):>6,}  {percent:5.1f} % retrieved"
            for distance, percent in row["scores"].items()
        ]
    )


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Left: held-out loss by position. Right: needle scores by length. One line for each variant."""
    # imported here because matplotlib is slow to import
    from matplotlib.ticker import FuncFormatter

    drawn = new_figure(9.0, 3.4, dpi=110)
    losses, scores = drawn.subplots(1, 2, width_ratios=(3, 2))
    for row in rows:
        label, color = VARIANTS[row["variant"]]
        positions = {key: np.array(values) for key, values in row["by_position"].items()}
        middle = np.sqrt((positions["first_position"] + 1.0) * (positions["last_position"] + 1.0))
        losses.plot(
            middle, positions["loss"], "o-", color=color, markersize=4, linewidth=1.4, label=label
        )
        losses.fill_between(
            middle, positions["low"], positions["high"], color=color, alpha=0.15, linewidth=0
        )
        distances = [int(distance) for distance in row["scores"]]
        scores.plot(
            distances, list(row["scores"].values()), "o-", color=color, markersize=5, linewidth=1.4
        )
    for axes in (losses, scores):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        style_axes(axes, "y")
    losses.set(
        xlabel="tokens of the document before the target", ylabel="held-out loss, nats per token"
    )
    losses.set_title("Loss by position", loc="left", fontsize=11)
    losses.legend(frameon=False, fontsize=9)
    scores.set(
        xlabel="tokens from the entry to the question",
        ylabel="numbers retrieved, %",
        ylim=(-4, 104),
    )
    scores.set_title("Retrieval", loc="left", fontsize=11)
    return drawn


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv, flags=Flags))
