import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jaxlc
from jaxlc.config import defaults
from jaxlc.core.errors import ArgumentError, UserError, checked

if TYPE_CHECKING:
    import no_such_module


@checked
def function(
    number: int = 1,
    rate: float = 1.0,
    path: "str | Path | None" = None,
    texts: str | Sequence[str | Sequence[int]] = (),
    stop: str | Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    items: Iterable = (),
    then: Callable[[int], None] = print,
    flag: bool = False,
    other: "no_such_module.sub.Class | str | None" = None,
    anything: Any = None,
    **settings: Any,
) -> None:
    """A text."""


def error_of(call, *arguments, **values) -> str:
    with pytest.raises(ArgumentError) as caught:
        call(*arguments, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("number", [0, np.int64(3)]),
        ("rate", [0, 0.5, np.float32(1)]),
        ("path", [None, "a", Path("a"), os.fspath("a")]),
        ("texts", ["a", ["a", "b"], ["a", [1, 2]], ("a", np.ones(3)), np.ones((2, 3))]),
        ("sizes", [None, {}, {"context": 2}]),
        ("items", [[], (), iter([]), {"a": 1}, np.ones(3)]),
        ("then", [print, len, lambda: None]),
        ("flag", [True]),
        ("other", [None, "a", object(), print]),
        ("anything", [1, None, "a", {}]),
        ("more", ["x"]),
    ],
)
def test_checked_function_accepts_what_its_annotation_says(name, values):
    for value in values:
        function(**{name: value})


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("number", ["5", 5.0, True, None, [5]], "int"),
        ("rate", ["hot", None, True], "float"),
        ("path", [3, ["a"]], "str | Path | None"),
        ("texts", [5, ["a", 5], {"a": "b"}, None], "str | Sequence[str | Sequence[int]]"),
        ("stop", [b"a", [b"a"], [3]], "str | Sequence[str]"),
        ("sizes", ["context=2", 2], "Mapping[str, int] | None"),
        ("then", ["print", None], "Callable[[int], None]"),
        ("flag", ["yes", 1], "bool"),
        ("other", [5, [], {}, 1.5, True], "Class | str | None"),
    ],
)
def test_checked_function_refuses_other_types_in_one_sentence(name, values, expected):
    for value in values:
        assert (
            error_of(function, **{name: value})
            == f"invalid argument {name}={value!r} of function(): expected {expected}"
        )


def test_checked_function_with_unknown_or_missing_arguments_names_them():
    assert "an unexpected keyword argument 'nummber' (did you mean number?)" in error_of(
        checked(lambda number=0: 0), nummber=1
    )
    assert "missing a required argument: 'number'" in error_of(checked(lambda number: 0))
    assert function.__doc__ == "A text."


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: jaxlc.generate("run", "x", max_tokens="5"),
            "max_tokens='5' of generate(): expected int",
        ),
        (
            # pyrefly: ignore [unexpected-keyword]
            lambda: jaxlc.generate("run", "x", max_new_tokens=5),
            "'max_new_tokens' (did you mean max_tokens?)",
        ),
        (lambda: jaxlc.generate(5, "x"), "source=5 of generate(): expected str | Path | Result"),
        (lambda: jaxlc.load(None), "workdir=None of load(): expected str | Path"),
        (
            lambda: jaxlc.evaluate("run", lengths=[4096], out=3),
            "out=3 of evaluate(): expected str | Path | None",
        ),
        (
            lambda: jaxlc.export("run", "out", max_shard_gb="5GB"),
            "max_shard_gb='5GB' of export(): expected float",
        ),
        (lambda: jaxlc.make_mesh(context="2"), "context='2' of make_mesh(): expected int"),
        (
            lambda: jaxlc.start(simulated_devices="8"),
            "simulated_devices='8' of start(): expected int",
        ),
        (lambda: jaxlc.plan.plan(defaults(), 8), "topology=8 of plan(): expected str"),
        (lambda: jaxlc.config.with_settings(defaults(), {}), "of with_settings(): expected Config"),
        (lambda: jaxlc.data.show(defaults(), num="3"), "num='3' of show(): expected int"),
        (lambda: jaxlc.sweep.load(3), "path=3 of load(): expected str | Path"),
    ],
)
def test_public_function_with_a_wrong_argument_raises_one_sentence(call, words):
    assert words in error_of(call)


def test_make_mesh_of_size_0_names_the_axis():
    with pytest.raises(
        UserError, match="invalid value 0 for config.mesh.context: expected at least 1"
    ):
        jaxlc.make_mesh(context=0)
