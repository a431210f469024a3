"""The settings as text for `--help`, from the sources of their classes: the comments of a field document it."""

import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from jaxlc.config.frozen import DEFAULT_PRESET, SECTIONS
from jaxlc.config.setting_paths import fields_of, hint_at, is_part, item_of, joined
from jaxlc.config.stage_schema import StageConfig
from jaxlc.config.values import as_argument, defaults_of, describe_type

_KEY_WIDTH, _WIDTH = 54, 160
HELP_SECTIONS = (*SECTIONS, "stages")


class Setting(NamedTuple):
    """A setting as the help describes it."""

    key: str  # "mesh.context"; with NAME for a source or a stage: "stages.NAME.steps"
    default: str  # as on the command line
    meaning: str  # with the choices, where they are few


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
    return " ".join((inspect.getdoc(SECTIONS.get(section, StageConfig)) or "").split())


def settings_of(section: str) -> Iterator[Setting]:
    """The settings of a section of HELP_SECTIONS, of the sources of a mixture, and of a stage."""
    path = "stages.NAME" if section == "stages" else section
    part = hint_at(path)
    comments, defaults = field_comments(part), defaults_of(part)
    if section.partition(".")[0] == "model" and "NAME" not in section:
        defaults = dict.fromkeys(comments, "from the preset") | {"preset": DEFAULT_PRESET, "init_from": ""}
    for name, hint in fields_of(part).items():
        key, meaning = joined(path, name), comments.get(name, "").rstrip(".")
        if item_of(hint):
            yield Setting(key, "", meaning)
            yield from settings_of(f"{key}.NAME")
        elif is_part(hint) and path == "model":
            yield from settings_of(key)
        elif not is_part(hint):
            choices = f"; {describe_type(hint)}" if typing.get_origin(hint) is Literal else ""
            yield Setting(key, as_argument(defaults[name]), meaning + choices)


def _setting_help(setting: Setting) -> list[str]:
    """The lines of one setting, "SECTION.NAME=DEFAULT"."""
    text = textwrap.wrap(setting.meaning, _WIDTH - _KEY_WIDTH)
    flag = f"--config.{setting.key}={setting.default}"
    return [f"  {flag:<{_KEY_WIDTH - 3}} {text[0]}", *(" " * _KEY_WIDTH + line for line in text[1:])]


def field_comments(cls: type) -> dict[str, str]:
    """The comments above and behind each field of a dataclass or NamedTuple, joined to one line; "" if it has none."""
    parts = [part for part in reversed(cls.__mro__) if "__annotations__" in vars(part)]
    return {name: text for part in parts for name, text in _own_comments(part).items()}


def _own_comments(cls: type) -> dict[str, str]:
    """`field_comments` without those of base classes."""
    comments: dict[str, list[str]] = {name: [] for name in vars(cls)["__annotations__"]}
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
