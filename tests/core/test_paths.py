import sys
from pathlib import Path

import pytest

import jaxlc
from jaxlc import cli
from jaxlc.cli.flags import check_output_file
from jaxlc.config import read_config
from jaxlc.core.errors import UserError
from jaxlc.core.files import displayed, local_path, write_json
from jaxlc.runtime import peers
from jaxlc.simulate import roofline
from tests.helpers import without_home


def test_displayed_path_is_relative_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert displayed(tmp_path / "runs" / "a") == Path("runs/a")
    assert displayed(tmp_path.parent / "b") == tmp_path.parent / "b"
    assert displayed(Path("runs")) == Path("runs")


@pytest.mark.parametrize(
    "path", ["~/runs", "org/model", "a:b/c", "C:/runs", "/runs/gs:/x", "~no-such-user/x"]
)
def test_local_path_expands_the_home_directory(path):
    assert str(local_path(path)) == path.replace("~/", f"{Path.home()}/")


def test_files_of_flags_may_be_in_the_home_directory(tmp_path, monkeypatch):
    """A shell expands `~` at the begin of a word only, not in --json=~/plan.json."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.py").write_text("from jaxlc.config import defaults as get_config\n")
    (tmp_path / "sweep").mkdir()
    assert read_config("~/my.py") is not None
    check_output_file("json", "~/constants.json")
    write_json("~/constants.json", {"matmul_share": 0.5})
    assert roofline.from_file("~/constants.json").matmul_share == 0.5
    for read, path, problem in (
        (jaxlc.plan.Plan.from_json, "~/constants.json", "invalid plan"),
        (jaxlc.sweep.load, "~/sweep", f"no points in {tmp_path}"),
    ):
        with pytest.raises(UserError, match=problem):
            read(path)


def test_paths_in_a_deleted_working_directory(tmp_path, monkeypatch):
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert displayed(tmp_path / "run") == local_path(tmp_path / "run") == tmp_path / "run"
    with pytest.raises(UserError, match="the working directory was deleted: change to another"):
        local_path("runs/a")


@pytest.mark.parametrize("path", ["a text " * 40, "a/" * 2048, "ä" * 128])
def test_local_path_that_is_too_long_raises(path):
    with pytest.raises(UserError, match="is too long: a path has at most"):
        local_path(path)


def test_local_path_without_a_home_directory_raises(monkeypatch):
    """As in a container that runs with the number of a user: a directory named ~ would be made."""
    without_home(monkeypatch)
    for path in ("~", "~/runs", Path("~/runs")):
        with pytest.raises(UserError, match="this user has none: set HOME"):
            local_path(path)
    assert local_path("./~/runs") == Path("~/runs")


@pytest.mark.parametrize(
    "url", ["gs://b/run", Path("gs://b/run"), "s3://b", "https://huggingface.co/a/b", "file:///run"]
)
def test_local_path_with_a_url_raises(url):
    with pytest.raises(UserError, match="is a URL") as error:
        local_path(url)
    assert ("hub id ORGANIZATION/NAME" in str(error.value)) == ("huggingface" in str(url))


@pytest.mark.parametrize(
    "arguments",
    [
        "train --config=quickstart --workdir=gs://b/run",
        "train --config=quickstart --config.model.init_from=hf://org/model",
        "plan --config=quickstart --topology=h100:1x8 --html=s3://b/plan.html",
        "recommend --config=quickstart --topology=h100:1x8 --out=gs://b/recommended.py",
        "sweep --config=quickstart --topology=h100:1x8 --out=gs://b/sweep",
        "data report --config=quickstart --config.data.sources=gs://b/books",
        "data report --config=quickstart --workdir=gs://b/run",
        "generate gs://b/run --prompt=a",
        "eval gs://b/run --lengths=1024",
        "eval run --lengths=1024 --out=gs://b/evals",
        "export gs://b/run out",
        "export run gs://b/out",
        "profile gs://b/run",
    ],
)
def test_command_with_a_url_prints_one_line_and_writes_nothing(
    arguments, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["jaxlc"])
    monkeypatch.setattr(peers, "end_process", sys.exit)  # this process is not that of the command
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit) as end:
        sys.exit(cli.main(["jaxlc", *arguments.split()]))
    error = capsys.readouterr().err
    assert end.value.code == 2 and "is a URL" in error and error.count("\n") == 1, error
    assert list(tmp_path.iterdir()) == []
