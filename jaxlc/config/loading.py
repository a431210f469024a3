"""Converts an editable ConfigDict to checked and frozen dataclasses. Imports no jax.

Stages are parts of a run with their own length, RoPE, schedule, mesh and data, which one command
trains in order. `config.stages` is a list of dictionaries. Each has the fields of `StageConfig`
and, by section, the settings that the stage changes: `dict(name="64k", steps=5000,
data=dict(seq_len=65_536), model=dict(rope=dict(theta=8e6)))`. `load_stages` resolves each stage to
a complete `Config`.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxlc.config.checks.all_checks import check
from jaxlc.config.checks.stage_checks import SCHEDULE, check_used, contradictions, run_problems
from jaxlc.config.frozen import (
    DEFAULT_PRESET,
    NAMED_PARTS,
    SECTIONS,
    Config,
    Stage,
    StageConfig,
    merged_settings,
    to_dict,
)
from jaxlc.config.models.model_schema import model_from, with_scaling
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.models.pretrained import locate, with_overrides
from jaxlc.config.schema import CHAT_TEMPLATES, DataConfig, TrainConfig
from jaxlc.config.settings import converted, set_at
from jaxlc.config.values import flattened
from jaxlc.core import UserError, checked, raise_all, raise_first, reason_of
from jaxlc.core.files import local_path

ADVICE = f"set --config.data.chat_template to {', '.join(CHAT_TEMPLATES)} or a Jinja file"


def template_path(setting: str) -> Path | None:
    """The path in data.chat_template; None if it is empty, one of CHAT_TEMPLATES or the text of a
    template.
    """
    if not setting or setting in CHAT_TEMPLATES or "{" in setting:
        return None
    return local_path(setting)


def read_template(path: Path, advice: str = ADVICE) -> str:
    """The text of a chat template.

    Args:
      advice: how to set a template, for the error.
    Raises:
      UserError: the file cannot be read, or is no Jinja template.
    """
    import jinja2  # only where a file is named

    try:
        text = path.read_text(encoding="utf-8")
        # The tag `generation` of published templates is an extension of
        # `jaxlc.data.tokens.chat_templates`.
        without_tag = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", text)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_tag)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the chat template {str(path)!r} ({reason_of(error)}): {advice}"
        ) from error
    except (
        jinja2.TemplateSyntaxError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: a number of 5,000 digits
        line = f" line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UserError(
            f"{path}{line} is not a valid Jinja template ({reason_of(error)})"
        ) from error
    return text


def load(config: ConfigDict | Config, *, on_devices: bool = True) -> Config:
    """Checks a config and freezes it. Missing settings get their defaults; a Config is checked again.

    Args:
      on_devices: whether the mesh must divide the model and the sequences.
    Raises:
      UserError: an unknown setting, a value of the wrong type or out of range, or two values that contradict each
        other. The message is one line with the value and what to do.
    """
    if not isinstance(config, ConfigDict | Config):
        raise UserError(
            f"invalid config {config!r}: expected what jaxlc.config.read_config or defaults returns"
        )
    values = to_dict(config) if isinstance(config, Config) else config.to_dict()
    return from_dict(values, on_devices=on_devices)


def from_dict(values: Mapping[str, Any], *, on_devices: bool = True) -> Config:
    """The Config that `to_dict` converted, such as the one that a checkpoint stores.

    Args:
      on_devices: as for `load`.
    Raises:
      UserError: as `load`.
    """
    parts: dict[str, Any] = converted("", values)
    if stages := parts.pop("stages", {}):
        names = ", ".join(stages)
        raise UserError(
            f"the config has the stages {names}: use jaxlc.config.load_stages, and the config of one stage"
        )
    sections = {
        section: {
            name: value for name, value in parts.get(section, {}).items() if value is not None
        }
        for section in SECTIONS
    }
    for section, name in (("model", "init_from"), ("data", "tokenizer")):
        value = sections[section].get(name, "")
        if value not in ("", "bytes") and (path := local_path(value)).exists():
            # for checkpoints: a run may be loaded from another working directory
            sections[section][name] = str(path.absolute())
    kinds = sections["model"].pop("kinds", {})
    model = {
        path: value for path, value in flattened(sections["model"]).items() if value is not None
    }
    sections["model"] = _with_shape(model | {"kinds": kinds})
    train = sections["train"]
    given = {name: train[name] for name in ("steps", "tokens", "epochs") if train.get(name)}
    if len(given) > 1:
        settings = " and ".join(f"config.train.{name}={value}" for name, value in given.items())
        raise UserError(
            f"{settings} are set: keep one of them, and set the other to 0, such as --config.train.steps=0"
        )
    if given.get("tokens", 0) > 0:
        train["steps"] = -(-given["tokens"] // _tokens_per_step(train, sections["data"]))
        train["tokens"] = 0
    elif "epochs" in given:  # the steps are not known before the data is read
        train["steps"] = TrainConfig().steps
    if "tokenizer" not in sections["data"] and sections["model"]["init_from"]:
        sections["data"] = locate(sections["model"]["init_from"]).data_settings() | sections["data"]
    template = template_path(sections["data"].get("chat_template", ""))
    if template and template.is_file():
        # A checkpoint has the text, because the file may change or go away.
        sections["data"]["chat_template"] = read_template(template)
    for (section, setting), part in NAMED_PARTS.items():
        # the order in a config has no effect
        fields_by_name = sorted(sections[section].get(setting, {}).items())
        sections[section][setting] = tuple(
            part(name=name, **fields) for name, fields in fields_by_name
        )
    parts = {name: part(**sections[name]) for name, part in SECTIONS.items() if name != "model"}
    loaded = Config(model=model_from(sections["model"]), **parts)
    check(loaded, on_devices=on_devices)
    return loaded


@checked
def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of the config with other values, by their paths: {"mesh.context": 8}.

    Raises:
      UserError: as `load`.
    """
    values = to_dict(config)
    for path, value in settings.items():
        set_at(values, path, value)
    return from_dict(values)


