"""A recommendation as plain text: the best configurations, what bounds each, and why the others are slower."""

from collections import Counter
from collections.abc import Iterator, Sequence

from jaxlc.core.counts import gib
from jaxlc.plan.report import amount, format_seconds, interval_factors_text
from jaxlc.plan.stage_table import aligned
from jaxlc.search.candidate_search import Trial
from jaxlc.search.recommendation import Alternatives, Recommendation
from jaxlc.simulate.interval import PAIR_SPREAD, is_distinguishable
from jaxlc.simulate.timeline import Prediction

_PARTS_SHOWN = 3  # of a difference
_SMALL_SHARE = 0.001  # of the step; smaller differences are not named


def page(
    recommendation: Recommendation,
    price_per_gpu_hour: float | None,
    costly: Sequence[str],
    pair_spread: float = PAIR_SPREAD,
) -> str:
    """Plain text.

    Args:
      price_per_gpu_hour: in any currency; None: no cost is printed.
      costly: settings of the given config that cost time, as sentences.
      pair_spread: half of the 80% interval of the logarithm of the ratio of two times.
    """
    config = recommendation.base
    goal = recommendation.search.goal.replace("_", " ")
    length = "longest sequence" if goal == "longest" else f"{config.data.seq_len:,} tokens"
    lines = [
        f"RECOMMENDATION, {goal}: {config.model.init_from or config.model.preset}, {length} on {recommendation.gpus}"
    ]
    if recommendation.alternatives is not None:
        return "\n".join([*lines, *_nothing_fits(recommendation, recommendation.alternatives)])
    best = recommendation.search.best
    lines += ["memory is AOT-compiled, time is estimated"]
    lines += [interval_factors_text(best[0].plan.predicted, "time and cost"), ""]
    lines += aligned(_rows(best, price_per_gpu_hour))
    lines.append("")
    for rank, trial in enumerate(best, start=1):
        lines.append(f"{rank}: {trial.candidate.name}")
        lines.append(f"   bound by {bound_text(trial)}")
        if rank > 1:
            lines.append(f"   {_why_not_first(best[0], trial)}")
    close = [str(rank) for rank, trial in enumerate(best[1:], start=2) if _is_close(best[0], trial, pair_spread)]
    if close:
        names = " and ".join([", ".join(["1", *close[:-1]]), close[-1]])
        lines += ["", f"{names} are within the 80% interval of the estimates: measure them to decide."]
    if costly:
        lines += ["", "settings of the given config that cost time (estimated by formulas):", *costly]
    return "\n".join(lines)


def _is_close(one: Trial, other: Trial, pair_spread: float) -> bool:
    """Whether the order of two configurations for the same GPUs and length is uncertain."""
    sizes = {(trial.plan.num_devices, trial.plan.sequence_tokens) for trial in (one, other)}
    seconds = [trial.plan.predicted.step_seconds for trial in (one, other)]
    return len(sizes) == 1 and not is_distinguishable(*seconds, pair_spread)


def _rows(best: Sequence[Trial], price: float | None) -> Iterator[Sequence[str]]:
    heads = ["", "GPUs", "length", "step", "tokens/s/GPU", "GiB/GPU", "host GiB/node", "GPU-hours per 1B tokens"]
    yield heads if price is None else [*heads, "cost per 1B tokens"]
    for rank, trial in enumerate(best, start=1):
        plan = trial.plan
        gpu_hours = gpu_hours_per_billion(trial)
        cells = [
            str(rank),
            plan.topology,
            f"{plan.sequence_tokens:,}",
            format_seconds(plan.predicted.step_seconds),
            f"{plan.predicted.tokens_per_second_per_device:,.0f}",
            f"{gib(plan.memory.device_peak_bytes)} of {gib(plan.memory.usable_bytes)}",
            f"{plan.memory.host_bytes_per_node / 2**30:,.0f}",
            amount(gpu_hours, 1),
        ]
        yield cells if price is None else [*cells, amount(price * gpu_hours, 0)]


def gpu_hours_per_billion(trial: Trial) -> float:
    """GPU-hours of 1e9 tokens, padding included."""
    return 1e9 / trial.plan.predicted.tokens_per_second_per_device / 3600


def bound_text(trial: Trial) -> str:
    """What the time is spent on, and the share of memory that is used."""
    predicted, memory = trial.plan.predicted, trial.plan.memory
    names = {"NVLink": "waiting for NVLink", "network": "waiting for the network", "host": "waiting for host copies"}
    shares = {
        names.get(resource, resource): seconds / predicted.step_seconds
        for resource, seconds in predicted.seconds_by_resource.items()
    }
    times = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= _SMALL_SHARE)
    used = memory.device_peak_bytes / memory.usable_bytes
    return f"{times}; GPU memory {used:.0%} of usable"


def _why_not_first(first: Trial, other: Trial) -> str:
    """Why `other` is not the first: its length, its GPUs, or the parts of its time per token that are longer."""
    if other.plan.sequence_tokens < first.plan.sequence_tokens:
        return f"not first: {other.plan.sequence_tokens / first.plan.sequence_tokens:.0%} of the length"
    if other.plan.num_devices != first.plan.num_devices:
        ratio = gpu_hours_per_billion(other) / gpu_hours_per_billion(first)
        return (
            f"not first: {other.plan.num_devices} GPUs instead of {first.plan.num_devices}, {ratio:.3g} x the GPU-hours"
        )
    scale = first.plan.tokens_per_step / other.plan.tokens_per_step
    differences = _parts(other.plan.predicted)
    differences = Counter({name: scale * seconds for name, seconds in differences.items()})
    differences.subtract(_parts(first.plan.predicted))
    first_seconds = first.plan.predicted.step_seconds
    ratio = scale * other.plan.predicted.step_seconds / first_seconds
    parts = [
        f"{name} {seconds:+.3g} s"
        for name, seconds in sorted(differences.items(), key=lambda part: -abs(part[1]))[:_PARTS_SHOWN]
        if abs(seconds) >= _SMALL_SHARE * first_seconds
    ]
    return f"not first: {ratio - 1:.1%} slower" + (f" ({', '.join(parts)})" if parts else "")


def _parts(predicted: Prediction) -> Counter[str]:
    """Seconds by kind of kernel, and of waiting by resource."""
    kinds = {kind: seconds for kind, seconds in predicted.seconds_by_kind.items() if kind != "waiting"}
    waiting = {"NVLink": "waiting for NVLink", "network": "waiting for the network", "host": "waiting for host copies"}
    by_resource = {text: predicted.seconds_by_resource.get(name, 0.0) for name, text in waiting.items()}
    return Counter(kinds | by_resource)


def _nothing_fits(recommendation: Recommendation, alternatives: Alternatives) -> Iterator[str]:
    yield "nothing fits. By the formulas, not compiled:"
    if alternatives.seq_len is None:
        yield f"  no sequence length fits {recommendation.gpus}"
    else:
        yield f"  the longest sequence that fits {recommendation.gpus} has {alternatives.seq_len:,} tokens"
    if alternatives.gpus is None:
        yield "  more GPUs of this kind do not help: no mesh divides model and batch such that the step fits"
    else:
        yield f"  {alternatives.gpus.num_gpus} GPUs would do: --topology={alternatives.gpus}"
    for trial in recommendation.search.trials[:1]:
        yield f"  nearest: {trial.candidate.name}, {gib(trial.plan.memory.device_peak_bytes)} GiB per GPU, compiled"
