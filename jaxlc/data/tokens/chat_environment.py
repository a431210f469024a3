"""The Jinja environment of chat templates: settings, functions and the tag `generation` of published templates."""

import json
import re
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# A tag, or a comment, which may contain the text of one.
_COMMENT_OR_TAG = re.compile(r"\{#.*?#\}|\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", re.DOTALL)


def environment(begin: str, end: str) -> jinja2.Environment:
    """A sandbox in which `{% generation %}text{% endgeneration %}` renders as begin + text + end.

    `strftime_now` is undefined, so that templates with a date use their fixed one, and tokens do not depend on the day.
    """
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.globals.update(
        raise_exception=_raise,
        mark_generation=lambda caller: f"{begin}{caller()}{end}",
    )
    env.filters["tojson"] = _to_json
    return env


def without_generation_tags(source: str) -> str:
    """A template that renders the same text and has no tags `generation`, which most inference engines cannot parse.

    Each tag becomes an empty comment, which removes the white space around it as the tag does.
    """

    def replaced(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith("{#") else f"{{#{match[1]} {match[2]}#}}"

    return _COMMENT_OR_TAG.sub(replaced, source)


class _GenerationTag(jinja2.ext.Extension):
    """Parses `{% generation %}` blocks into calls of `mark_generation`."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = jinja2.nodes.Call(jinja2.nodes.Name("mark_generation", "load"), [], [], None, None)
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