def _with_shape(model: dict[str, Any]) -> dict[str, Any]:
    """The settings of the model on top of those of init_from or of its preset.

    A config that was loaded before has all of them, and init_from is not read again: the model may
    be gone.
    """
    preset = PRESETS[model.get("preset", DEFAULT_PRESET)]
    shape = {**preset.by_path, "kinds": dict[str, Any]()}
    if shape.keys() <= model.keys():
        return model
    if not model.get("init_from"):
        settings = with_scaling(shape, model)
        used = (*settings["first_layer_kinds"], *settings["layer_kinds"])
        own = {x.name: dict(vars(x)) for x in preset.kinds if x.name in used}
        for kind in own.values():
            del kind["name"]
        return settings | {"kinds": own | settings["kinds"]}
    explicit = {
        name: value
        for name, value in model.items()
        if name not in ("preset", "init_from") and value != {}
    }
    settings = with_overrides(locate(model["init_from"]), explicit)
    return shape | settings | {"preset": DEFAULT_PRESET, "init_from": model["init_from"]}


def load_stages(
    config: "ConfigDict | Config | tuple[Stage, ...]",
    *,
    overrides: Iterable[str] = (),
    on_devices: bool = True,
) -> tuple[Stage, ...]:
    """Checks and freezes every stage of a config; one stage without a name if it has none. Loaded
    stages are returned.

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


def _resolved(
    values: dict[str, Any], overrides: Iterable[str], on_devices: bool
) -> tuple[Stage, ...]:
    """The stages of a config that has some."""
    changes: dict[str, dict[str, Any]] = values.pop("stages")
    used = [path for path in overrides if not path.startswith("stages.")]
    if values.get("data", {}).get("sources", ()) not in ((), DataConfig().sources):
        used.append("data.sources")
    for path in used:
        check_used(changes, path)
    own = [
        StageConfig(
            name=name, **{key: value for key, value in changed.items() if key not in SECTIONS}
        )
        for name, changed in changes.items()
    ]
    raise_first(contradictions(own, changes))
    merged = [merged_settings(values, changed) for changed in changes.values()]
    num_steps = (
        stage.steps or -(-stage.tokens // _tokens_per_step(settings["train"], settings["data"]))
        for stage, settings in zip(own, merged)
    )
    first_steps = [0, *itertools.accumulate(num_steps)]
    new_schedules = [index for index, stage in enumerate(own) if stage.schedule == "new"]
    stages = list[Stage]()
    problems = list[str]()
    reset_step = 0
    for index, (stage, settings) in enumerate(zip(own, merged)):
        if stage.optimizer_state == "reset":
            reset_step = first_steps[index]
        head = max(i for i in new_schedules if i <= index)
        end = min((i for i in new_schedules if i > index), default=len(own))
        schedule = {
            name: value for name, value in merged[head]["optimizer"].items() if name in SCHEDULE
        }
        settings["optimizer"] |= schedule | {
            "schedule_steps": first_steps[end] - first_steps[head],
            "schedule_start": first_steps[head] - reset_step,
        }
        settings["train"] |= dict(steps=first_steps[index + 1], tokens=0, epochs=0.0)
        if "seed" not in changes[stage.name].get("data", {}):  # other orders of the same sequences
            settings["data"]["seed"] = settings["data"].get("seed", DataConfig().seed) + index
        try:
            complete = from_dict(settings, on_devices=on_devices)
            stages.append(Stage(**vars(stage), config=complete, first_step=first_steps[index]))
        except UserError as error:
            message = str(error)
            # settings that the stage changes have their names in it
            for path in (f"{x}.{key}" for x in SECTIONS for key in changes[stage.name].get(x, {})):
                own_path = f"config.stages.{stage.name}.{path}"
                message = re.sub(rf"\bconfig\.{path}\b", own_path, message)
            problems.append(f"stage {stage.name}: {message}")
    raise_all(problems)
    return tuple(stages)


def _tokens_per_step(train: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    seq_len = data.get("seq_len", DataConfig().seq_len)
    return max(1, seq_len * train.get("global_batch_size", TrainConfig().global_batch_size))
