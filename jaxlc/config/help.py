"""The settings as text for `--help`, read from the sources of schema.py: a field's comment is its documentation."""

import inspect
import io
import tokenize
import typing
from typing import Literal

from jaxlc.config.loading import SECTIONS, defaults, describe_type, field_types


def settings_help() -> str:
    """Every setting: its key, its default and its comment, one line each."""
    config = defaults()
    lines = []
    for section, cls in SECTIONS.items():
        # A dataclass without a docstring is given its signature for one.
        lines.append(f"\n{section}" + ("" if cls.__doc__.startswith(cls.__name__) else f": {inspect.getdoc(cls)}"))
        comments = field_comments(cls)
        for name, hint in field_types(section).items():
            default = "from the preset" if config[section][name] is None else repr(config[section][name])
            choices = f"; {describe_type(hint)}" if typing.get_origin(hint) is Literal else ""
            key = f"--config.{section}.{name}={default}"
            lines.append(f"  {key:<52} {comments[name]}{choices}".rstrip())
    return "\n".join(lines)


def field_comments(cls: type) -> dict[str, str]:
    """The comment behind each field of a dataclass; "" where there is none."""
    comments = dict.fromkeys(cls.__dataclass_fields__, "")
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        first = token.line.split(":")[0].strip()
        if token.type == tokenize.NAME and token.string == first:
            name = first
        elif token.type == tokenize.COMMENT and name in comments:
            comments[name] = token.string.lstrip("# ")
        elif token.type == tokenize.NEWLINE:
            name = ""
    return comments
