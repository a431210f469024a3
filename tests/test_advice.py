"""Advice in messages: what they name exists, and the command that they advise gets further than the
one before.
"""

import ast
import dataclasses
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxlc
from jaxlc.cli import VERBS, main_of
from jaxlc.config.frozen import SECTIONS
from jaxlc.config.settings import converted, hint_at
from jaxlc.core.errors import EXTRAS as extras_of_packages
from jaxlc.core.errors import UserError

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PARSERS = {
    verb: getattr(importlib.import_module(f"jaxlc.cli.{module}"), f"{verb.capitalize()}Flags")
    for verb, (module, _) in VERBS.items()
}
FLAGS = {
    verb: {field.name for field in dataclasses.fields(flags)} - {*flags.positional}
    for verb, flags in PARSERS.items()
}
OTHER_FLAGS = {
    "help",
    "name",
    "upgrade",
    "repo-type",
    "local-dir",
    "model_args",
    "gen_kwargs",
    "apply_chat_template",
    # of vLLM
    "max-logprobs",
    "max-model-len",
    "logprobs-mode",
    "enable-lora",
    "max-lora-rank",
    "max-loras",
    "data-parallel-size",
    "enable-return-routed-experts",
}
OTHER_NAMES = {
    "section.key",
    "model.safetensors",
    "update_from_flattened_dict",
    "json",
    "py",
    "model.token_losses",
}


def texts(source: str) -> Iterator[str]:
    """The sentences of a module except docstrings, with {} for each value that an f-string inserts."""
    tree = ast.parse(source)
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    others = {part for string in strings for part in string.values}
    others |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in others
    ]
    for parts in (*(node.values for node in strings), *([node] for node in constants)):
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts
        )
        if " " in text.strip():
            yield text


def unknown_names(text: str) -> Iterator[str]:
    """Yields settings, flags, verbs, extras, pages and Python names in a message that do not exist."""
    settings = re.findall(
        r"(?:(?<=--no)|(?<![\w.]))config\.([a-z_]\w*(?:\.\w+)*)(?:=([\w.,]+\b))?", text
    )
    settings += re.findall(rf"(?<![\w.\-/])((?:{'|'.join(SECTIONS)})\.[a-z]\w*)()", text)
    yield from (
        path for path, value in settings if not (path in OTHER_NAMES or is_setting(path, value))
    )
    for before, flag in re.findall(
        r"(.*?)(?<![\w-])--(?!config|noconfig|xla_)([a-z][\w-]*)(?=[ =:;,.)`]|$)", text
    ):
        verb = re.search(r".*jaxlc ([a-z]+)", before)
        if flag not in (FLAGS.get(verb[1], ()) if verb else OTHER_FLAGS.union(*FLAGS.values())):
            yield f"--{flag}"
    yield from (
        verb
        for verb in re.findall(r"(?:`jaxlc |jaxlc (?=[a-z]+ --))([a-z]+)", text)
        if verb not in VERBS
    )
    yield from (extra for extra in extras_in(text) if extra not in EXTRAS)
    yield from (
        page for page in re.findall(r"docs/[\w/]+\.md", text) if not (ROOT / page).is_file()
    )
    for name in re.findall(r"\bjaxlc(?:\.[a-z]\w*)+", text):
        try:
            pkgutil.resolve_name(name)  # imports modules that no other test has imported
        except (AttributeError, ImportError):
            yield name


def extras_in(text: str) -> list[str]:
    """The extras in requirements of a checkout, such as '.[data]' and './jaxlc[all,cuda12]'."""
    return [
        extra
        for extras in re.findall(r"\.(?:/jaxlc)?\[([a-z0-9,-]+)\]['\"]", text)
        for extra in extras.split(",")
    ]


def is_setting(path: str, value: str) -> bool:
    """Whether the setting exists and takes the value, unless that is a placeholder such as TOKENS
    or "".
    """
    try:
        hint_at(path)
        if value and not value.isupper():
            converted(path, value)
    except UserError:
        return False
    return True


def test_messages_name_only_what_exists():
    # has a test of its own
    files = set((ROOT / "jaxlc").rglob("*.py")) - {ROOT / "jaxlc/config/other_names.py"}
    messages = [text for path in files for text in texts(path.read_text())]
    assert len(messages) > 1000
    assert [(name, text) for text in messages for name in unknown_names(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "set config.model.nothing",
        "use --config.memory.remat=ful, or less",
        "lower optimizer.rate",
        "use --noconfig.model.bias",
        "pass --seq_lens",
        "`jaxlc plan --goal`",
        "run `jaxlc bench`",
        "pip install -e '.[none]'",
        "see docs/none.md",
        "call jaxlc.nothing first",
    ],
)
def test_unknown_names_are_found(text):
    assert len(list(unknown_names(text))) == 1


