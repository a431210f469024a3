"""The end of a run: two pictures, and a summary on one screen."""

from pathlib import Path

from jaxlc.config import Config
from jaxlc.data import Corpus
from jaxlc.data.ngrams import ngram_losses
from jaxlc.train.evaluation import Evaluation
from jaxlc.train.metrics import read_rows


def write_report(workdir: Path, config: Config, corpus: Corpus, evaluation: Evaluation) -> str:
    """Writes loss.png and loss_by_position.png into `workdir`; returns the summary."""
    from jaxlc.train.plots import plot_loss, plot_loss_by_position

    num_rows = min(config.train.eval_rows, corpus.heldout.num_rows)
    unigram, bigram = ngram_losses(corpus.train, corpus.heldout, num_rows, config.model.vocab_size)
    rows = read_rows(workdir / "metrics.jsonl")
    plot_loss(rows, {"unigram": unigram, "bigram": bigram}, workdir / "loss.png")
    plot_loss_by_position(evaluation, workdir / "loss_by_position.png")
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    tokens = config.train.steps * config.train.rows_per_step * config.data.sequence_tokens
    median_rate = sorted(row["tokens_per_second"] for row in steps)[len(steps) // 2]
    return "\n".join([
        "",
        f"trained         {config.train.steps} steps, {tokens:,} tokens, {median_rate:,.0f} tokens/s (median)",
        f"training loss   {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f} nats per token",
        f"held-out loss   {evaluations[0]['eval_loss']:.3f} -> {evaluation.loss:.3f}, over {num_rows} rows",
        f"  for comparison, on the same rows: unigram {unigram:.3f}, bigram {bigram:.3f}",
        f"pictures        {workdir / 'loss.png'}",
        f"                {workdir / 'loss_by_position.png'}",
        f"metrics         {workdir / 'metrics.jsonl'}, tensorboard --logdir {workdir / 'tensorboard'}",
        f"checkpoints     {workdir / 'checkpoints'}",
    ])
