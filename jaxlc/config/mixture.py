"""`data.mixture`: named sources, as dictionaries {NAME: {FIELD: value}} while a config is edited. Imports no jax.

A dictionary has only the fields that are set, so that two of them can be merged; `load` makes a `SourceConfig` of each.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxlc.config.data_schema import DataConfig, SourceConfig
from jaxlc.config.values import SettingError, invalid_value, typed
from jaxlc.core.suggestions import did_you_mean, nearest_name

PATH = "data.mixture"
FIELDS = {name: hint for name, hint in typing.get_type_hints(SourceConfig).items() if name != "name"}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(SourceConfig) if field.name != "name"}
_PREFIX = f"{PATH}."


def is_mixture(section: str, name: str) -> bool:
    """Whether a setting is a mixture, whose value is a dictionary of sources."""
    return f"{section}.{name}" == PATH


def is_source_path(path: str) -> bool:
    """Whether `path` is inside a mixture: "data.mixture.books.share"."""
    return path.startswith(_PREFIX)


def split_source_path(path: str) -> tuple[str, str]:
    """The name of the source and the field: "data.mixture.books.share" -> ("books", "share").

    Raises:
      SettingError: the path does not have this form, or there is no such field.
    """
    name, _, field = path.removeprefix(_PREFIX).partition(".")
    if not name or not field:
        raise SettingError(f"config.{path}: set a field of a source, such as config.{PATH}.{name or 'NAME'}.share=0.3")
    _check_name(name)
    _check_field(name, field)
    return name, field


def parse_mixture(value: Any) -> dict[str, dict[str, Any]]:
    """`value`, {NAME: {FIELD: value}}, with the declared types of the fields.

    Raises:
      SettingError: it is not a dictionary of dictionaries, or has an unknown field or a value of a wrong type.
    """
    if not isinstance(value, (Mapping, ConfigDict)):
        if value in ((), []):
            return {}
        raise SettingError(
            invalid_value(PATH, value, "a dictionary of sources, such as {'books': {'paths': 'a.jsonl'}}")
        )
    return {name: _parse_source(name, fields) for name, fields in value.items()}


def merged_mixture(
    base: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`base` with the fields in `changes`, source by source."""
    return {name: {**base.get(name, {}), **changes.get(name, {})} for name in (*base, *changes)}


def source_configs(mixture: Mapping[str, Mapping[str, Any]]) -> tuple[SourceConfig, ...]:
    """The sources of `parse_mixture`, sorted by name: their order in a config has no effect."""
    return tuple(SourceConfig(name=name, **fields) for name, fields in sorted(mixture.items()))


