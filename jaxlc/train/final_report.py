"""The end of a run: two pictures, and a summary on one screen."""

from pathlib import Path

from jaxlc.config import Config
from jaxlc.core import extras
from jaxlc.data import Corpus
from jaxlc.data.ngrams import ngram_losses
from jaxlc.train.evaluation import Evaluation
from jaxlc.train.metrics import Row, read_rows


def write_report(workdir: Path, config: Config, corpus: Corpus, evaluation: Evaluation) -> str:
    """Writes loss.png and loss_by_position.png into `workdir`; returns the summary. Without matplotlib the pictures are
    skipped, and without tensorboardX there are no event files to point to; the summary says so."""
    num_rows = min(config.train.eval_sequences, corpus.heldout.num_sequences)
    unigram, bigram = ngram_losses(corpus.train, corpus.heldout, num_rows, config.model.vocab_size)
    rows = read_rows(workdir / "metrics.jsonl")
    pictures = write_pictures(workdir, rows, {"unigram": unigram, "bigram": bigram}, evaluation)
    tensorboard = f", tensorboard --logdir {workdir / 'tensorboard'}"
    if not extras.is_installed("tensorboardX"):
        tensorboard = f"; TensorBoard event files skipped: {extras.install_hint('tensorboardX')}"
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    eval_losses = [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]
    rates = sorted(row["tokens_per_second"] for row in rows if "tokens_per_second" in row)
    tokens = config.train.steps * config.tokens_per_step
    speed = f", {rates[len(rates) // 2]:,.0f} tokens/s (median)" if rates else ""
    return "\n".join(
        [
            "",
            f"trained         {config.train.steps} steps, {tokens:,} tokens{speed}",
            f"training loss   {_from_to(losses[:1], losses[-1:])} nats per token",
            f"held-out loss   {_from_to(eval_losses[:1], [evaluation.loss])}, over {num_rows} rows",
            f"  for comparison, on the same rows: unigram {unigram:.3f}, bigram {bigram:.3f}",
            *pictures,
            f"metrics         {workdir / 'metrics.jsonl'}{tensorboard}",
            f"checkpoints     {workdir / 'checkpoints'}",
        ]
    )


def write_pictures(workdir: Path, rows: list[Row], baselines: dict[str, float], evaluation: Evaluation) -> list[str]:
    """Writes both pictures; returns the lines that name them, or one that says why there are none."""
    if not extras.is_installed("matplotlib"):
        return [f"pictures        skipped, matplotlib is not installed: {extras.install_hint('matplotlib')}"]
    from jaxlc.train.loss_plots import plot_loss, plot_loss_by_position  # imported here: matplotlib is slow to import

    plot_loss(rows, baselines, workdir / "loss.png")
    plot_loss_by_position(evaluation, workdir / "loss_by_position.png")
    return [f"pictures        {workdir / 'loss.png'}", f"                {workdir / 'loss_by_position.png'}"]


def _from_to(first: list[float], last: list[float]) -> str:
    """ "5.118 -> 2.491"; what is not known, as after a lost metrics file, is left out."""
    return " -> ".join(f"{loss:.3f}" for loss in [*first, *last]) or "not known"
