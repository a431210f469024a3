"""Words that the project's texts must not use, with the standard term; see the table in CONTRIBUTING.md.

Checked are Markdown pages (without code), and of Python files the comments, docstrings, other strings and the names of
functions, classes and tests.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A regular expression, matched word-wise in any case -> what to write.
BANNED = {
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again, regenerate",
    r"(not|is|are) here": "absent, attached",
    r"for GPUs that": "for target GPUs",
    r"(nobody|nothing|somebody) sees?": "fully masked",
    r"sees? (itself|nothing|nobody|anybody|their own|its own)": "attends to",
    r"home(?! director)": "back to the owner rank",
    r"dear(er|est|ly)?": "expensive",
    r"so many": "n, a number of",
    r"(go|goes|going) on (from|with)": "resume from, continue with",
    r"(left|leave|leaves|leaving) out": "skip, omit",
    r"beside": "next to, with, in addition to, while",
    r"(a|one) sentence": "a message, an error in one line",
    r"(lie|lies|lying) (in|on|at|where|beside)": "is in, is stored in",
    r"rungs?": "step, setting",
    r"rivals?": "baseline",
    r"doors?": "public API, entry point",
    r"heirs?": "aliased output",
    r"told": "is given, is reported, prints",
    r"whole ones?": "valid",
    r"(speak|speaks|speaking) (with|of|for)": "communicates with",
    r"by hand": "manually",
    r"(take|takes|taking|took) part": "belong to, participate",
    r"whatever": "any, independent of",
    r"visit(s|ed|ing)?": "KV block step, process",
    r"wait(s|ed|ing)? for the backward": "saved until the backward",
    r"waited for": "exposed",
    r"wants?|wanted": "needs, requires, expects",
    r"the like": "similar",
    r"of use": "useful",
    r"no more than that": "only",
    r"on (its|their|the) way": "in flight",
    r"under way": "in flight, running",
    r"at rest": "stored",
    r"(has|have|had) a say": "is consulted",
    r"in a word": "",
    r"without a word": "silently",
    r"odds and ends": "",
    r"crawls?": "is slow",
    r"rooms?": "package",
    r"climbs?": "",
    r"drawers?": "",
    r"goes (a)?round again": "is repeated",
    r"circumstances": "environment",
    r"stands? (for itself|behind|where|beside|alone)": "is",
    r"in the way": "bottleneck",
    r"made (again|ready)": "recomputed, prepared",
    r"nothing (more|else) (is|was) (asked|given)": "",
}
_PATTERN = re.compile(
    "|".join(rf"(?P<w{number}>\b(?:{words})\b)" for number, words in enumerate(BANNED)).replace(" ", r"\s+"),
    re.IGNORECASE,
)

IDENTIFIERS = {"found", "each", "told", "wanted", "beside", "door", "doors", "home", "heir", "rung", "rungs", "rival"}
MAX_TEST_NAME = 64

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
CODE = sorted(
    path for folder in ("jaxlc", "configs", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")
)
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))


def violations(texts: Iterator[tuple[int, str]]) -> list[str]:
    """The banned words in (first line, text) pairs: "line: word (write: advice)"."""
    return [
        f"{line + text.count(chr(10), 0, match.start())}: {match.group()!r} (write: {advice_for(match)})"
        for line, text in texts
        for match in _PATTERN.finditer(text)
    ]


def advice_for(match: re.Match) -> str:
    return list(BANNED.values())[int(match.lastgroup.removeprefix("w"))]


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """A Markdown page without fenced blocks and inline code."""

    def blank(match: re.Match) -> str:
        return "\n" * match.group().count("\n")

    without_fences = re.sub(r"^ *```.*?^ *```$", blank, text, flags=re.DOTALL | re.MULTILINE)
    yield 1, re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: "`" + blank(match), without_fences)


def prose_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Comments and strings, each with its first line; adjacent ones are joined."""
    start, end, parts, kind = 0, 0, [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name in ("NL", "FSTRING_START", "FSTRING_END"):
            continue
        group = {"COMMENT": "comment", "STRING": "string", "FSTRING_MIDDLE": "string"}.get(name)
        if parts and (group != kind or (group == "comment" and token.start[0] > end + 1)):
            yield start, "\n".join(parts)
            parts = []
        if group:
            start, kind = (start if parts else token.start[0]), group
            parts.append(_text_of_token(name, token.string))
            end = token.end[0]
    if parts:
        yield start, "\n".join(parts)


def _text_of_token(name: str, text: str) -> str:
    if name == "COMMENT":
        return text.lstrip("# ")
    if name == "STRING":
        prefix = re.match(r"\w*", text).group()
        text = text[len(prefix) :].strip("\"'")
        if "f" in prefix.lower():
            text = re.sub(r"\{[^{}]*\}", "{}", text)
    return re.sub(r"`[^`]*`", "``", text)


def names_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Names of functions, classes and methods, as words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name.strip("_").replace("_", " ")


def banned_identifiers(source: str) -> list[str]:
    """Variables, arguments and functions whose whole name says nothing."""
    names = {
        (node.lineno, getattr(node, field))
        for node in ast.walk(ast.parse(source))
        for field in ("id", "arg", "name")
        if isinstance(node, (ast.Name, ast.arg, ast.FunctionDef)) and hasattr(node, field)
    }
    return [f"{line}: {name}" for line, name in sorted(names) if name.strip("_") in IDENTIFIERS]


def violations_in(paths: list[Path], check: Callable[[str], list[str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{violation}" for path in paths for violation in check(path.read_text())]


def test_pages_use_standard_terms():
    assert violations_in(PAGES, lambda text: violations(prose_of_page(text))) == []


def test_comments_and_strings_use_standard_terms():
    assert violations_in(CODE + TESTS, lambda source: violations(prose_of_code(source))) == []


def test_names_use_standard_terms():
    assert violations_in(CODE + TESTS, lambda source: violations(names_of_code(source))) == []


def test_identifiers_name_their_values():
    assert violations_in(CODE + TESTS, banned_identifiers) == []


def test_test_names_are_short():
    names = [name for path in TESTS for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
    assert [name for name in names if len(name) > MAX_TEST_NAME] == []


def test_banned_words_are_found_in_pages():
    page = "Weights lie\nin memory.\n\n```sh\nvisit home\n```\n\nIt says `told` and Mends it. [x](visit.md) dearest\n"
    assert [line.split(" (")[0] for line in violations(prose_of_page(page))] == [
        "1: 'lie\\nin'",
        "8: 'Mends'",
        "8: 'dearest'",
    ]


def test_banned_words_are_found_in_code():
    source = '''"""Nothing wrong."""
# a layer that is left
# out
x = "what the door " "told"  # visited
y = f"{told} beside {x!r}"
Path.home()


def mended_things(each): ...
'''
    words = [line.split(" (")[0] for line in violations(prose_of_code(source))]
    assert words == ["2: 'left\\nout'", "4: 'door'", "5: 'told'", "4: 'visited'", "5: 'beside'"]
    assert [line.split(" (")[0] for line in violations(names_of_code(source))] == ["9: 'mended'"]
    assert banned_identifiers(source) == ["5: told", "9: each"]
