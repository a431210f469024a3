"""Invalid user input gives one line on stderr and exit status 2, before the run prints or compiles
anything.
"""

import re

import pytest

from jaxlc.cli.training import train
from jaxlc.config.command_line import run_main
from jaxlc.step import step
from tests.advice import advised
from tests.train import runs


class CompiledError(Exception):
    pass


@pytest.fixture
def compiles_nothing(monkeypatch):
    def raise_compiled(self):
        raise CompiledError

    monkeypatch.setattr(step.TrainStep, "compile", raise_compiled)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return runs.write_config(tmp_path_factory.mktemp("errors"))


@pytest.mark.parametrize(
    "overrides, words",
    [
        (
            ["mesh.contxt=2"],
            "unknown setting config.mesh.contxt: did you mean config.mesh.context?",
        ),
        (["mesh.context=two"], "invalid value 'two' for config.mesh.context: expected an integer"),
        (["mesh.context=2"], "--config.mesh."),
        (
            ["mesh.context=2", "runtime.simulated_devices=0"],
            "needs 4 devices but the number of available devices is 8; use --config",
        ),
        (["model.attention.num_heads=3", "model.attention.num_kv_heads=3"], "3"),
        (["data.seq_len=100"], "100"),
        (["data.sources=/nowhere/at/all"], "/nowhere/at/all"),
        (["data.sources={empty}"], "empty"),
        (["data.tokenizer=/nowhere/tokenizer.json"], "/nowhere/tokenizer.json"),
        (
            ["model.vocab_size=100"],
            "tokenizer bytes has 257 tokens and the model 100; set --config.model.vocab_size=257",
        ),
        (
            ["evals.tasks=needle", "evals.lengths=8"],
            "config.evals: invalid length 8 for the task needle, .*114 tokens",
        ),
        (
            ["evals.tasks=loss", "evals.documents={short}"],
            "config.evals: no document of .*short.txt has 128 tokens",
        ),
        (["evals.tasks=qa_1"], "task qa_1 needs .*--config.evals.squad="),
        (["=3"], "unknown setting config."),
        (
            ["data.sources=('a',3)"],
            "invalid value .* for config.data.sources: expected a list of strings",
        ),
        (["train.steps=0"], "invalid value 0 for config.train.steps: expected at least 1"),
        (["model.preset=llama3-8c"], "llama3-8c.*did you mean llama3.1-8b?"),
        (
            ["attention.strategy=ulysses"],
            "context=4, and each tensor rank has 2 query and 1 key/value heads",
        ),
        (
            ["attention.ulysses_degree=2"],
            "ulysses_degree=2 is for strategy 'hybrid', and .*strategy is 'ring'",
        ),
        (
            ["attention.kernel=cudnn"],
            r"unsupported by attention kernel cudnn: platform cpu \(supported: gpu\)",
        ),
        (
            ["precision.compute=fp4"],
            "invalid value 'fp4' for config.precision.compute: expected one of 'auto', 'bf16', 'fp32'",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("compiles_nothing")
def test_train_with_invalid_setting_prints_one_line(config, tmp_path, capsys, overrides, words):
    """And its advice removes the error: the run reaches compilation."""
    empty, short = tmp_path / "empty", tmp_path / "short.txt"
    empty.mkdir()
    short.write_text("a short text")
    argv = [f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    argv += [f"--config.{override}".format(empty=empty, short=short) for override in overrides]
    advice = advised(_assert_refused(argv, words, capsys))
    assert not (tmp_path / "run").exists()
    for settings in advice:
        # JAX has started, without a GPU; and there is no data set.
        if {"runtime.simulated_devices", "precision.compute", "evals.squad"} & settings.keys():
            continue
        followed = [*argv, *(f"--config.{path}={value}" for path, value in settings.items())]
        with pytest.raises(CompiledError):
            run_main(train, ["jaxlc.train", *followed])


@pytest.mark.parametrize("obstacle", ["run", "run/checkpoints", "run/metrics.jsonl/directory"])
@pytest.mark.usefixtures("compiles_nothing")
def test_train_with_unwritable_workdir_prints_one_line(config, tmp_path, capsys, obstacle):
    """A different workdir removes the error."""
    path = tmp_path / obstacle
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    _assert_refused(
        [f"--config={config}", f"--workdir={tmp_path / 'run'}"], "use a different --workdir", capsys
    )
    with pytest.raises(CompiledError):
        run_main(
            train,
            ["jaxlc.train", f"--config={config}", f"--workdir={tmp_path / 'other'}"],
        )


@pytest.mark.parametrize(
    "argv, words",
    [
        (
            [],
            "no config is given: use --config=NAME or --config=FILE.py; the shipped configs are .*quickstart",
        ),
        (
            ["--config=configs/quickstrat.py"],
            r"config 'configs/quickstrat.py' not found \(did you mean configs/quickstart.py?\)",
        ),
        (
            ["--config=configs/quickstart.py:mini"],
            "unknown variant 'mini': expected one of code",
        ),
        (
            ["--config=configs/quickstart.py", "--wrokdir=x"],
            "unknown flag --wrokdir: did you mean --workdir?",
        ),
    ],
    ids=["none", "file", "variant", "flag"],
)
def test_train_with_invalid_command_line_prints_one_line(argv, words, capsys):
    _assert_refused(argv, words, capsys)


def _assert_refused(argv: list[str], words: str, capsys) -> str:
    """Returns the error."""
    assert run_main(train, ["jaxlc.train", *argv]) == 2
    stdout, stderr = capsys.readouterr()
    assert "mesh " not in stdout  # the description of the run
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    assert re.search(words.replace("?", r"\?"), stderr), stderr
    return stderr.removeprefix("error: ").rstrip()
