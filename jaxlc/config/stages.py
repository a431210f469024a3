"""Stages: parts of a run with their own length, RoPE, schedule, mesh and data, which one command trains in order.

`config.stages` is a list of dictionaries. Each has the fields of `StageConfig` and, by section, the settings that the
stage changes: `dict(name="64k", steps=5000, data=dict(seq_len=65_536), model=dict(rope_theta=8e6))`. `load_stages`
resolves each stage to a complete `Config`. Imports no jax.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxlc.config.checks.stage_checks import SCHEDULE, check_used, contradictions, run_problems
from jaxlc.config.frozen import SECTIONS, Config
from jaxlc.config.loading import from_dict, load
from jaxlc.config.schema import DataConfig, TrainConfig
from jaxlc.config.setting_paths import converted
from jaxlc.config.stage_schema import Stage, StageConfig, merged_settings
from jaxlc.core.errors import UserError, raise_first


def load_stages(
    config: "ConfigDict | Config | tuple[Stage, ...]", *, overrides: Iterable[str] = (), on_devices: bool = True
) -> tuple[Stage, ...]:
    """Checks and freezes every stage of a config; one stage without a name if it has none. Loaded stages are returned.

    Args:
      overrides: paths of settings of the config, such as "data.seq_len", that a stage must use.
      on_devices: as for `load`.
    Raises:
      UserError: as `load`, with the name of the stage; or two stages that contradict each other.
    """
    if isinstance(config, tuple):
        return config
    if isinstance(config, ConfigDict) and config.get("stages"):
        stages = _resolved(converted("", config.to_dict()), overrides, on_devices)
    else:
        stages = (Stage(name="", config=load(config, on_devices=on_devices)),)
    raise_first(run_problems(stages))
    return stages


def _resolved(values: dict[str, Any], overrides: Iterable[str], on_devices: bool) -> tuple[Stage, ...]:
    """The stages of a config that has some."""
    changes: dict[str, dict[str, Any]] = values.pop("stages")
    used = [path for path in overrides if not path.startswith("stages.")]
    if values.get("data", {}).get("sources", ()) not in ((), DataConfig().sources):
        used.append("data.sources")
    for path in used:
        check_used(changes, path)
    own = [
        StageConfig(name=name, **{key: value for key, value in changed.items() if key not in SECTIONS})
        for name, changed in changes.items()
    ]
    raise_first(contradictions(own, changes))
    merged = [merged_settings(values, changed) for changed in changes.values()]
    first_steps = [0, *itertools.accumulate(map(_num_steps, own, merged))]
    new_schedules = [index for index, stage in enumerate(own) if stage.schedule == "new"]
    stages: list[Stage] = []
    reset_step = 0
    for index, (stage, settings) in enumerate(zip(own, merged)):
        if stage.optimizer_state == "reset":
            reset_step = first_steps[index]
        head = max(i for i in new_schedules if i <= index)
        end = min((i for i in new_schedules if i > index), default=len(own))
        schedule = {name: value for name, value in merged[head]["optimizer"].items() if name in SCHEDULE}
        settings["optimizer"] |= schedule | {
            "schedule_steps": first_steps[end] - first_steps[head],
            "schedule_start": first_steps[head] - reset_step,
        }
        settings["train"]["steps"] = first_steps[index + 1]
        if "seed" not in changes[stage.name].get("data", {}):  # other orders of the same sequences
            settings["data"]["seed"] = settings["data"].get("seed", DataConfig().seed) + index
        complete = _load(stage.name, changes[stage.name], settings, on_devices)
        stages.append(Stage(**vars(stage), config=complete, first_step=first_steps[index]))
    return tuple(stages)


def _load(name: str, own: Mapping[str, Any], settings: dict[str, dict[str, Any]], on_devices: bool) -> Config:
    """The config of a stage. Errors name the settings that the stage changes as config.stages.NAME.SECTION.KEY."""
    try:
        return from_dict(settings, on_devices=on_devices)
    except UserError as error:
        message = str(error)
        for section in SECTIONS:
            for key in own.get(section, {}):
                message = re.sub(rf"\bconfig\.{section}\.{key}\b", f"config.stages.{name}.{section}.{key}", message)
        raise UserError(f"stage {name}: {message}") from error


def _num_steps(stage: StageConfig, settings: Mapping[str, Mapping[str, Any]]) -> int:
    """The optimizer steps of a stage."""
    seq_len = settings["data"].get("seq_len", DataConfig().seq_len)
    tokens_per_step = seq_len * settings["train"].get("global_batch_size", TrainConfig().global_batch_size)
    return stage.steps or -(-stage.tokens // max(1, tokens_per_step))
