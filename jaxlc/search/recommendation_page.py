"""The result of `jaxlc recommend` as plain text."""

from collections.abc import Iterator

from jaxlc.config.models.context_length import context_warning
from jaxlc.config.models.model_schema import model_name
from jaxlc.core.text import gib
from jaxlc.runtime.worker_processes import Row
from jaxlc.search import space
from jaxlc.search.best_first import Candidate
from jaxlc.search.recommendation import LORA, Recommendation
from jaxlc.search.results import Ranking
from jaxlc.simulate.interval import PAIR_SPREAD


def page(recommendation: Recommendation, price_per_gpu_hour: float | None, pair_spread: float = PAIR_SPREAD) -> str:
    """Plain text. Arguments as the fields of `Ranking`."""
    config, search = recommendation.base, recommendation.search
    goal, model = search.goal.replace("_", " "), model_name(vars(config.model))
    length = "longest sequence" if search.goal == "longest" else f"{config.data.seq_len:,} tokens"
    lines = [f"RECOMMENDATION, {goal}: {model}, {length} on {recommendation.gpus}"]
    if not search.best:
        return "\n".join([*lines, *_nothing_fits(recommendation)])
    chosen = search.best[0][0].config
    if warning := context_warning(chosen.model, chosen.data.seq_len):
        lines.append(f"WARNING: {warning}")
    lines.append(str(Ranking(tuple(row for _, row in search.best), price_per_gpu_hour, pair_spread)) + "\n")
    if search.best[0][1]["warnings"]:
        lines.append("Every configuration that fits has a warning:")
    for rank, (candidate, row) in enumerate(search.best, start=1):
        lines += _details(rank, candidate, row)
    return "\n".join(lines)


def _details(rank: int, candidate: Candidate, row: Row) -> Iterator[str]:
    yield f"{rank}: {space.name_of(candidate.config)}"
    left_bytes = row["device_usable_bytes"] - row["device_peak_bytes"]
    yield f"   leaves {left_bytes / 2**30:.0f} GiB per GPU; {space.cost(candidate.config, candidate.settings)}"
    yield f"   share of the time: {row['time_by_resource']}"
    if row["warnings"]:
        yield f"   warning: {row['warnings']}"
    if row["pools"]:
        yield f"   needs {space.overrides(row['pools'])}"


def _nothing_fits(recommendation: Recommendation) -> Iterator[str]:
    yield "nothing fits. Estimated, not compiled:"
    if recommendation.longest is None:
        yield f"  no sequence length fits {recommendation.gpus}: {recommendation.reason}"
    else:
        yield f"  the longest sequence that fits {recommendation.gpus} has {recommendation.longest:,} tokens"
    if recommendation.larger is None:
        yield "  more GPUs of this kind do not help: no mesh divides model and batch such that the step fits"
    else:
        yield f"  {recommendation.larger.num_gpus} GPUs would do: --topology={recommendation.larger}"
    if recommendation.fits_with_lora:
        yield f"  LoRA would fit: {space.overrides(LORA)}"
    smallest = recommendation.search.smallest
    if smallest is not None:
        yield f"  nearest: {smallest['overrides']}, {gib(smallest['device_peak_bytes'])} GiB per GPU, compiled"
