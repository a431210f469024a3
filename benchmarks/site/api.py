"""The page of the public functions and classes: their signatures and docstrings, as Markdown."""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jaxlc
from benchmarks.site import reference

_NAMES = {  # heading -> public names
    "Training": (
        "jaxlc.train.run",
        "jaxlc.train.Result",
        "jaxlc.load",
        "jaxlc.export",
        "jaxlc.train.build_step",
        "jaxlc.train.Callback",
    ),
    "Text": ("jaxlc.generate", "jaxlc.evaluate"),
    "Data": ("jaxlc.data.show",),
    "Attention": (
        "jaxlc.attend",
        "jaxlc.attention.dot_product_attention",
        "jaxlc.attention.gated_delta_rule",
        "jaxlc.attention.short_convolution",
        "jaxlc.attention.zigzag_order",
        "jaxlc.attention.natural_order",
        "jaxlc.make_mesh",
        "jaxlc.start",
    ),
    "Plans": (
        "jaxlc.plan.plan",
        "jaxlc.plan.Plan",
        "jaxlc.sweep.load",
        "jaxlc.profile.compare",
    ),
    "Settings": ("jaxlc.config.read_config", "jaxlc.config.defaults"),
}
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):\n((?:  .*\n|\n)+)", re.MULTILINE)
_ITEM = re.compile(r"^  (?=[\w.]+(?:, [\w.]+)*: )([^:]+)", re.MULTILINE)
_NESTED = re.compile(r"(?<=:\n)((?:    .*(?:\n|$))+)")
_WIDTH = 100  # of a signature in one line


def text() -> str:
    """The page below its introduction."""
    lines: list[str] = []
    for heading, names in _NAMES.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += _entry(name)
    return "\n".join(lines)


def _entry(name: str) -> Iterator[str]:
    value = functools.reduce(getattr, name.split(".")[1:], jaxlc)
    yield from (f"### `{name}`", "")
    if not inspect.isclass(value):
        yield from _function(value)
        return
    yield from (_docstring(value), "")
    if dataclasses.is_dataclass(value) and "__annotations__" in vars(value):
        yield from (*reference.record_rows(value), "")
    for member, function in _members(value).items():
        yield from (f"#### `{name.rpartition('.')[2]}.{member}`", "")
        yield from _function(function)


def _members(cls: type) -> dict[str, Any]:
    """The public methods and properties with a docstring, also those of base classes, in the order
    of the source.
    """
    parts = [part for part in reversed(cls.__mro__) if part.__module__.startswith("jaxlc.")]
    members = {
        name: value
        for part in parts
        for name, value in vars(part).items()
        if not name.startswith("_")
    }
    return {
        name: value
        for name, value in members.items()
        if inspect.isroutine(_callable(value)) and value.__doc__
    }


def _callable(value: Any) -> Any:
    """The function of a method, a class method or a property."""
    for attribute in ("__func__", "fget", "func"):
        value = getattr(value, attribute, None) or value
    return inspect.unwrap(value)


def _function(value: Any) -> Iterator[str]:
    function = _callable(value)
    is_called = not isinstance(value, (property, functools.cached_property))
    yield from (
        "<!-- not run: a signature -->",
        "```python",
        _signature(function, is_called),
        "```",
        "",
    )
    yield from (_docstring(function), "")


def _signature(function: Callable, is_called: bool) -> str:
    """The call as in the source, and for a property its name and type."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    arguments = (
        [part for part in _arguments(node.args) if part not in ("self", "cls")] if is_called else []
    )
    returns = _annotation(node.returns)
    if not is_called:
        return f"{node.name}: {returns}"
    end = f" -> {returns}" if returns != "None" else ""
    line = f"{node.name}({', '.join(arguments)}){end}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{node.name}(", *(f"    {argument}," for argument in arguments), f"){end}"])


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    yield from map(_argument, positional, [*missing, *arguments.defaults])
    if arguments.vararg or arguments.kwonlyargs:
        yield f"*{_argument(arguments.vararg) if arguments.vararg else ''}"
    yield from map(_argument, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        yield f"**{_argument(arguments.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None = None) -> str:
    annotation = f": {_annotation(argument.annotation)}" if argument.annotation else ""
    equals = " = " if annotation else "="
    return f"{argument.arg}{annotation}" + (f"{equals}{ast.unparse(default)}" if default else "")


def _annotation(node: ast.expr | None) -> str:
    """A type without the quotes of a forward reference."""
    return re.sub(r"'([^']*)'", r"\1", ast.unparse(node)) if node else "None"


def _docstring(value: Any) -> str:
    """A docstring with its sections as lists."""
    text = reference.with_links(f"{inspect.getdoc(value)}\n")
    text = _SECTION.sub(lambda section: f"\n**{section[1]}:**\n\n{_items(section[2])}\n\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _items(body: str) -> str:
    """A section of a docstring as a list, if it has items. An item that ends with a colon may have
    a list.
    """
    body = textwrap.indent(textwrap.dedent(body), "  ").rstrip("\n")
    if not _ITEM.match(body):
        return textwrap.dedent(body)
    marked = _ITEM.sub(lambda item: f"- `{item[1].replace(', ', '`, `')}`", body)
    return _NESTED.sub(lambda lines: _nested(lines[1]), marked)


def _nested(lines: str) -> str:
    return textwrap.indent(_items(lines), "  ") if _ITEM.match(lines.removeprefix("  ")) else lines
