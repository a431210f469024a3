"""Recommends configurations for a model and GPUs: rough estimates order the candidates, AOT
compilation decides.

`page` is the result as plain text, and `config_source` as a config file that `--config=FILE` takes.
"""

import bisect
import itertools
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlc.config import PRESETS, Config, Stage, to_dict, unchecked, with_settings
from jaxlc.config.checks.mesh_checks import length_problems, nearest_multiples, split_problems
from jaxlc.config.command_line import field_comments
from jaxlc.config.files import file_text
from jaxlc.config.frozen import FROM_LENGTHS, refusal
from jaxlc.config.models.presets import model_name
from jaxlc.config.models.pretrained import context_warning
from jaxlc.config.settings import hint_at
from jaxlc.config.values import as_python, flattened
from jaxlc.core import Log, UserError, gib, num_replicas, progress_lines
from jaxlc.core.files import local_path
from jaxlc.search import space
from jaxlc.search.analytic_cost import Layout, Rates, usable_memory
from jaxlc.search.best_first import Candidate, Compile, Search
from jaxlc.search.ranking import Ranking, row_text
from jaxlc.search.runner import IsOver
from jaxlc.search.space import Settings
from jaxlc.simulate.roofline import PAIR_SPREAD, Roofline
from jaxlc.simulate.topology import Topology, full_domain_size, part_of

MARK = "Written by `jaxlc"
_LINE_WIDTH = 118  # of a setting and its comment
_FIRST_CHANGES = (  # settings that `init` writes in any case, since most users change them
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "train.steps",
    "train.eval_every_steps",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "train.log_every_steps",
)


def config_source(
    source: str,
    model: str,
    title: str,
    base: Sequence[Stage],
    recommended: Sequence[Config],
    verb: str = "recommend",
) -> str:
    """The text of the config file, in which each setting has a comment.

    Args:
      source: name and variant of the given config; "": none, only a model.
      model: --model of the command; "": that of the given config.
      title: what was recommended for what, in one line.
      base: the stages of the given config as its file defines them, with `model`, without other overrides.
      recommended: the config of each stage.
      verb: of the command.
    """
    is_preset = model in PRESETS
    path = local_path(model)
    # absolute, so that the file can be read from other directories
    if model and not is_preset and path.is_dir():
        model = str(path.resolve())
    lines = (
        [f"config.model.{'preset' if is_preset else 'init_from'} = {as_python(model)}"]
        if model
        else []
    )
    title = f"{title}\n\n{MARK} {verb}`. Change it as any other config file.\n"
    given = f"read_config({as_python(source)})" if source else "defaults()"
    changes: dict[str, Any] = {}  # of a stage, or of the run where stages have no own value
    for stage, config in zip(base, recommended, strict=True):
        before = flattened(to_dict(stage.config))
        for path, value in flattened(to_dict(config)).items():
            if (path not in before or value != before[path]) and not (
                stage.name and path in FROM_LENGTHS
            ):
                is_shared = not stage.name or refusal(stage.name, path)
                changes[path if is_shared else f"stages.{stage.name}.{path}"] = value
    if verb == "init" and not base[0].name:
        values = flattened(to_dict(recommended[0]))
        changes = {path: values[path] for path in _FIRST_CHANGES} | changes
    text = file_text(title, given, dict(sorted(changes.items())), lines)
    return re.sub(r'^ +"([^"]+)": .*,$', _commented, text, flags=re.MULTILINE)


def _commented(line: re.Match[str]) -> str:
    """The line of a setting with the start of its description."""
    part, _, name = line[1].rpartition(".")
    meaning = re.split(r"[.;:] |\.$", field_comments(hint_at(part))[name])[0]
    comment = textwrap.shorten(meaning, max(0, _LINE_WIDTH - len(line[0]) - 4), placeholder=" ...")
    return f"{line[0]}  # {comment}" if comment.strip(" .") else line[0]


