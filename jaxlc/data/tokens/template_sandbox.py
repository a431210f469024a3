"""The sandbox of chat templates in Jinja: settings, functions, limits, and the tag `generation`.

A template is a program that somebody else has written. Jinja's sandbox keeps it from Python and
limits `range`; here are limits of the rendered text and of products and powers, which otherwise may
take any memory and time.
"""

import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_TEXT_CHARACTERS = 64 << 20  # of a rendered text, and of a product with a text or a list
_MAX_INTEGER = 1 << 64


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = [x for x in (left, right) if isinstance(x, (int, float))]
        if operator == "*" and len(numbers) == 1:
            (sequence,) = (x for x in (left, right) if x is not numbers[0])
            if len(sequence) * numbers[0] > MAX_TEXT_CHARACTERS:
                raise OverflowError(f"a product has more than {MAX_TEXT_CHARACTERS:,} elements")
        elif any(abs(x) > _MAX_INTEGER for x in numbers) or operator == "**" and abs(right) > 64:
            raise OverflowError("a number is too large")
        return super().call_binop(context, operator, left, right)


def environment(begin: str, end: str) -> jinja2.Environment:
    """A sandbox in which `{% generation %}text{% endgeneration %}` renders as begin + text + end.

    `strftime_now` is undefined, so that templates with a date use their fixed one, and tokens do
    not depend on the day.
    """
    env = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.globals.update(
        raise_exception=_raise, mark_generation=lambda caller: f"{begin}{caller()}{end}"
    )
    env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return env


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
