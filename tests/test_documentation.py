"""Commands, Python blocks and links of README.md, CONTRIBUTING.md and docs/: they run, parse, or
exist.

Commands in the docstrings of modules are parsed, too.

A comment before each fenced `sh`, `bash` or `python` block says what this test does with it:

    <!-- run: cpu -->                            the block is executed
    <!-- run: cpu, with --config.train.steps=2 -->   as above; every training command gets these flags
    <!-- run: cpu, needs the GPU compiler -->    executed where the extra `plan` is installed
    <!-- not run: REASON -->                     its commands are parsed only
"""

import ast
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxlc.cli import VERBS
from jaxlc.config.command_line import parse
from jaxlc.config.models.families import FAMILIES
from jaxlc.core.errors import UserError

ROOT = Path(__file__).parents[1]
DIRECTORIES = (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "notebooks")
PAGES = sorted(page for directory in DIRECTORIES for page in directory.glob("*.md"))
EXECUTABLE = ("sh", "bash", "python")
LANGUAGES = (*EXECUTABLE, "text", "json", "toml")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)$")
MARKER = re.compile(
    r"<!-- (not run: (?P<reason>.+)|run: cpu(?P<needs_compiler>, needs the GPU compiler)?(, with (?P<flags>--.+))?) -->"
)
COMMAND = re.compile(r"(jaxlc |python -m |make )")


class Block(NamedTuple):
    """A fenced block: its page, first line number, language, text, and the comment before it."""

    page: Path
    line: int
    language: str
    text: str
    marker: re.Match | None

    @property
    def name(self) -> str:
        return f"{self.page.stem}:{self.line}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    lines = (page.read_text() if text is None else text).splitlines()
    blocks, start = [], None
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence and start is None:
            start, language, before = (
                number,
                fence["language"],
                lines[number - 1].strip() if number else "",
            )
        elif fence:
            body = "\n".join(
                line.removeprefix(fence["indent"]) for line in lines[start + 1 : number]
            )
            blocks.append(Block(page, start + 1, language, body, MARKER.fullmatch(before)))
            start = None
    assert start is None, f"{page.name}:{start}: this fence is not closed"
    return blocks


def commands_of(text: str) -> list[str]:
    """The commands of a shell block: continued lines joined, comments removed."""
    joined = text.replace("\\\n", " ")
    words = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [shlex.join(line).replace("'>'", ">") for line in words if line]


def indented_commands(docstring: str) -> str:
    """The indented commands of a docstring, with the lines that continue them."""
    matches = re.finditer(rf"^    {COMMAND.pattern}(.*\\\n)*.*$", docstring, re.MULTILINE)
    return "\n".join(match.group() for match in matches)


