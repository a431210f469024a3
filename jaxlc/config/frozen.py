"""The frozen config of a run, its default values, and its representations. Imports no jax."""

import typing
from dataclasses import dataclass
from typing import Any

from jaxlc.config import differences
from jaxlc.config.differences import NAMED_PARTS
from jaxlc.config.flops import StepFlops, document_pairs, step_flops
from jaxlc.config.models.model_schema import ModelConfig
from jaxlc.config.models.presets import PRESETS
from jaxlc.config.schema import RunConfig
from jaxlc.config.values import defaults_of, plain

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
        return step_flops(self.model, self.lora, self.train, num_tokens=self.tokens_per_step, num_pairs=num_pairs)

    def __repr__(self) -> str:
        return differences.as_text("Config", to_dict(self), default_values(self.model.preset))

    def _repr_html_(self) -> str:
        return differences.as_html("Config", to_dict(self), default_values(self.model.preset))


SECTIONS: dict[str, type] = {"model": ModelConfig, **typing.get_type_hints(RunConfig)}


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as plain JSON types; `load(ConfigDict(to_dict(config)))` equals `config`."""
    values = {section: _plain(getattr(config, section)) for section in SECTIONS}
    for section, name in NAMED_PARTS:
        values[section][name] = {part.pop("name"): part for part in map(_plain, values[section][name])}
    return values


def _plain(part: Any) -> dict[str, Any]:
    """The values of a section, source or kind of layers, with lists for tuples."""
    values = {name: plain(value) for name, value in vars(part).items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def default_values(preset: str) -> dict[str, dict[str, Any]]:
    """The default of every setting, section by section; for the model, those of `preset`, a key of PRESETS."""
    sections = {section: defaults_of(cls) for section, cls in SECTIONS.items()}
    sections["model"] = {name: plain(value) for name, value in vars(PRESETS[preset]).items()}
    sections["model"]["preset"] = DEFAULT_PRESET
    for section, name in NAMED_PARTS:
        sections[section][name] = dict[str, Any]()
    return sections
