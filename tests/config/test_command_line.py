import dataclasses
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from jaxlc.cli.checkpoints import ExportFlags
from jaxlc.cli.training import TrainFlags
from jaxlc.config import MeshConfig
from jaxlc.config.command_line import (
    HELP_SECTIONS,
    StageFlags,
    VerbFlags,
    field_comments,
    help_text,
    parse,
    run_main,
    settings_help,
)
from jaxlc.config.frozen import SECTIONS
from jaxlc.config.settings import fields_of
from jaxlc.config.values import Above0, From1, Tokens
from jaxlc.core.errors import UserError

ROOT = Path(__file__).parents[2]
QUICKSTART = f"--config={ROOT}/configs/quickstart.py"


def error_of(*arguments: str, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        parse(["program", *arguments], **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def config_file(folder: Path, body: str) -> str:
    """A config file whose get_config does `body`."""
    path = folder / "mine.py"
    path.write_text(
        f"from jaxlc.config import defaults\n\n\ndef get_config(variant=''):\n    {body}\n"
    )
    return str(path)


def test_parse_overrides_of_every_type():
    config = parse([
        "program",
        QUICKSTART,
        "--config.model.num_layers=2",  # a placeholder
        "--config.optimizer.learning_rate=1",  # an integer for a float
        "--config.train.steps", "7e0",
        "--config.model.attention.qkv_bias",
        "--noconfig.model.tie_embeddings",
        "--config.optimizer.schedule=constant",
        "--config.data.sources=here,/there/*.txt",
    ]).config  # fmt: skip
    assert (config.model.num_layers, config.train.steps, config.optimizer.learning_rate) == (
        2,
        7,
        1.0,
    )
    assert (config.model.attention.qkv_bias, config.model.tie_embeddings) == (True, False)
    assert (config.optimizer.schedule, config.data.sources) == (
        "constant",
        ("here", "/there/*.txt"),
    )
    assert config.mesh == MeshConfig(context=4, tensor=2)  # from the file


@pytest.mark.parametrize(
    ("given", "layers"), [("0,-1", (0, -1)), ("-1", (-1,)), ("(0, 2)", (0, 2))]
)
def test_parse_integers_with_commas(given, layers):
    overrides = ["--config.precision.compute=fp8", f"--config.precision.bf16_layers={given}"]
    assert parse(["program", QUICKSTART, *overrides]).config.precision.bf16_layers == layers


def test_parse_repeated_sources_accumulate_and_an_empty_value_clears_them():
    arguments = ["program", QUICKSTART, "--config.data.sources=a", "--config.data.sources=b"]
    assert parse(arguments).config.data.sources == ("a", "b")
    cleared = [*arguments, "--config.data.sources="]
    assert parse([*cleared, "--config.data.traces=t"]).config.data.sources == ()
    assert parse([*cleared, "--config.data.sources=c"]).config.data.sources == ("c",)


@dataclass(frozen=True, kw_only=True)
class Flags(StageFlags):
    """How to."""

    positional: ClassVar = ("paths",)

    paths: tuple[str, ...] = ()  # files to read
    topology: str = ""  # GPUs
    price: Above0[float] | None = None  # price of a GPU
    num_prompts: From1[int] = 1  # prompts at once
    lengths: tuple[Tokens, ...] = ()  # lengths in tokens
    stop: list[str] | None = None  # text that ends the text
    dtype: Literal["bf16", "fp32"] = "bf16"  # data type
    advise: bool = False  # try other settings


def test_parse_flags_of_every_type(tmp_path):
    path = config_file(tmp_path, "return defaults()")
    plain = parse(["program", f"--config={path}"], flags=Flags)
    assert plain.workdir == "runs/mine"
    assert plain.flags == Flags(config=path)
    arguments = [
        "a.txt",
        "--price",
        "2.5",
        "--num_prompts=1e1",
        "--lengths=1M,32k",
        "--lengths=7",
        "--advise",
        "b.txt",
    ]
    arguments += [
        "--stop=a,b",
        "--stop",
        "-",
        "--workdir=x",
        "--dtype=fp32",
        f"--config={path}:big/er",
        "-topology=h",
    ]
    named = parse(["program", *arguments], flags=Flags)
    assert (named.workdir, named.config.train.steps) == ("x", 100)
    assert vars(named.flags) == dict(
        config=f"{path}:big/er", workdir="x", stage="", paths=("a.txt", "b.txt"), topology="h", price=2.5,
        num_prompts=10, lengths=(2**20, 2**15, 7), stop=["a,b", "-"], dtype="fp32", advise=True,
    )  # fmt: skip
    assert parse(["program", f"--config={path}:big/er"]).workdir == "runs/mine-big-er"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--price=0", "invalid --price=0.0: expected greater than 0"),
        ("--num_prompts=0", "invalid --num_prompts=0: expected at least 1"),
        ("--num-prompts=2", "unknown flag --num-prompts: use --num_prompts"),
        ("--lengths=5x", "invalid --lengths=5x: expected a list of tokens, such as 4096,32K,1M"),
        ("--dtype=bf1", "invalid --dtype=bf1: expected one of 'bf16', 'fp32' (did you mean bf16?)"),
        ("--advise=maybe", "invalid --advise=maybe: expected true or false"),
        ("--advice", "unknown flag --advice: did you mean --advise?"),
        ("--noadvise", "unknown flag --noadvise: did you mean --advise?"),
        ("--price", "Missing value for flag --price; write it as --name=value"),
        ("--topology=", "invalid --topology=: its value is empty; give one, or remove the flag"),
        ("--workdir=", "invalid --workdir=: its value is empty; give one, or remove the flag"),
        ("--stage=", "invalid --stage=: its value is empty; give one, or remove the flag"),
        ("", "invalid PATHS: it is empty; expected files to read"),
    ],
)
def test_parse_invalid_flag_is_one_line(argument, words):
    assert error_of(QUICKSTART, argument, flags=Flags) == words


