"""The settings as text for `--help`, from the sources of their classes: the comments of a field document it."""

import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from jaxlc.config import mixture
from jaxlc.config.data_schema import SourceConfig
from jaxlc.config.frozen import DEFAULT_PRESET, SECTIONS, default_values, field_types
from jaxlc.config.mixture import is_mixture
from jaxlc.config.settings import defaults
from jaxlc.config.stage_configs import OWN_FIELDS, StageConfig
from jaxlc.config.values import describe_type

_KEY_WIDTH, _WIDTH = 54, 160
HELP_SECTIONS = (*SECTIONS, "stages")


class Setting(NamedTuple):
    """A setting as the help describes it."""

    key: str  # "mesh.context"; with NAME for a source or a stage: "stages.NAME.steps"
    default: str  # as on the command line
    comment: str
    hint: Any  # its type


def settings_help(sections: Iterable[str] = HELP_SECTIONS) -> str:
    """The settings of `sections`: key, default, description and, where they are few, the allowed values."""
    lines: list[str] = []
    for section in sections:
        lines.append(f"\n{section}: {section_text(section)}")
        for setting in settings_of(section):
            lines += _setting_help(setting)
    return "\n".join(lines)


def section_text(section: str) -> str:
    """What a section of HELP_SECTIONS is for: the docstring of its class."""
    return " ".join((inspect.getdoc(_class_of(section)) or "").split())


def settings_of(section: str) -> Iterator[Setting]:
    """The settings of a section of HELP_SECTIONS, of the sources of a mixture, and of a stage."""
    comments = field_comments(_class_of(section))
    if section == "stages":
        stage = vars(StageConfig(name=""))
        for name, hint in OWN_FIELDS.items():
            if name != "name":
                yield Setting(f"stages.NAME.{name}", _as_argument(stage[name]), comments[name], hint)
        return
    config = defaults()[section]
    for name, hint in field_types(section).items():
        if is_mixture(section, name):
            yield Setting(mixture.PATH, "", comments[name], str)
            yield from _source_settings()
            continue
        unset = "from the preset" if section == "model" else _as_argument(default_values(DEFAULT_PRESET)[section][name])
        default = unset if config[name] is None else _as_argument(config[name])
        yield Setting(f"{section}.{name}", default, comments[name], hint)


def _class_of(section: str) -> type:
    return StageConfig if section == "stages" else SECTIONS[section]


def _source_settings() -> Iterator[Setting]:
    """The fields of the sources of data.mixture."""
    comments = field_comments(SourceConfig)
    for name, hint in mixture.FIELDS.items():
        yield Setting(f"{mixture.PATH}.NAME.{name}", _as_argument(mixture.DEFAULTS[name]), comments[name], hint)


def _setting_help(setting: Setting) -> list[str]:
    """The lines of one setting, "SECTION.NAME=DEFAULT"."""
    choices = f"; {describe_type(setting.hint)}" if typing.get_origin(setting.hint) is Literal else ""
    text = textwrap.wrap(setting.comment.rstrip(".") + choices, _WIDTH - _KEY_WIDTH)
    flag = f"--config.{setting.key}={setting.default}"
    return [f"  {flag:<{_KEY_WIDTH - 3}} {text[0]}", *(" " * _KEY_WIDTH + line for line in text[1:])]


def _as_argument(value: object) -> str:
    """A value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def field_comments(cls: type) -> dict[str, str]:
    """The comments above and behind each field of a dataclass or NamedTuple, joined to one line; "" if it has none."""
    comments: dict[str, list[str]] = {name: [] for name in cls.__annotations__}
    above: list[str] = []
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        first = token.line.split(":")[0].strip()
        if token.type == tokenize.NAME and token.string == first and first in comments:
            name = first
            comments[name].extend(above)
            above = []
        elif token.type == tokenize.COMMENT:
            (comments[name] if name else above).append(token.string.lstrip("# "))
        elif token.type == tokenize.NEWLINE:
            name = ""
    return {name: " ".join(lines) for name, lines in comments.items()}