def jaxlc_arguments(command: str) -> list[str] | None:
    """The verb and its arguments, for `jaxlc VERB ...` and `python -m jaxlc.VERB ...`; else None."""
    words = shlex.split(command)
    if words[:1] == ["jaxlc"]:
        return words[1:]
    if (
        words[:2] == ["python", "-m"]
        and words[2].startswith("jaxlc.")
        and words[2].removeprefix("jaxlc.") in VERBS
    ):
        return [words[2].removeprefix("jaxlc."), *words[3:]]
    return None


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
EXECUTABLE_BLOCKS = [block for block in BLOCKS if block.language in EXECUTABLE]
RUN_BLOCKS = [block for block in EXECUTABLE_BLOCKS if block.marker and not block.marker["reason"]]
PAGE_COMMANDS = [
    (block.name, command)
    for block in EXECUTABLE_BLOCKS
    if block.language != "python"
    for command in commands_of(block.text)
]
MODULES = sorted(
    path for folder in ("jaxlc", "configs", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
DOCSTRING_COMMANDS = [
    (path.stem, command)
    for path in MODULES
    for command in commands_of(
        indented_commands(ast.get_docstring(ast.parse(path.read_text())) or "")
    )
]


def unmarked(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks if block.language in EXECUTABLE and block.marker is None]


def test_blocks_have_run_marker():
    assert unmarked(BLOCKS) == []
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []


def test_blocks_without_marker_are_reported():
    page = "```sh\nmake train\n```\n\n<!-- run: cpu -->\n```python\n1\n```\n\n<!-- run: gpu -->\n```sh\n2\n```\n"
    assert unmarked(blocks_of(Path("x.md"), page)) == ["x:1", "x:11"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_fenced(page):
    """An indented block is not executed, so it must not hold a command."""
    outside = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [
        line for line in outside.splitlines() if re.match(r" {4,}" + COMMAND.pattern, line)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


CODE_PAGES = [
    page for page in PAGES if page.parent != ROOT / "benchmarks" and page.name != "CHANGELOG.md"
]
PACKAGE = ROOT / "jaxlc"


def missing_code(text: str) -> list[str]:
    """The files `folder/module.py`, folders `package/folder/` and names `jaxlc.x.y` of a text that
    do not exist.
    """
    files = re.findall(r"(?<![\w/.*-])((?:[a-z_][a-z_0-9]*/)+[a-z_0-9]+\.py)\b", text)
    folders = re.findall(r"`((?:[a-z_]+/)+[a-z_]*)`", text)
    roots = (ROOT, PACKAGE)
    missing = [
        path
        for path in (*files, *folders)
        if any((root / path.split("/")[0]).is_dir() for root in roots)
        and not path.startswith("runs/")  # of a run on this machine
        and not any((root / path).exists() for root in roots)
    ]
    names = re.findall(r"(?<![\w/.-])jaxlc(?:\.\w+)+", text)
    return missing + [name for name in names if not is_in_package(name.split(".")[1:])]


def is_in_package(parts: list[str]) -> bool:
    """Whether jaxlc has the module of these names, or a module whose source has the first name that
    is no module.
    """
    folder = PACKAGE
    while parts and (folder / parts[0]).is_dir():
        folder, parts = folder / parts[0], parts[1:]
    source = folder / "__init__.py"
    if parts and (folder / f"{parts[0]}.py").exists():
        source, parts = folder / f"{parts[0]}.py", parts[1:]
    return not parts or re.search(rf"\b{parts[0]}\b", source.read_text()) is not None


@pytest.mark.parametrize("page", CODE_PAGES, ids=lambda page: page.name)
def test_named_code_exists(page):
    """Dated pages of benchmarks and the changelog may name modules of their time."""
    text = page.read_text()
    assert missing_code(text) == []
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", text, re.MULTILINE), (
        "a merge left conflict markers"
    )


def test_missing_code_is_reported():
    text = "`jaxlc/nowhere.py`, step/nowhere.py, `models/nowhere/`, `jaxlc.train.nowhere`, `jaxlc.nowhere.run`"
    assert len(missing_code(text)) == 5
    assert (
        missing_code(
            "`step/step.py`, `models/kinds`, `jaxlc.train.run`, `my/own.py`, `checkpoint/seconds`"
        )
        == []
    )


@pytest.mark.parametrize(
    "where, command", PAGE_COMMANDS + DOCSTRING_COMMANDS, ids=lambda value: value[:60]
)
def test_commands_parse(where, command):
    words = shlex.split(
        command.partition(" > ")[0].replace("$SLURM_NTASKS", "64").replace("$SLURM_PROCID", "0")
    )
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        makefile = (ROOT / "Makefile").read_text()
        assert [
            target
            for target in targets
            if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)
        ] == []
    elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        path = ROOT.joinpath(*words[2].split("."))
        program = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        names = [
            flag.removeprefix("--").partition("=")[0]
            for flag in words[3:]
            if not flag.startswith("--config")
        ]
        assert [name for name in names if not re.search(rf"\b{name}\b", program)] == []
    elif arguments := jaxlc_arguments(shlex.join(words)):
        check_arguments(arguments)


def check_arguments(arguments: list[str]) -> None:
    """Checks the arguments of `jaxlc VERB` as the verb does: an unknown flag, key, config or value
    raises UserError.
    """
    verb, *flags = arguments
    # The model is read when the flags are parsed, and need not exist on this machine; its adapters need it.
    # chat.py is a block of chat_model.md, with which tests/hf/test_chat_model.py runs the command.
    left_out = "--config.model.init_from=", "--config.lora.init_from=", "--config=chat.py"
    flags = [flag for flag in flags if not flag.startswith(left_out)]
    flags = [flag for flag in flags if verb != "data" or flag not in ("report", "show")]
    own = [flag for flag in flags if not re.match(r"--(no)?config[.=]", flag)]
    takes_paths = verb in (
        "chat",
        "checkpoint",
        "eval",
        "export",
        "generate",
        "logprobs",
        "profile",
    )
    own = [flag for flag in own if not takes_paths or flag.startswith("-")]
    known = flags_of(verb, "--plan" if (verb, "--plan" in own) == ("generate", True) else "")
    unknown = [flag for flag in own if flag.partition("=")[0] not in known]
    if unknown:
        raise UserError(f"jaxlc {verb} has no flag {unknown[0]}")
    if any(flag.startswith("--config") for flag in flags):
        parse([verb, *(flag for flag in flags if flag not in own)])


@functools.cache
def flags_of(verb: str, mode: str = "") -> set[str]:
    """The flags of `jaxlc VERB`, from its help.

    Args:
      mode: a flag that gives the verb other flags, such as --plan.
    """
    argv = [sys.executable, "-m", "jaxlc", verb, *filter(None, [mode]), "--help"]
    help_text = subprocess.run(
        argv, cwd=ROOT, env=environment_of(ROOT), capture_output=True, text=True, check=True
    )
    return {"--help", *re.findall(r"^  (--[\w-]+)", help_text.stdout, re.MULTILINE)}


def test_parsing_rejects_stale_settings():
    check_arguments(["train", "--config=quickstart", "--config.mesh.context=4", "--workdir=runs/x"])
    for stale in (
        "--config.data.sequence_tokens=8",
        "--config.mesh.contexts=8",
        "--work_dir=x",
        "--config=nothing",
    ):
        with pytest.raises(UserError):
            check_arguments(["train", "--config=quickstart", stale])


# The package is on no index: there, anyone can register its name. A requirement with a URL ("jaxlc
# @ git+...") is safe.
FROM_INDEX = re.compile(
    r"\binstall\b[^`]{0,40}?(?<![\w./])jaxlc\[[\w,-]+\](?! @)"
    r"|\b(?:pip3?|pipx|uv|uv pip|conda) (?:install|add)(?: -\S+)* [\"']?jaxlc\b(?![/\w@[]|\.\w| @)"
)


def test_install_lines_do_not_name_the_package_of_an_index():
    suffixes = (".py", ".md", ".ipynb", ".sh", ".toml", ".yaml", ".yml", "")
    files = [
        path
        for folder in ("launch", "notebooks", "scripts", ".github")
        for path in (ROOT / folder).rglob("*")
    ]
    files += [*MODULES, *PAGES, *ROOT.glob("*.toml"), ROOT / "Makefile"]
    texts = {path: path.read_text() for path in files if path.suffix in suffixes and path.is_file()}
    lines = {str(path.relative_to(ROOT)): FROM_INDEX.findall(text) for path, text in texts.items()}
    assert sum("pip install" in text for text in texts.values()) > 15
    assert {name: found for name, found in lines.items() if found} == {}


@pytest.mark.parametrize(
    ("line", "is_bad"),
    [
        ('pip install "jaxlc[data]"', True),
        ("%pip install jaxlc\n", True),
        ('"and `pip install",\n    \'"jaxlc[mosaic]"`\'', True),
        ("uv add jaxlc==0.1.0", True),
        ("pip install -e '.[data]' in a checkout of jaxlc", False),
        ("pip install './jaxlc[all,cuda12]'", False),
        ('pip install "jaxlc[plot] @ git+https://example.org/x"', False),
    ],
)
def test_install_line_from_an_index_is_found(line, is_bad):
    assert bool(FROM_INDEX.search(line)) == is_bad


def test_docstring_commands_are_read():
    text = "Trains.\n\n    jaxlc train --config=a \\\n      --config.b.c=1   # small\n    make x\n\n    other\n"
    assert commands_of(indented_commands(text)) == [
        "jaxlc train --config=a --config.b.c=1",
        "make x",
    ]
    assert len(DOCSTRING_COMMANDS) > 10


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A directory that looks like the checkout, through links; what the blocks write goes there."""
    directory = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (directory / path.name).symlink_to(path)
    commands = directory / "bin"  # the commands of this Python, of this checkout
    commands.mkdir()
    call_main = "-c 'import sys; from jaxlc.cli import main; sys.exit(main())'"
    for name, arguments in {"jaxlc": call_main, "python": ""}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    return directory


def environment_of(checkout: Path) -> dict[str, str]:
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return os.environ | {
        "PATH": f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": " ".join(flags),
    }


def run_block(block: Block, checkout: Path) -> subprocess.CompletedProcess:
    if block.language == "python":
        argv = [sys.executable, "-c", block.text]
    else:
        flags = block.marker["flags"] or ""
        commands = [
            f"{line} {flags}" if line.startswith("jaxlc train ") else line
            for line in commands_of(block.text)
        ]
        argv = ["bash", "-euo", "pipefail", "-c", "\n".join(commands)]
    return subprocess.run(
        argv, cwd=checkout, env=environment_of(checkout), capture_output=True, text=True
    )


def _parameter(block: Block):
    """Blocks of several training commands and plans are heavy. Pages with a date do not change, so
    their blocks are in the full run.
    """
    is_heavy = block.text.count("jaxlc train ") > 1 or block.marker["needs_compiler"]
    is_dated = block.page.parent.name == "benchmarks"
    marks = pytest.mark.full if is_dated else pytest.mark.heavy if is_heavy else ()
    return pytest.param(block, id=block.name, marks=marks)


@pytest.mark.parametrize("block", [_parameter(block) for block in RUN_BLOCKS])
def test_block_runs(block, checkout):
    if block.marker["needs_compiler"] and importlib.util.find_spec("jax_plugins") is None:
        pytest.skip("the extra `plan` installs the GPU compiler")
    done = run_block(block, checkout)
    assert done.returncode == 0, (
        f"{block.page.name}:{block.line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )


def test_failing_block_is_reported(checkout):
    page = (
        "<!-- run: cpu, with --config.train.steps=0 -->\n```sh\njaxlc train"
        " --config=quickstart\njaxlc --version\n```\n"
    )
    done = run_block(*blocks_of(Path("x.md"), page), checkout)
    assert (
        done.returncode == 2 and "config.train.steps" in done.stderr and "jaxlc" not in done.stdout
    )


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 165


def test_supported_models_are_the_families():
    _, _, section = (ROOT / "docs/pretrained.md").read_text().partition("## Supported models")
    table, _, _ = section.strip().partition("\n\n")
    first_columns = [row.split("|")[1] for row in table.splitlines()[2:]]
    names = [name for column in first_columns for name in re.findall(r"`(\w+)`", column)]
    assert sorted(names) == sorted(FAMILIES)
    words = " ".join((ROOT / "README.md").read_text().split())
    assert f"Supported are [{len(FAMILIES)} model types]" in words
