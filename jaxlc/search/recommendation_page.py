"""`jaxlc recommend`: recommends a configuration for every stage, prints it and writes a config file."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import Config, Stage, load_stages, read_config, with_settings
from jaxlc.config.base_config import set_model
from jaxlc.config.command_line import ParsedCommand
from jaxlc.config.models.context_length import context_warning
from jaxlc.config.settings import defaults
from jaxlc.core.counts import gib
from jaxlc.runtime.worker_processes import Row, default_num_workers
from jaxlc.search import runner, space, worker
from jaxlc.search.best_first import Candidate, Compile
from jaxlc.search.config_file import check_path, config_source
from jaxlc.search.recommendation import Recommendation, recommend
from jaxlc.search.results import Ranking, row_text
from jaxlc.search.runner import log
from jaxlc.simulate.interval import PAIR_SPREAD
from jaxlc.simulate.roofline import from_file
from jaxlc.simulate.topology import Topology


def run(command: ParsedCommand[Any], gpus: Topology) -> int:
    """Prints a recommendation for each stage, and writes the config file.

    Args:
      command: its flags are `jaxlc.recommend.Flags`.
    Returns:
      The exit status: 1 if no configuration of a stage fits.
    Raises:
      UserError: an invalid file to write; and as `recommendation.recommend`.
    """
    flags, stages, path = command.flags, command.stages, Path(command.flags.out)
    source, model = flags.config, flags.model or ""
    check_path(path)
    assert gpus.devices  # raises here, rather than for every candidate, if the compiler is not installed
    roofline = from_file(flags.constants)
    num_workers = flags.workers or default_num_workers()
    points = Path("runs") / f"recommend_{Path(command.workdir if source else model).name}"
    results: list[Recommendation] = []
    for stage in stages:
        log(f"searching: {stage.name + ', ' if stage.name else ''}{gpus}, {flags.goal}")
        result = recommend(
            _searchable(stage.config),
            gpus,
            _compile_in_processes(stage.config, gpus, flags, points, num_workers),
            goal=flags.goal,
            roofline=roofline,
            batch_size=num_workers,
            limit_seconds=60 * flags.search_minutes / len(stages),
            log=log,
        )
        results.append(result)
        if stage.name:
            print(f"STAGE {stage.name}")
        print(page(result, flags.price_per_gpu_hour, roofline.pair_spread), end="\n\n")
    if not all(result.search.best for result in results):
        return 1
    best = [result.search.best[0] for result in results]
    configs = [_final(stage.config, *chosen) for stage, chosen in zip(stages, best)]
    texts = (": ".join(filter(None, (stage.name, row_text(row)))) for stage, (_, row) in zip(stages, best))
    title = f"Recommended for {gpus}, {flags.goal}: {'; '.join(texts)}."
    path.write_text(config_source(source, model, title, _base(source, model, stages), configs))
    print(f"wrote {path}: jaxlc plan --config={path}; jaxlc train --config={path} --config.data.sources=TEXTS")
    return 0


def page(recommendation: Recommendation, price_per_gpu_hour: float | None, pair_spread: float = PAIR_SPREAD) -> str:
    """Plain text. Arguments as the fields of `Ranking`."""
    config, search = recommendation.base, recommendation.search
    length = "longest sequence" if search.goal == "longest" else f"{config.data.seq_len:,} tokens"
    model, goal = config.model.init_from or config.model.preset, search.goal.replace("_", " ")
    lines = [f"RECOMMENDATION, {goal}: {model}, {length} on {recommendation.gpus}"]
    if not search.best:
        return "\n".join([*lines, *_nothing_fits(recommendation)])
    chosen = search.best[0][0].config
    if warning := context_warning(chosen.model, chosen.data.seq_len):
        lines.append(f"WARNING: {warning}")
    lines.append(str(Ranking(tuple(row for _, row in search.best), price_per_gpu_hour, pair_spread)) + "\n")
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
        yield f"  no sequence length fits {recommendation.gpus}"
    else:
        yield f"  the longest sequence that fits {recommendation.gpus} has {recommendation.longest:,} tokens"
    if recommendation.larger is None:
        yield "  more GPUs of this kind do not help: no mesh divides model and batch such that the step fits"
    else:
        yield f"  {recommendation.larger.num_gpus} GPUs would do: --topology={recommendation.larger}"
    smallest = recommendation.search.smallest
    if smallest is not None:
        yield f"  nearest: {smallest['overrides']}, {gib(smallest['device_peak_bytes'])} GiB per GPU, compiled"


def _compile_in_processes(config: Config, gpus: Topology, flags: Any, points: Path, num_workers: int) -> Compile:
    """Compiles each candidate in a process of its own; results are rows of points.jsonl, as those of a sweep."""
    also = dict(host_memory_gib=flags.host_memory_gib, devices_per_process=flags.devices_per_process)
    about = runner.about_estimates(config, str(gpus), flags.constants, **also)
    work = functools.partial(worker.estimate, constants=flags.constants, **also)
    start_seconds = time.monotonic()
    quiet: Callable[[str], None] = lambda line: None

    def compile_candidates(candidates: Sequence[Candidate]) -> list[Row]:
        found = [space.point(candidate.base, candidate.settings) for candidate in candidates]
        rows = runner.run(found, work, about=about, out=points, num_workers=num_workers, log=quiet)
        by_overrides = {row["overrides"]: row for row in rows}
        results = [by_overrides[point.overrides] for point in found]
        for candidate, row in zip(candidates, results, strict=True):
            name = f"{candidate.gpus} {space.name_of(candidate.config)}"
            log(f"{time.monotonic() - start_seconds:5.0f} s  {name}: {row_text(row)}")
        return results

    return compile_candidates


def _searchable(config: Config) -> Config:
    """Without settings of this machine."""
    runtime = dataclasses.replace(config.runtime, simulated_devices=0, num_processes=1, process_id=0)
    return dataclasses.replace(config, runtime=runtime)


def _final(given: Config, candidate: Candidate, row: Row) -> Config:
    """The given config with the recommended settings, and the sizes of memory pools that the step needs."""
    return with_settings(given, candidate.settings | row["pools"] | {"runtime.simulated_devices": 0})


def _base(source: str, model: str, stages: Sequence[Stage]) -> Sequence[Stage]:
    """The given config, without overrides of the command line; of its stages those that --stage=NAME selects."""
    config = read_config(source) if source else defaults()
    if model:
        set_model(config, model)
    names = [stage.name for stage in stages]
    return [stage for stage in load_stages(config) if stage.name in names]
