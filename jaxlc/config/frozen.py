"""The frozen config of a run, its default values, and the settings that differ from them, as text
and as HTML; the stages of a config, and the settings that a stage may change. Imports no jax.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxlc.config.flops import StepFlops, document_pairs, step_flops
from jaxlc.config.models.model_schema import KindConfig, ModelConfig
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.schema import RunConfig, SourceConfig
from jaxlc.config.values import as_argument, defaults_of, flattened, plain
from jaxlc.core import paragraph, preformatted
from jaxlc.core.text import details, table

# (section, setting) -> the class of the parts with names that it contains.
NAMED_PARTS: dict[tuple[str, str], type] = {
    ("data", "mixture"): SourceConfig,
    ("model", "kinds"): KindConfig,
}
Values = Mapping[str, Mapping[str, Any]]  # section -> name -> value


def differences(values: Values, defaults: Values) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (section, name, value, default) of each value that differs from its default."""
    for section, name, value, default in _all_values(values, defaults):
        if setting_text(value) != setting_text(default):
            yield section, name, value, default


def _all_values(values: Values, defaults: Values) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (section, name, value, default) of each setting; the name is mixture.NAME.FIELD for
    those of a source.
    """
    for section, fields in defaults.items():
        given = values.get(section, {})
        for name, default in fields.items():
            parts = {name: default}
            if part := NAMED_PARTS.get((section, name)):
                parts[name] = dict.fromkeys(given.get(name) or (), defaults_of(part))
            own = flattened({name: given.get(name)})
            for path, known in flattened(parts).items():
                value = own.get(path)
                yield section, path, known if value is None else value, known


def setting_text(value: Any) -> str:
    """A value as it is written on the command line, an empty one as () or ''."""
    return as_argument(value) or ("''" if value == "" else "()")


def as_text(title: str, values: Values, defaults: Values) -> str:
    """One line per section that has differences."""
    lines: dict[str, list[str]] = {}
    for section, name, value, _ in differences(values, defaults):
        lines.setdefault(section, []).append(f"{name}={setting_text(value)}")
    if not lines:
        return f"{title}: all settings have their defaults"
    width = max(map(len, lines))
    body = [f"  {section:<{width}}  {' '.join(settings)}" for section, settings in lines.items()]
    return "\n".join([f"{title}: differences from the defaults", *body])


def as_html(title: str, values: Values, defaults: Values) -> str:
    """A table of the differences, and all settings of the sections in `values` in a collapsed
    block.
    """
    rows: list[tuple[str, str, str, str]] = []
    last_section = ""
    for section, name, value, default in differences(values, defaults):
        rows.append(
            (
                "" if section == last_section else section,
                name,
                setting_text(value),
                setting_text(default),
            )
        )
        last_section = section
    text = (
        f"{title}: differences from the defaults"
        if rows
        else f"{title}: all settings have their defaults"
    )
    header = ("section", "setting", "value", "default")
    summary = table(header, rows, caption=text) if rows else paragraph(text)
    shown = {section: fields for section, fields in defaults.items() if section in values}
    lines = [
        f"{section}.{name} = {setting_text(value)}"
        for section, name, value, _ in _all_values(values, shown)
    ]
    return summary + details(f"all {len(lines)} settings", preformatted("\n".join(lines)))


DEFAULT_PRESET = "tiny"


@dataclass(frozen=True, kw_only=True, repr=False)
class Config(RunConfig):
    """All settings of a run. `print` and notebooks show the differences from the defaults."""

    model: ModelConfig

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one optimizer step over all devices, with causal attention."""
        pairs = document_pairs(self.model, [self.data.seq_len])
        return self.step_flops(self.train.global_batch_size * pairs).total

    def step_flops(self, num_pairs: float) -> StepFlops:
        """Model FLOPs of one optimizer step over all devices.

        Args:
          num_pairs: pairs of a query and a key, summed over the sequences of the step and over the layers.
        """
        return step_flops(
            self.model, self.lora, self.train, num_tokens=self.tokens_per_step, num_pairs=num_pairs
        )

    def __repr__(self) -> str:
        return as_text("Config", to_dict(self), default_values(self.model.preset))

    def _repr_html_(self) -> str:
        return as_html("Config", to_dict(self), default_values(self.model.preset))


