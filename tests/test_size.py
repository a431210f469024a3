"""The size of the package, and the files that name a kind of layers. A change that needs more says
by how much.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxlc"
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

MAX_TOKENS = 422_953
MAX_TOKENS_PER_LINE = 8.9  # of lines with code
MAX_FILES = 250
MIN_MEDIAN_LINES = 230

# Files that may name a recurrent kind; all others ask its description.
KIND_NAME = re.compile(
    r"gated_?delta|delta_?net|delta_?rule|mamba|kimi_?delta|\bkda\b", re.IGNORECASE
)
KIND_FILES = (
    "attention/__init__.py",  # the public function
    "attention/recurrence/",
    "config/kinds/",
    "config/models/config_json.py",  # the names in files of jaxlc's own format
    "config/models/families/",
    "config/models/model_schema.py",  # the section of its settings
    "config/models/presets.py",
    "config/other_names.py",  # old names of settings
    "config/schema.py",  # the names of its projections, in a comment on a setting
    "models/kinds/",
)

_NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_positions(source: str) -> set[tuple[int, int]]:
    positions = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            positions.add((node.body[0].lineno, node.body[0].col_offset))
    return positions


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    docstrings = docstring_positions(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        token
        for token in tokens
        if token.type not in _NOT_COUNTED and token.start not in docstrings
    ]


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 splits f-strings into more tokens"
)
def test_package_is_no_larger_than_its_limits():
    num_tokens = num_lines = 0
    for source in SOURCES.values():
        tokens = code_tokens(source)
        num_tokens += len(tokens)
        lines = (range(token.start[0], token.end[0] + 1) for token in tokens)
        num_lines += len({line for span in lines for line in span})
    assert num_tokens <= MAX_TOKENS
    assert num_tokens / num_lines <= MAX_TOKENS_PER_LINE


def test_files_are_few_and_of_the_size_of_a_subject():
    assert len(SOURCES) <= MAX_FILES
    assert (
        statistics.median(len(source.splitlines()) for source in SOURCES.values())
        >= MIN_MEDIAN_LINES
    )


def test_kind_is_named_only_where_it_is_described_or_computed():
    names = {
        path.relative_to(PACKAGE).as_posix()
        for path, source in SOURCES.items()
        if KIND_NAME.search(source)
    }
    assert {name for name in names if not name.startswith(KIND_FILES)} == set()