def test_parse_flag_before_another_flag_has_no_value():
    """As in `--workdir $EMPTY --topology=h100:1x8`."""
    assert "Missing value for flag --workdir" in error_of(
        QUICKSTART, "--workdir", "--topology=h", flags=Flags
    )


def test_parse_empty_flag_clears_its_list():
    parsed = parse(
        ["program", QUICKSTART, "--lengths=4K", "--lengths=", "--stop=a", "--stop="], flags=Flags
    ).flags
    assert (parsed.lengths, parsed.stop) == ((), [])


def test_parse_arguments_of_a_verb_without_config():
    @dataclass(frozen=True, kw_only=True)
    class Paths(VerbFlags):
        positional: ClassVar = ("source", "out")

        source: str  # workdir of a run
        out: str = ""  # output file

    assert parse(["program", "a", "b"], flags=Paths).flags == Paths(source="a", out="b")
    assert "'c' is not a flag" in error_of("a", "b", "c", flags=Paths)
    assert "unknown flag --config.train.steps: expected one of" in error_of(
        "a", "--config.train.steps=3", flags=Paths
    )


def test_parse_missing_argument_says_what_it_is():
    assert error_of(flags=ExportFlags) == "no WORKDIR is given: workdir of the run"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no config is given"),
        (
            ["--config=configs/quikstart.py"],
            "'configs/quikstart.py' not found (did you mean configs/quickstart.py?)",
        ),
        (["--config=quikstart"], "config 'quikstart' not found (did you mean quickstart?)"),
        (
            ["--config=configs/nothere.py"],
            "'configs/nothere.py' not found: give the path of a .py file or one of",
        ),
        (
            ["--config=nowhere/x.py"],
            "not found: give the path of a .py file or one of the shipped configs 128k, 1m",
        ),
        (["--config=Makefile"], "invalid config file 'Makefile': expected a Python file"),
        (["--config=256k:h10"], "256k: unknown variant 'h10': did you mean h100?"),
        (["--config"], "Missing value for flag --config"),
        ([QUICKSTART + ":mini"], "unknown variant 'mini': expected one of code"),
        (
            [QUICKSTART, "--config.train.step=3"],
            "unknown setting config.train.step: did you mean config.train.steps?",
        ),
        ([QUICKSTART, "--config.steps=3"], "unknown setting config.steps: use config.train.steps"),
        ([QUICKSTART, "--config.mesh=3"], "config.mesh is a section"),
        (
            [QUICKSTART, "--config.train.steps=1.5e0"],
            "'1.5e0' for config.train.steps: expected an integer",
        ),
        (
            [QUICKSTART, "--config.model.num_layers=two"],
            "value 'two' for config.model.num_layers: expected an integer",
        ),
        (
            [QUICKSTART, "--config.optimizer.beta1=x"],
            "'x' for config.optimizer.beta1: expected a finite number",
        ),
        (
            [QUICKSTART, "--config.model.attention.qkv_bias=maybe"],
            "'maybe' for config.model.attention.qkv_bias: expected true or false",
        ),
        (
            [QUICKSTART, "--config.attention.strategy=rng"],
            "'rng' for config.attention.strategy: expected one of 'ring'",
        ),
        ([QUICKSTART, "--config.attention.strategy=ulyses"], "'hybrid' (did you mean ulysses?)"),
        (
            [QUICKSTART, "--config.data.verbosity=1"],
            "expected one of config.data.cache_dir, config.data.chat_template",
        ),
        (
            [QUICKSTART, "--noconfig.train.steps"],
            "only a setting that is true or false has this form",
        ),
        (
            [QUICKSTART, "--config.train.steps"],
            "Missing value for flag --config.train.steps; write it as --name=value",
        ),
        ([QUICKSTART, "--worddir=x"], "unknown flag --worddir: did you mean --workdir?"),
        (
            [QUICKSTART, "--mesh.context=8"],
            "unknown flag --mesh.context: did you mean --config.mesh.context?",
        ),
        ([QUICKSTART, "--config.data.sources="], "config.data.sources is empty"),
        ([QUICKSTART, "extra"], "'extra' is not a flag"),
        (
            [QUICKSTART, "--config.mesh.context=3"],
            "needs 6 devices but config.runtime.simulated_devices is 8",
        ),
    ],
)
def test_parse_invalid_argument_is_one_line(arguments, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert words in error_of(*arguments)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "config = defaults(); config.modle.preset = 'x'",
            "line 5: unknown setting config.modle: did you mean",
        ),
        (
            "config = defaults(); config.train.steps = 'x'",
            "line 5: invalid value 'x' for config.train.steps: expected",
        ),
        ("return 1 / 0", "mine.py line 5 fails with ZeroDivisionError: division by zero"),
        ("return {}", "get_config returned dict, expected the ConfigDict of"),
        ("return (", "fails with SyntaxError"),
        (
            "raise ValueError('there is no variant of that name')",
            "there is no variant of that name",
        ),
        (
            "config = defaults(); config.train.eval_sequence = 2; return config",
            "mean config.train.eval_sequences?",
        ),
    ],
)
def test_parse_failing_config_file_names_its_line(body, words, tmp_path):
    assert words in error_of(f"--config={config_file(tmp_path, body)}")


