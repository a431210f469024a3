"""The settings as text for `--help`, from the source of schema.py: the comments of a field are its documentation."""

import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from jaxlc.config import mixture
from jaxlc.config.frozen import DEFAULT_PRESET, SECTIONS, default_values, field_types
from jaxlc.config.mixture import is_mixture
from jaxlc.config.schema import SourceConfig
from jaxlc.config.settings import defaults
from jaxlc.config.stages import OWN_FIELDS, StageConfig
from jaxlc.config.values import describe_type

_KEY_WIDTH, _WIDTH = 54, 160
HELP_SECTIONS = (*SECTIONS, "stages")


def settings_help(sections: Iterable[str] = HELP_SECTIONS) -> str:
    """The settings of `sections`: key, default, description and, where they are few, the allowed values."""
    lines: list[str] = []
    for section in sections:
        cls = StageConfig if section == "stages" else SECTIONS[section]
        lines.append(f"\n{section}: {' '.join((inspect.getdoc(cls) or '').split())}")
        comments = field_comments(cls)
        for key, name, hint, default in _settings(section):
            if is_mixture(section, name):
                lines += _mixture_help(comments[name])
            else:
                lines += _setting_help(f"{key}={default}", comments[name], hint)
    return "\n".join(lines)


def _settings(section: str) -> Iterator[tuple[str, str, Any, str]]:
    """Yields (key, name, type, default) of each setting of a section, or of a stage."""
    if section == "stages":
        stage = StageConfig(name="")
        fields = {name: hint for name, hint in OWN_FIELDS.items() if name != "name"}
        yield from ((f"stages.NAME.{name}", name, hint, vars(stage)[name]) for name, hint in fields.items())
        return
    config = defaults()[section]
    for name, hint in field_types(section).items():
        default = None if is_mixture(section, name) else config[name]
        unset = "from the preset" if section == "model" else _as_argument(default_values(DEFAULT_PRESET)[section][name])
        yield f"{section}.{name}", name, hint, unset if default is None else _as_argument(default)


def _setting_help(setting: str, comment: str, hint: Any) -> list[str]:
    """The lines of one setting, "SECTION.NAME=DEFAULT"."""
    choices = f"; {describe_type(hint)}" if typing.get_origin(hint) is Literal else ""
    text = textwrap.wrap(comment.rstrip(".") + choices, _WIDTH - _KEY_WIDTH)
    return [f"  {f'--config.{setting}':<{_KEY_WIDTH - 3}} {text[0]}", *(" " * _KEY_WIDTH + line for line in text[1:])]


def _mixture_help(comment: str) -> list[str]:
    """The lines of data.mixture and of the fields of its sources."""
    lines = _setting_help(f"{mixture.PATH}=", comment, str)
    comments = field_comments(SourceConfig)
    for name, hint in mixture.FIELDS.items():
        setting = f"{mixture.PATH}.NAME.{name}={_as_argument(mixture.DEFAULTS[name])}"
        lines += _setting_help(setting, comments[name], hint)
    return lines


def _as_argument(value: object) -> str:
    """A value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def field_comments(cls: type) -> dict[str, str]:
    """The comments above and behind each field of a dataclass, joined to one line; "" if it has none."""
    comments: dict[str, list[str]] = {name: [] for name in cls.__dataclass_fields__}
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