# per GPU: attention kernels have tiles of 128 tokens, and zigzag order two chunks
_CHUNK_TOKENS = 256
_MAX_DOMAINS = 512  # the largest number of NVLink domains that is tried if nothing fits
_NUM_LENGTHS = 8  # the goal "longest" compiles the longest of these that fits
LORA = {"lora.rank": 16}  # what is advised if only it fits
_MARGIN = 0.5  # factor on a layer's working set, which is estimated roughly
_NOT_COMPILED = (
    "the best by the estimates; the time was over before a combination that fits was compiled. Run the same command"
    " again with a larger --search_minutes, or `jaxlc plan` with the config file"
)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The result of a search."""

    base: Config
    gpus: Topology
    search: Search
    # the time was over before one that fits was compiled: the best candidate by the estimates
    estimated: Candidate | None = None
    advice: Sequence[str] = ()  # what would fit, by estimates, if nothing fits

    @property
    def choice(self) -> tuple[Settings, str] | None:
        """The recommended settings, with the sizes of memory pools that the step needs, and its
        figures; None: nothing fits.
        """
        if self.search.best:
            candidate, row = self.search.best[0]
            return candidate.settings | row["pools"], row_text(row)
        return self.estimated and (self.estimated.settings, "estimated, not compiled")


def recommend(
    config: Config,
    gpus: Topology,
    compile_candidates: Compile,
    *,
    goal: str = "fastest",
    roofline: Roofline,
    batch_size: int = 1,
    end_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    log: Log = lambda line: None,
) -> Recommendation:
    """Searches meshes, attention strategies, microbatches and memory settings for `config` on `gpus`.

    Model, data, mask, precision, trained parameters, sequence length and global batch size are those of `config`; with
    the goal "longest" the sequence length varies, and a step has about as many tokens, in at least one sequence.

    Args:
      batch_size: number of candidates in a call of `compile_candidates`.
      end_seconds: the search ends at this time of `clock`, without candidates in progress.
      log: called with lines that report progress.
    Raises:
      UserError: no mesh of the GPUs divides model, sequence and batch; or the time is over before all combinations are
        estimated.
    """
    pool: list[Candidate] = []
    is_over: IsOver = lambda rows: clock() >= end_seconds  # noqa: E731
    with progress_lines("estimating combinations", log=log):
        for part in topologies(goal, gpus):
            rates = Rates(part, roofline)
            for seq_len in _lengths(config, rates) if goal == "longest" else [config.data.seq_len]:
                for candidate in candidates(config, rates, seq_len):
                    if is_over(()):
                        raise UserError(
                            f"the time was over before all combinations were estimated, {len(pool):,} that may fit so"
                            " far: use a larger --search_minutes"
                        )
                    if candidate.estimate.fits(part, working_ratio=0.0):
                        pool.append(candidate)
    if not pool and not any(_layouts(config, Rates(gpus, roofline))):
        num_tokens = config.data.seq_len
        num_sequences = config.train.global_batch_size
        num_gpus = gpus.num_gpus
        raise UserError(
            f"no mesh of {num_gpus} GPUs divides the sequence of {num_tokens:,} tokens, the {num_sequences} sequences"
            f" of a step and the {config.model.attention.num_heads} query heads; use"
            f" --config.train.global_batch_size={nearest_multiples(num_sequences, num_gpus)}, or"
            f" --config.data.seq_len={nearest_multiples(num_tokens, _CHUNK_TOKENS * num_gpus)}"
        )
    log(f"{len(pool):,} combinations of mesh, strategy, microbatches and memory settings may fit")
    search = Search(goal, pool)
    search.run(compile_candidates, is_over, batch_size)
    if search.num_left:
        log("stopped at the time limit, before the choice was certain; the same command resumes")
    else:
        log(f"done: no other combination can change the choice; {len(search.rows)} compiled")
    if search.best or search.num_left:
        first = None if search.best else search.pending()[0]
        return Recommendation(base=config, gpus=gpus, search=search, estimated=first)
    advice = [*_nothing_fits(config, Rates(gpus, roofline), search)]
    return Recommendation(base=config, gpus=gpus, search=search, advice=advice)


def topologies(goal: str, gpus: Topology) -> list[Topology]:
    """The GPUs to search: all of `gpus`, or for cheapest and fewest_gpus also parts of them,
    largest first.

    Parts are numbers of whole domains, and of GPUs of one domain: divisors and powers of two, down
    to one GPU.
    """
    if goal in ("fastest", "longest"):
        return [gpus]
    domains, sizes = (
        [size for size in range(number, 0, -1) if number % size == 0 or size & (size - 1) == 0]
        for number in (gpus.num_domains, gpus.gpus_per_domain)
    )
    whole = [part_of(gpus, size, gpus.gpus_per_domain) for size in domains]
    return [*whole, *(part_of(gpus, 1, size) for size in sizes[1:])]


def lengths(num_gpus: int) -> list[int]:
    """Sequence lengths in tokens to try for "longest", longest first: four in each doubling, up to
    2^28.

    They are multiples of the odd factors of `num_gpus`, so that any mesh divides them.
    """
    odd = num_gpus // (num_gpus & -num_gpus)
    sizes = {odd * 2**power * quarter for power in range(10, 26) for quarter in (4, 5, 6, 7)}
    return sorted((size for size in sizes if size < 2**28), reverse=True)


def candidates(
    config: Config, rates: Rates, seq_len: int, max_sequences: int = 8
) -> Iterator[Candidate]:
    """Candidates for these GPUs whose mesh divides the model and the batch; most of them may not
    fit.

    A step has about as many tokens as that of `config`, in at least one sequence.

    Args:
      max_sequences: of a microbatch on one replica.
    """
    given = {
        "data.seq_len": seq_len,
        "runtime.topology": str(rates.gpus),
        "runtime.transport": config.runtime.transport,
    }
    if seq_len != config.data.seq_len:
        given["train.global_batch_size"] = max(1, config.tokens_per_step // seq_len)
    for settings, layout in _layouts(unchecked(config, given), rates, max_sequences):
        for memory_settings in space.memory_settings(layout.config):
            estimate = layout.estimate(unchecked(layout.config, memory_settings).memory)
            all_settings = given | settings | memory_settings
            yield Candidate(settings=all_settings, base=config, gpus=rates.gpus, estimate=estimate)


def _layouts(
    config: Config, rates: Rates, max_sequences: int = 8
) -> Iterator[tuple[Settings, Layout]]:
    """Meshes, strategies and microbatches that divide the model, the sequence and the batch."""
    for mesh in space.meshes(config, rates.gpus.num_gpus):
        per_replica, rest = divmod(config.train.global_batch_size, num_replicas(mesh))
        sizes = (
            []
            if rest
            else [size for size in range(1, max_sequences + 1) if per_replica % size == 0]
        )
        for strategy, size in itertools.product(space.strategies(config, mesh), sizes):
            settings = (
                space.mesh_settings(mesh) | strategy | space.batch_settings(config, mesh, size)
            )
            changed = unchecked(config, settings)
            if any(split_problems(changed)) or any(length_problems(changed)):
                continue
            kernels = rates.kernels(changed)
            if kernels is not None:
                yield settings, Layout(changed, rates, kernels)


def _lengths(config: Config, rates: Rates) -> list[int]:
    """The longest sequences that may fit."""
    tried = lengths(rates.gpus.num_gpus)
    index = _first_fitting(config, rates, tried, _MARGIN)
    return tried[index : index + _NUM_LENGTHS]


def _first_fitting(
    config: Config, rates: Rates, seq_lens: Sequence[int], working_ratio: float
) -> int:
    """The index of the longest sequence that fits by the estimate; their number if none does."""
    return bisect.bisect_left(
        seq_lens, True, key=lambda length: _may_fit(config, rates, length, working_ratio)
    )


def _may_fit(config: Config, rates: Rates, seq_len: int, working_ratio: float) -> bool:
    """Whether any settings fit by the estimate; more sequences per microbatch do not save memory."""
    found = candidates(config, rates, seq_len, max_sequences=1)
    return any(candidate.estimate.fits(rates.gpus, working_ratio) for candidate in found)


def _reason(config: Config, rates: Rates, shortest: int) -> str:
    """What is too large for a sequence of `shortest` tokens."""
    gpus = rates.gpus
    estimates = [x.estimate for x in candidates(config, rates, shortest, max_sequences=1)]
    usable_bytes, usable_host_bytes = usable_memory(gpus)
    on_gpu = [x.exact_bytes for x in estimates if x.host_bytes_per_node <= usable_host_bytes]
    on_host = [x.host_bytes_per_node for x in estimates if x.exact_bytes <= usable_bytes]
    parts = []
    if on_gpu:
        parts.append(
            f"{min(on_gpu) / 2**30:,.0f} GiB of each GPU ({usable_bytes / 2**30:,.0f} usable)"
        )
    if on_host:
        usable = f"{usable_host_bytes / 2**30:,.0f} usable, with copies for a checkpoint"
        parts.append(f"{min(on_host) / 2**30:,.0f} GiB of host memory per node ({usable})")
    return f"the training state needs at least {', or '.join(parts)}"


def _larger(gpus: Topology) -> Iterator[Topology]:
    """More GPUs of this kind: doublings within a domain up to its full size, then of the domains."""
    size = gpus.gpus_per_domain
    while 2 * size <= full_domain_size(gpus) and gpus.num_domains == 1:
        size *= 2
        yield part_of(gpus, 1, size)
    num_domains = 2 * gpus.num_domains
    while num_domains <= _MAX_DOMAINS:
        yield part_of(gpus, num_domains, size)
        num_domains *= 2


def page(
    recommendation: Recommendation,
    price_per_gpu_hour: float | None,
    pair_spread: float = PAIR_SPREAD,
) -> str:
    """Plain text. Arguments as the fields of `Ranking`."""
    config = recommendation.base
    search = recommendation.search
    goal = search.goal.replace("_", " ")
    model = model_name(vars(config.model))
    length = "longest sequence" if search.goal == "longest" else f"{config.data.seq_len:,} tokens"
    lines = [f"RECOMMENDATION, {goal}: {model}, {length} on {recommendation.gpus}"]
    if recommendation.estimated is not None:
        name = space.name_of(recommendation.estimated.config)
        return "\n".join([*lines, f"{name}: {_NOT_COMPILED}"])
    if not search.best:
        return "\n".join([*lines, *recommendation.advice])
    chosen = search.best[0][0].config
    if warning := context_warning(chosen.model, chosen.data.seq_len):
        lines.append(f"WARNING: {warning}")
    lines.append(
        str(Ranking(tuple(row for _, row in search.best), price_per_gpu_hour, pair_spread)) + "\n"
    )
    if search.best[0][1]["warnings"]:
        lines.append("Every configuration that fits has a warning:")
    for rank, (candidate, row) in enumerate(search.best, start=1):
        left_bytes = row["device_usable_bytes"] - row["device_peak_bytes"]
        cost = space.cost(candidate.config, candidate.settings)
        lines += [
            f"{rank}: {space.name_of(candidate.config)}",
            f"   leaves {left_bytes / 2**30:.0f} GiB per GPU; {cost}",
            f"   share of the time: {row['time_by_resource']}",
        ]
        if row["warnings"]:
            lines.append(f"   warning: {row['warnings']}")
        if row["pools"]:
            lines.append(f"   needs {space.overrides(row['pools'])}")
    if _may_use_fp8(chosen, recommendation.gpus):
        lines.append(_FP8)
    return "\n".join(lines)


_FP8 = (
    "not used, since it changes results: --config.precision.compute=fp8. Measured on one H100, 4 layers of Llama 3.1"
    "\n   8B: 1.18 times as fast as bf16, 0.656 s instead of 0.774 s. Compare the loss with bf16's (docs/precision.md)."
)


def _may_use_fp8(config: Config, gpus: Topology) -> bool:
    """Whether a step in bf16 could multiply in FP8: GPUs have it since compute capability 8.9. Only
    dense layers were measured.
    """
    is_bf16 = config.precision.compute in ("auto", "bf16")
    has_fp8 = float(gpus.device.compute_capability) >= 8.9
    if not (is_bf16 and has_fp8) or config.model.layers_with_experts:
        return False
    try:
        with_settings(config, {"precision.compute": "fp8"})
    except UserError:
        return False
    return True


def _nothing_fits(config: Config, rates: Rates, search: Search) -> Iterator[str]:
    """What would fit, by estimates: shorter sequences, more GPUs of this kind, or LoRA."""
    gpus = rates.gpus
    seq_len = config.data.seq_len
    ratio = search.working_ratio()
    tried = lengths(gpus.num_gpus)
    shorter = [x for x in tried if x < seq_len]
    index = _first_fitting(config, rates, shorter, ratio)
    yield "nothing fits. Estimated, not compiled:"
    if index == len(shorter):
        yield f"  no sequence length fits {gpus}: {_reason(config, rates, tried[-1])}"
    else:
        yield f"  the longest sequence that fits {gpus} has {shorter[index]:,} tokens"
    for part in _larger(gpus):
        if _may_fit(config, Rates(part, rates.roofline), seq_len, ratio):
            yield f"  {part.num_gpus} GPUs would do: --topology={part}"
            break
    else:
        yield "  more GPUs of this kind do not help: no mesh divides model and batch such that the step fits"
    lora = unchecked(config, LORA)
    if not config.lora.rank and _may_fit(lora, rates, seq_len, ratio):
        yield f"  LoRA would fit: {space.overrides(LORA)}"
    if (smallest := search.smallest) is not None:
        yield f"  nearest: {smallest['overrides']}, {gib(smallest['device_peak_bytes'])} GiB per GPU, compiled"
