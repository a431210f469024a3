"""`jaxlc plan --recommend`: recommends a configuration for every stage, prints it and writes a config file."""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlc.config import Config, Stage, load_stages, read_config, with_settings
from jaxlc.config.base_config import set_model
from jaxlc.config.settings import defaults
from jaxlc.core.errors import UserError
from jaxlc.runtime.worker_processes import default_num_workers
from jaxlc.search import recommendation_page
from jaxlc.search.candidate_search import Trial, trial_text
from jaxlc.search.config_file import check_path, config_source
from jaxlc.search.costly import costly_settings
from jaxlc.search.goals import GOALS
from jaxlc.search.recommendation import Recommendation, compile_in_processes, recommend
from jaxlc.simulate.roofline import from_file
from jaxlc.simulate.topology import Topology

_DEFAULT_MINUTES = 8.0


def run(stages: Sequence[Stage], flags: Mapping[str, Any], gpus: Topology, source: str) -> int:
    """Prints a recommendation for each stage, and writes the config file.

    Args:
      flags: goal, model, out, search_minutes, workers, price_per_gpu_hour, constants, host_memory_gib,
        devices_per_process; None selects a default.
      source: name and variant of the given config; "": none, only a model.
    Returns:
      The exit status: 1 if no configuration of a stage fits.
    Raises:
      UserError: an invalid flag; and as `recommendation.recommend`.
    """
    goal = flags["goal"] or GOALS[0]
    if goal not in GOALS:
        raise UserError(f"invalid --goal={goal}: expected one of {', '.join(GOALS)}")
    path = Path(flags["out"] or "recommended.py")
    check_path(path)
    assert gpus.devices  # raises here, rather than for every candidate, if the compiler is not installed
    roofline = from_file(flags["constants"] or "")
    num_workers = flags["workers"] or default_num_workers()
    compile_steps = compile_in_processes(
        num_workers,
        constants=flags["constants"] or "",
        host_memory_gib=flags["host_memory_gib"],
        devices_per_process=flags["devices_per_process"],
    )
    limit_seconds = 60 * (flags["search_minutes"] or _DEFAULT_MINUTES) / len(stages)
    results: list[Recommendation] = []
    for stage in stages:
        _log(f"searching: {stage.name + ', ' if stage.name else ''}{gpus}, {goal}")
        result = recommend(
            _searchable(stage.config),
            gpus,
            compile_steps,
            goal=goal,
            roofline=roofline,
            batch_size=num_workers,
            limit_seconds=limit_seconds,
            log=_progress(),
        )
        results.append(result)
        best = result.search.best
        costly = costly_settings(stage.config, best[0].config, best[0].candidate.gpus, roofline) if best else []
        if stage.name:
            print(f"STAGE {stage.name}")
        print(recommendation_page.page(result, flags["price_per_gpu_hour"], costly, roofline.pair_spread), end="\n\n")
    if not all(result.search.best for result in results):
        return 1
    configs = [_final(stage.config, result.search.best[0]) for stage, result in zip(stages, results)]
    base = _base(source, flags["model"] or "", stages)
    texts = (": ".join(filter(None, (x.name, trial_text(y.search.best[0])))) for x, y in zip(stages, results))
    title = f"Recommended for {gpus}, {goal}: {'; '.join(texts)}."
    path.write_text(config_source(source, flags["model"] or "", title, base, configs))
    print(f"wrote {path}: jaxlc plan --config={path}; jaxlc train --config={path} --config.data.sources=TEXTS")
    return 0


def _searchable(config: Config) -> Config:
    """Without settings of this machine."""
    runtime = dataclasses.replace(config.runtime, simulated_devices=0, num_processes=1, process_id=0)
    return dataclasses.replace(config, runtime=runtime)


def _final(given: Config, trial: Trial) -> Config:
    """The given config with the recommended settings, and the sizes of memory pools that the step needs."""
    memory = trial.plan.memory
    settings = dict(trial.candidate.settings)
    if memory.is_pool_resized:
        settings["runtime.memory_fraction"] = memory.pool_share
    if memory.is_heap_too_small:
        settings["runtime.nvshmem_heap_bytes"] = memory.sufficient_heap_bytes
    return with_settings(given, settings | {"runtime.simulated_devices": 0})


def _base(source: str, model: str, stages: Sequence[Stage]) -> Sequence[Stage]:
    """The given config, without overrides of the command line; of its stages those that --stage=NAME selects."""
    config = read_config(source) if source else defaults()
    if model:
        set_model(config, model)
    names = [stage.name for stage in stages]
    return [stage for stage in load_stages(config) if stage.name in names]


def _progress():
    start_seconds = time.monotonic()
    return lambda line: _log(f"{time.monotonic() - start_seconds:5.0f} s  {line}")


def _log(line: str) -> None:
    """Progress goes to stderr, the recommendation to stdout."""
    print(line, file=sys.stderr, flush=True)