def test_config_file_whose_get_config_takes_no_variant_is_read(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxlc.config import defaults\n\n\ndef get_config():\n    return defaults()\n"
    )
    assert parse(["program", f"--config={tmp_path}/mine.py"]).config.train.steps == 100
    assert "unknown variant 'mini': get_config() of" in error_of(
        f"--config={tmp_path}/mine.py:mini"
    )


def test_chat_template_that_is_broken_names_its_file_and_line(tmp_path):
    path = tmp_path / "chat.jinja"
    setting = f"--config.data.chat_template={path}"
    path.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    assert f"{path} line 2 is not a valid Jinja template (unexpected" in error_of(
        QUICKSTART, setting
    )
    text = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    path.write_text(text)
    assert parse(["program", QUICKSTART, setting]).config.data.chat_template == text


def test_parse_config_file_without_get_config_raises(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    assert "expected a function get_config(variant)" in error_of(f"--config={tmp_path}/mine.py")


def test_config_file_that_fails_at_import_names_its_line(tmp_path):
    path = tmp_path / "mine.py"
    for code, words in [
        (
            "from jaxlc.config import defaults\ndefaults().train.stps = 1\n",
            "line 2: unknown setting config.train.stps",
        ),
        (
            "\nimport no_such_module\n",
            "line 2 fails with ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("def get_config(variant):\n    return int('x')\n", f"{path}: invalid literal for int()"),
    ]:
        path.write_text(code)
        assert words in error_of(f"--config={path}")


def test_run_main_returns_the_status_of_main():
    argv = ["program", QUICKSTART, "--config.train.steps=130"]
    assert run_main(lambda command: command.config.train.steps, argv) == 130


@pytest.mark.parametrize("where", ["parsing", "main"])
def test_run_main_user_error_is_one_line_and_status_2(where, capsys):
    def main(command):
        raise UserError("the disk is full; free some")

    arguments = ["--config=nowhere.py"] if where == "parsing" else [QUICKSTART]
    assert run_main(main, ["program", *arguments]) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(r"error: [^\n]+\n", captured.err)
    assert captured.out == ""


def test_run_main_interrupted_prints_its_message_and_returns_130(capsys):
    def main(command):
        raise KeyboardInterrupt("the same command resumes")

    assert run_main(main, ["program", QUICKSTART]) == 130
    assert capsys.readouterr().err == "the same command resumes\n"


def test_run_main_other_error_propagates():
    with pytest.raises(ZeroDivisionError):
        run_main(lambda command: 1 // 0, ["program", QUICKSTART])


def test_help_of_an_unknown_section_names_the_nearest_one(capsys):
    assert run_main(lambda command: 1, ["program", "--help", "optimiser"]) == 2
    assert (
        capsys.readouterr().err == "error: unknown section 'optimiser': did you mean optimizer?\n"
    )
    assert run_main(lambda command: 1, ["program", "--help", "mesh"]) == 0
    text = capsys.readouterr().out
    assert "--config.mesh.context=1" in text and "--config.train.steps" not in text


def test_help_does_not_need_docstrings():
    """`python -OO` removes them, and dataclasses then have their parameters instead."""
    command = [sys.executable, "-OO", "-m", "jaxlc", "train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == help_text(TrainFlags) + "\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_run_main_help_fits_a_screen_and_names_every_section(flag, capsys):
    assert run_main(lambda command: 1, ["program", flag], flags=Flags) == 0
    text = capsys.readouterr().out
    for part in (
        "How to.",
        "--workdir",
        "--topology",
        "GPUs",
        "PATHS",
        "default: 1\n",
        "--help all",
        *HELP_SECTIONS,
    ):
        assert part in text
    assert len(text.splitlines()) < 40 and "--config.mesh.context=1" not in text
    assert run_main(lambda command: 1, ["program", flag, "all"], flags=Flags) == 0
    assert capsys.readouterr().out.strip() == settings_help().strip()


def test_settings_help_has_every_key_default_and_text():
    lines = settings_help().splitlines()
    for section in SECTIONS:
        for name, hint in fields_of(SECTIONS[section]).items():
            if dataclasses.is_dataclass(hint):
                assert all(
                    any(f"config.{section}.{name}.{field}=" in line for line in lines)
                    for field in fields_of(hint)
                )
                continue
            assert sum(line.startswith(f"  --config.{section}.{name}=") for line in lines) == 1, (
                name
            )
    text = "\n".join(lines)
    assert re.search(
        r"--config\.data\.seq_len=4096 +sequence length in tokens, over all context ranks", text
    )
    assert re.search(
        r"--config\.model\.num_layers=from the preset +number of decoder layers", text, re.MULTILINE
    )
    assert "'cosine', 'wsd', 'constant'" in text


def test_field_comments_above_and_behind_fields():
    comments = field_comments(SECTIONS["runtime"])
    assert (
        comments["process_id"]
        == "index of this process, from 0 to num_processes - 1; -1: from the launcher"
    )
    # above the field
    assert comments["xla_preset"] == "compiler options for GPUs; docs/xla_flags.md."


def test_command_with_wrong_key_prints_no_traceback():
    """In a process of its own: one line on stderr and exit status 2."""
    imports = "import sys; from jaxlc.config.command_line import run_main"
    code = f"{imports}; sys.exit(run_main(print, sys.argv))"
    arguments = [sys.executable, "-c", code, QUICKSTART, "--config.mesh.contxt=2"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "error: unknown setting config.mesh.contxt: did you mean config.mesh.context?\n"
    )