SECTIONS: dict[str, type] = {"model": ModelConfig, **typing.get_type_hints(RunConfig)}


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as plain JSON types; `load(ConfigDict(to_dict(config)))` equals `config`."""
    values = {section: _plain(getattr(config, section)) for section in SECTIONS}
    if config.train.epochs:  # the steps are not known yet
        values["train"]["steps"] = 0
    for section, name in NAMED_PARTS:
        values[section][name] = {
            part.pop("name"): part for part in map(_plain, values[section][name])
        }
    return values


def unchecked(config: Config, settings: Mapping[str, Any], **sections: Any) -> Config:
    """The config with other values, without the checks of `jaxlc.config.with_settings`, which take
    milliseconds.

    Args:
      settings: by path: "mesh.context" -> 8.
      sections: replaced as a whole.
    """
    parts: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        parts.setdefault(section, {})[name] = value
    for section, values in parts.items():
        sections[section] = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **sections)


def _plain(part: Any) -> dict[str, Any]:
    """The values of a section, source or kind of layers, with lists for tuples."""
    values = dict(vars(part))
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = _plain(value)
        elif isinstance(value, tuple):
            values[name] = list(value)
    return values


def default_values(preset: str) -> dict[str, dict[str, Any]]:
    """The default of every setting, section by section; for the model, those of `preset`, a key of
    PRESETS.
    """
    sections = {section: defaults_of(cls) for section, cls in SECTIONS.items()}
    sections["model"] = {name: plain(value) for name, value in vars(PRESETS[preset]).items()}
    sections["model"]["preset"] = DEFAULT_PRESET
    for section, name in NAMED_PARTS:
        sections[section][name] = dict[str, Any]()
    return sections


# Settings that a stage may change: whole sections, and single settings of others. The rest belongs
# to the run.
_SECTIONS = ("attention", "data", "evals", "memory", "mesh", "optimizer", "train")
_RUN_SETTINGS = (
    "model.rope.fraction", "data.tokenizer", "data.end_token", "data.start_token",
    "train.seed", "train.keep_checkpoints", "train.keep_every_steps", "train.keep_best_checkpoints",
    "train.local_checkpoints", "train.wandb_project",
)  # fmt: skip
# set by the lengths of stages
RUN_LENGTHS = ("train.steps", "train.tokens", "train.epochs")
FROM_LENGTHS = (*RUN_LENGTHS, "optimizer.schedule_steps", "optimizer.schedule_start")


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage: its name, length and border, and the settings that it changes, as
    --config.stages.NAME.SECTION.KEY.
    """

    name: str  # name of the stage in metrics, plots and messages: letters, digits, "_", "-"
    steps: int = 0  # optimizer steps of the stage; 0: derived from tokens
    # tokens of the stage, padding included, rounded up to whole steps; 0: derived from steps
    tokens: int = 0
    # learning-rate schedule. new: that of the stage's optimizer settings, over its own steps, with its own warm-up.
    # continue: the stage before started a schedule over the steps of both.
    schedule: Literal["new", "continue"] = "new"
    # optimizer state at the start of the stage. carry: that of the stage before. reset: moments and
    # update count of 0.
    optimizer_state: Literal["carry", "reset"] = "carry"
    # gate: with a held-out loss above this limit at its end, in nats, the run stops before the next
    # stage. 0: none.
    max_eval_loss: float = 0.0
    # gate: with a score of config.evals below its limit at its end, the run stops before the next stage; a list of
    # TASK@LENGTH=SCORE, such as needle@65536=80, in percent, and in nats for context_gain_N.
    min_scores: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stage(StageConfig):
    """A stage that `load_stages` resolved. A config without stages is one stage without a name.

    `steps` and `tokens` are as in the config, 0 where not set; `num_steps` and `num_tokens` are
    always known.
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


def refusal(stage: str, path: str) -> str:
    """The reason why a stage cannot change a setting such as "train.seed"; "" if it can.

    Args:
      stage: its name, for the message.
    """
    section, _, name = path.partition(".")
    if path in RUN_LENGTHS:
        own = path.removeprefix("train.").replace("epochs", "tokens")
        return f"config.stages.{stage}.{path}: set config.stages.{stage}.{own}, its own number of {own}"
    is_allowed = name.split(".")[0] == "rope" if section == "model" else section in _SECTIONS
    if not name or (is_allowed and path not in _RUN_SETTINGS):
        return ""
    reason = (
        "stages change only RoPE settings of the model"
        if section == "model"
        else "all stages share it"
    )
    return f"unsupported: config.stages.{stage}.{path}; {reason}, so set config.{path}"


def merged_settings(
    values: Mapping[str, Any], stage: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The settings of a config with the changes of a stage; every section is a new dictionary.

    The mixture of a stage names its sources; their other fields are those of the config's source of
    the same name.
    """
    merged = {
        section: {**values.get(section, {}), **stage.get(section, {})} for section in SECTIONS
    }
    own = stage.get("data", {})
    data = merged["data"]
    mixture = values.get("data", {}).get("mixture", {})
    if "mixture" in own:
        data["mixture"] = {
            name: {**mixture.get(name, {}), **fields} for name, fields in own["mixture"].items()
        }
    if "mixture" in own and "sources" not in own:
        data.pop("sources", None)
    if "sources" in own and "mixture" not in own:
        data.pop("mixture", None)
    return merged
