"""Stages: parts of a run with their own length, RoPE, schedule, mesh and data, which one command trains in order.

`config.stages` is a list of dictionaries. Each has the fields of `StageConfig` and, by section, the settings that the
stage changes: `dict(name="64k", steps=5000, data=dict(seq_len=65_536), model=dict(rope_theta=8e6))`. `load_stages`
resolves each stage to a complete `Config`. Imports no jax.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from jaxlc.config.checks.eval_checks import gate_names, parse_min_scores
from jaxlc.config.checks.unused_settings import check_used, unused_settings
from jaxlc.config.data_schema import DataConfig
from jaxlc.config.frozen import SECTIONS, Config
from jaxlc.config.loading import load
from jaxlc.config.schema import TrainConfig
from jaxlc.config.setting_paths import converted
from jaxlc.config.stage_schema import StageConfig, merged_settings
from jaxlc.config.values import SettingError, invalid_value
from jaxlc.core.errors import UserError, raise_first
from jaxlc.core.suggestions import did_you_mean

# Settings of the optimizer that make up a learning-rate schedule.
_SCHEDULE = (
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_steps",
    "initial_learning_rate_ratio",
    "final_learning_rate_ratio",
)


@dataclass(frozen=True, kw_only=True)
class Stage(StageConfig):
    """A stage that `load_stages` resolved. A config without stages is one stage without a name.

    `steps` and `tokens` are as in the config, 0 where not set; `num_steps` and `num_tokens` are always known.
    """

    config: Config  # complete; train.steps is the global step at which the stage ends
    first_step: int = 0  # global: optimizer steps of the stages before

    @property
    def end_step(self) -> int:
        """The global step after the last step of this stage."""
        return self.config.train.steps

    @property
    def num_steps(self) -> int:
        """Optimizer steps of this stage."""
        return self.end_step - self.first_step

    @property
    def num_tokens(self) -> int:
        """Tokens of this stage over all devices, padding included."""
        return self.num_steps * self.config.tokens_per_step


def load_stages(
    config: "ConfigDict | Config | tuple[Stage, ...]", *, overrides: Iterable[str] = ()
) -> tuple[Stage, ...]:
    """Checks and freezes every stage of a config; one stage without a name if it has none. Loaded stages are returned.

    Args:
      overrides: paths of settings of the config, such as "data.seq_len", that a stage must use.
    Raises:
      UserError: as `load`, with the name of the stage; or two stages that contradict each other.
    """
    if isinstance(config, tuple):
        return config
    if isinstance(config, ConfigDict) and config.get("stages"):
        stages = _resolved(converted("", config.to_dict()), overrides)
    else:
        stages = (Stage(name="", config=load(config)),)
    raise_first(unused_settings([stage.config for stage in stages]))
    return stages


def _resolved(values: dict[str, Any], overrides: Iterable[str]) -> tuple[Stage, ...]:
    """The stages of a config that has some."""
    changes: dict[str, dict[str, Any]] = values.pop("stages")
    used = [path for path in overrides if not path.startswith("stages.")]
    if values.get("data", {}).get("sources", DataConfig().sources) != DataConfig().sources:
        used.append("data.sources")
    for path in used:
        check_used(changes, path)
    own = [_own_settings(name, changed) for name, changed in changes.items()]
    raise_first(_contradictions(own, changes))
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
        schedule = {name: value for name, value in merged[head]["optimizer"].items() if name in _SCHEDULE}
        settings["optimizer"] |= schedule | {
            "schedule_steps": first_steps[end] - first_steps[head],
            "schedule_start": first_steps[head] - reset_step,
        }
        settings["train"]["steps"] = first_steps[index + 1]
        if "seed" not in changes[stage.name].get("data", {}):  # other orders of the same sequences
            settings["data"]["seed"] = settings["data"].get("seed", DataConfig().seed) + index
        complete = _load(stage.name, changes[stage.name], settings)
        stages.append(Stage(**vars(stage), config=complete, first_step=first_steps[index]))
    raise_first(_different_runs(stages))
    raise_first(_missing_scores(stages))
    return tuple(stages)


def _own_settings(name: str, settings: Mapping[str, Any]) -> StageConfig:
    """The settings of a stage other than those of sections.

    Raises:
      SettingError: one is out of range.
    """
    stage = StageConfig(name=name, **{key: value for key, value in settings.items() if key not in SECTIONS})
    parse_min_scores(stage.min_scores, f"stages.{name}.min_scores")
    for key in ("steps", "tokens", "max_eval_loss"):
        if getattr(stage, key) < 0:
            raise SettingError(invalid_value(f"stages.{name}.{key}", getattr(stage, key), "at least 0"))
    return stage


def _num_steps(stage: StageConfig, settings: Mapping[str, Mapping[str, Any]]) -> int:
    """The optimizer steps of a stage.

    Raises:
      UserError: it has neither steps nor tokens, or both.
    """
    if (stage.steps > 0) == (stage.tokens > 0):
        wrong = "both steps and tokens" if stage.steps else "neither steps nor tokens"
        raise UserError(f"config.stages.{stage.name} has {wrong}: set one of them")
    seq_len = settings["data"].get("seq_len", DataConfig().seq_len)
    tokens_per_step = seq_len * settings["train"].get("global_batch_size", TrainConfig().global_batch_size)
    return stage.steps or -(-stage.tokens // max(1, tokens_per_step))


def _load(name: str, own: Mapping[str, Any], settings: dict[str, dict[str, Any]]) -> Config:
    """The config of a stage. Errors name the settings that the stage changes as config.stages.NAME.SECTION.KEY."""
    try:
        return load(ConfigDict(settings))
    except UserError as error:
        message = str(error)
        for section in SECTIONS:
            for key in own.get(section, {}):
                message = re.sub(rf"\bconfig\.{section}\.{key}\b", f"config.stages.{name}.{section}.{key}", message)
        raise UserError(f"stage {name}: {message}") from error


def _contradictions(stages: Sequence[StageConfig], changes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Settings of stages that contradict each other, before they are resolved."""
    first, last = stages[0], stages[-1]
    for name, default in (("schedule", "new"), ("optimizer_state", "carry")):
        if getattr(first, name) != default:
            value = getattr(first, name)
            yield f"invalid value {value!r} for config.stages.{first.name}.{name}: expected {default!r} in stage one"
    if last.max_eval_loss:
        yield (
            f"config.stages.{last.name}.max_eval_loss={last.max_eval_loss} has no effect: no stage follows; use 0, or"
            " add a stage"
        )
    if last.min_scores:
        yield f"config.stages.{last.name}.min_scores has no effect: no stage follows; remove it, or add a stage"
    for stage in stages:
        if (stage.schedule, stage.optimizer_state) == ("continue", "reset"):
            yield (
                f"config.stages.{stage.name} has schedule='continue' and optimizer_state='reset': moments of zero need"
                f" a warm-up; use --config.stages.{stage.name}.schedule=new"
            )
        own = [key for key in _SCHEDULE if key in changes[stage.name].get("optimizer", {})]
        if stage.schedule == "continue" and own:
            yield (
                f"config.stages.{stage.name}.optimizer.{own[0]} has no effect with its schedule='continue'; use"
                f" --config.stages.{stage.name}.schedule=new"
            )


def _different_runs(stages: Sequence[Stage]) -> Iterator[str]:
    """Resolved settings that must be equal in all stages."""
    first = stages[0]
    for stage in stages[1:]:
        if stage.config.mesh.num_devices != first.config.mesh.num_devices:
            yield (
                f"stage {stage.name} has a mesh of {stage.config.mesh.num_devices} devices and stage {first.name} one"
                f" of {first.config.mesh.num_devices}; a run uses the same devices in all stages"
            )
        if bool(stage.config.optimizer.max_grad_norm) != bool(first.config.optimizer.max_grad_norm):
            yield (
                f"unsupported: optimizer.max_grad_norm is 0 in one of the stages {first.name} and {stage.name} only,"
                " which changes the state of the optimizer; use a large value instead of 0"
            )


def _missing_scores(stages: Sequence[Stage]) -> Iterator[str]:
    """Gates that name a score which config.evals does not compute."""
    for stage in stages:
        names = gate_names(stage.config)
        for name in parse_min_scores(stage.min_scores, "min_scores"):
            if name not in names:
                known = did_you_mean(name, names) if names else "no evals.tasks"
                yield f"config.stages.{stage.name}.min_scores: no score {name!r} in this stage: {known}"