@pytest.mark.full
def test_pip_finds_the_packages_that_messages_advise():
    """Without their dependencies; pip downloads nothing but metadata where the index offers it."""
    sources = "".join(path.read_text() for path in (ROOT / "jaxlc").rglob("*.py"))
    joined = re.sub(r'"\n +f?"', "", sources)  # texts over several lines
    named = re.findall(r"pip install (?:--upgrade )?(nvidia-[\w-]+)", joined)
    extras = {*extras_in(sources)} | {*extras_of_packages.values()}
    requirements = {requirement for extra in extras for requirement in EXTRAS[extra]}
    requirements = {
        requirement for requirement in requirements if not requirement.startswith("jaxlc[")
    }
    assert len(named) == 4 and {"plan", "nvshmem", "hf", "plot"} <= extras
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "--quiet",
    )
    if subprocess.run([*pip, "absl-py"], capture_output=True).returncode:
        pytest.skip("pip cannot reach a package index")
    result = subprocess.run([*pip, *named, *requirements], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


class WorkStarted(Exception):
    pass


@pytest.mark.parametrize(
    ("command", "words", "advice"),
    [
        ("plan --topology=h100:1x8", "use --config=NAME or", "--config=quickstart"),
        ("plan --config=quickstart", "such as --topology=h100:8x8", "--topology=h100:8x8"),
        (
            "plan --config=64k:h100 --price-per-gpu-hour=9",
            "use --price_per_gpu",
            "--price-per-gpu-hour= --price_per_gpu_hour=9",
        ),
        ("plan --config=64k:h100 --timeline=x.txt", "ends with .png", "--timeline=x.png"),
        ("plan --config=64k:h100 --json=.", "choose the name of a file", "--json=plan.json"),
        ("plan --config=64k:h100 --json=no/x.json", "choose another file", "--json=plan.json"),
        (
            "plan --config=extend_512k --topology=h100:8x8 --html=a.html",
            "--stage=NAME",
            "--stage=64k",
        ),
        ("recommend --topology=h100:1x8 --seq_len=1M", "use --model=NAME or", "--model=tiny"),
        (
            "recommend --topology=h100:1x8 --seq_len=1M",
            "or --config=NAME with --seq_len",
            "--config=64k",
        ),
        (
            "recommend --topology=h100:1x8 --model=llama3.1-8c",
            "did you mean llama3.1-8b?",
            "--model=llama3.1-8b",
        ),
        (
            "recommend --config=64k:h100 --out=mine.py",
            "choose another name",
            "--out=recommended.py",
        ),
        (
            "recommend --config=64k:h100 --out=mine",
            "such as recommended.py",
            "--out=recommended.py",
        ),
        (
            "recommend --config=extend_512k --topology=h100:8x8 --seq_len=64K",
            "use --config.stages.NAME.data.seq_len=TOKENS",
            "--seq_len= --config.stages.64k.data.seq_len=65536",
        ),
        ("sweep --config=quickstart --run --workers=2", "remove one", "--workers="),
        ("generate run", "--prompt=TEXT or --prompt_file=FILE", "--prompt=TEXT"),
        ("generate run", "--prompt=TEXT or --prompt_file=FILE", "--prompt_file=mine.py"),
        (
            "generate run --prompt=a --mesh=4",
            "such as context=4,tensor=2",
            "--mesh=context=4,tensor=2",
        ),
        ("eval run", "such as --lengths=4096,65536", "--lengths=4096,65536"),
        (
            "eval run --lengths=4K --out=mine.py",
            "use a different directory, with --out",
            "--out=scores",
        ),
        ("eval run --lengths=4K --tasks=loss", "needs documents: files", "--documents=mine.py"),
        ("export run", "no OUT is given: directory to write", "exported"),
        ("data report --config=quickstart --num=3", "remove it, or use show", "--num="),
        ("profile trace --json=.", "choose the name of a file", "--json=comparison.json"),
    ],
)
def test_command_that_an_error_advises_starts_its_work(
    tmp_path, monkeypatch, capsys, command, words, advice
):
    def start(*args, **kwargs):
        raise WorkStarted

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("text of a user")
    monkeypatch.setattr("jaxlc.cli.planning.start_on_cpu", start)
    for name in ("load", "generate", "export"):
        monkeypatch.setattr(jaxlc, name, start)
    monkeypatch.setattr("jaxlc.cli.planning.run_in_processes", start)
    monkeypatch.setattr("jaxlc.profile.compare", start)
    monkeypatch.setattr("jaxlc.data.corpus.open_corpus", start)

    def run(verb: str, *arguments: str) -> int:
        return main_of(verb)([verb, *arguments])

    verb, *arguments = command.split()
    assert run(verb, *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    for word in advice.split():  # --NAME=VALUE replaces a flag, --NAME= removes it
        name, _, value = word.partition("=")
        verb = word if word in VERBS else verb
        arguments = [argument for argument in arguments if argument.partition("=")[0] != name]
        arguments += [word] if word not in VERBS and (value or not word.endswith("=")) else []
    with pytest.raises(WorkStarted):
        run(verb, *arguments)