def mixture_dict(sources: tuple[SourceConfig, ...]) -> dict[str, dict[str, Any]]:
    """The inverse of `source_configs`, with all fields, as plain JSON types."""
    values = [dataclasses.asdict(source) for source in sources]
    return {
        fields.pop("name"): {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        for fields in values
    }


def mixture_problems(data: DataConfig) -> Iterator[str]:
    """Values of sources that are out of range or contradict each other, as messages."""
    names = [source.name for source in data.mixture]
    if names and all(source.share == 0 for source in data.mixture):
        yield f"all shares of config.{PATH} are 0: give a source a share greater than 0"
    for source in data.mixture:
        for problem in _source_problems(source, data.seq_len, names):
            yield f"config.{PATH}.{source.name}.{problem}"


def _source_problems(source: SourceConfig, seq_len: int, names: list[str]) -> Iterator[str]:
    if not source.paths or "" in source.paths:
        others = [name for name in names if name != source.name]
        nearest = nearest_name(source.name, others)
        question = f"; did you mean the source {nearest}?" if nearest else ""
        yield f"paths is {source.paths}: give files, directories or glob patterns{question}"
    if source.share < 0:
        yield f"share={source.share}: expected at least 0"
    if source.chunk_tokens and not 1 <= source.chunk_tokens <= seq_len:
        yield f"chunk_tokens={source.chunk_tokens}: expected 1 to config.data.seq_len={seq_len}, or 0"
    if source.chunk_tokens and source.pool == "full_length":
        yield f"chunk_tokens={source.chunk_tokens} contradicts pool='full_length', whose chunks are full sequences"
    if source.overlong == "drop" and source.pool == "full_length":
        yield "overlong='drop' contradicts pool='full_length': no document would be left; use overlong='truncate'"
    if source.token_field and source.chat_field:
        yield f"token_field={source.token_field!r} and chat_field={source.chat_field!r} are both set: set one of them"
    if source.answer_weights != DEFAULTS["answer_weights"] and not source.chat_field:
        yield f"answer_weights={source.answer_weights!r} has no effect without chat_field; set it, such as to messages"
    if source.text_field != DEFAULTS["text_field"] and (source.chat_field or source.token_field):
        other = "chat_field" if source.chat_field else "token_field"
        yield f"text_field={source.text_field!r} has no effect with {other}={getattr(source, other)!r}; remove one"
    if source.min_tokens < 0 or source.max_tokens < 0:
        yield f"min_tokens={source.min_tokens} and max_tokens={source.max_tokens}: expected at least 0"
    if source.max_tokens and source.max_tokens < source.min_tokens:
        yield f"max_tokens={source.max_tokens} is less than min_tokens={source.min_tokens}: no document is left"
    limits, weights = source.length_limits, source.length_weights
    if list(limits) != sorted(set(limits)) or any(limit < 1 for limit in limits):
        yield f"length_limits={limits}: expected increasing numbers of tokens, at least 1"
    if (weights or limits) and len(weights) != len(limits) + 1:
        yield (
            f"length_weights has {len(weights)} values and length_limits {len(limits)}: expected one weight more than"
            " limits"
        )
    if weights and (min(weights) < 0 or max(weights) == 0):
        yield f"length_weights={weights}: expected weights of at least 0, one of them greater"


def _parse_source(name: str, fields: Any) -> dict[str, Any]:
    _check_name(name)
    if not isinstance(fields, (Mapping, ConfigDict)):
        raise SettingError(
            invalid_value(f"{_PREFIX}{name}", fields, "a dictionary of its fields, such as {'paths': ...}")
        )
    for field in fields:
        _check_field(name, field)
    return {field: typed(f"{_PREFIX}{name}.{field}", value, FIELDS[field]) for field, value in fields.items()}


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z][\w-]*", name):
        raise SettingError(f"invalid name {name!r} of a source in config.{PATH}: use letters, digits, '_' and '-'")


def _check_field(name: str, field: str) -> None:
    if field not in FIELDS:
        question = did_you_mean(field, FIELDS, f"config.{_PREFIX}{name}.{{}}")
        raise SettingError(f"unknown setting config.{_PREFIX}{name}.{field}: {question}")


class MixtureSettings(ConfigDict):
    """The sources of an editable config: `config.data.mixture.books.share = 0.3`, or a dictionary for a new source."""

    def __init__(self, sources: Mapping[str, Mapping[str, Any]] | None = None):
        super().__init__()
        for name, fields in (sources or {}).items():
            self[name] = fields

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets all fields of a source.

        Raises:
          SettingError: as `parse_mixture`.
        """
        super().__setitem__(key, _SourceSettings(parse_mixture({key: value})[key]))

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in self.keys() and not attribute.startswith("_"):
            question = did_you_mean(attribute, self.keys() or ["(none)"])
            raise SettingError(
                f"unknown source config.{_PREFIX}{attribute}: {question}; add it with"
                f" config.{_PREFIX}{attribute} = dict(paths=...)"
            )
        return super().__getattr__(attribute)

    def set_field(self, path: str, value: Any) -> None:
        """Sets the field at a path such as "data.mixture.books.share"; a new name adds a source.

        Raises:
          SettingError: as `parse_mixture`.
        """
        name, field = split_source_path(path)
        self[name] = {**(self[name].to_dict() if name in self else {}), field: value}

    def __reduce__(self) -> tuple[Any, ...]:
        return MixtureSettings, (self.to_dict(),)

    def __str__(self) -> str:
        return "\n".join(["", *(f"    {name}: {source}" for name, source in self.items())])


class _SourceSettings(ConfigDict):
    """The fields of one source that are set; reading another field gives its default."""

    def __init__(self, fields: Mapping[str, Any]):
        super().__init__()
        for name, value in fields.items():
            self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, parse_mixture({"NAME": {key: value}})["NAME"][key])

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in self.keys() and not attribute.startswith("_"):
            _check_field("NAME", attribute)
            return DEFAULTS[attribute]
        return super().__getattr__(attribute)

    def __reduce__(self) -> tuple[Any, ...]:
        return _SourceSettings, (self.to_dict(),)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.items())
