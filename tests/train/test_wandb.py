"""Metrics for Weights & Biases, with a stand-in for its package."""

import sys
import threading
import time
from types import ModuleType

import pytest

from jaxlc.config import read_config
from jaxlc.core.errors import UserError
from jaxlc.train.loop import run
from jaxlc.train.reports import metrics
from jaxlc.train.reports.metrics import WandbWriter
from tests.train import runs

pytestmark = pytest.mark.usefixtures("without_plots")


class Server(ModuleType):
    """Stands for the package wandb: keeps what it gets, or fails, or never answers."""

    def __init__(self, failure: str = ""):
        super().__init__("wandb")
        self.__spec__ = sys.__spec__ or True  # so that importlib finds the package
        self.failure, self.starts, self.rows, self.num_finished = failure, [], [], 0
        self.answers = threading.Event()

    def init(self, **arguments) -> "Server":
        if self.failure == "raises":
            raise ConnectionError("no server\nmore")
        if self.failure == "blocks":
            self.answers.wait()
        self.starts.append(arguments)
        return self

    def log(self, values: dict, step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture
def server(monkeypatch):
    def install(failure: str = "") -> Server:
        server = Server(failure)
        monkeypatch.setitem(sys.modules, "wandb", server)
        return server

    return install


def test_writer_sends_rows_in_order(server, tmp_path):
    wandb = server()
    writer = WandbWriter("project", "a1", tmp_path, {"train.steps": 4}, pytest.fail)
    writer.write(1, dict(loss=2.0))
    writer.write(2, dict(loss=1.0))
    writer.close()
    assert wandb.rows == [(1, dict(loss=2.0)), (2, dict(loss=1.0))] and wandb.num_finished == 1
    [start] = wandb.starts
    assert (start["project"], start["id"], start["resume"]) == ("project", "a1", "allow")


def test_writer_without_server_warns_and_does_not_wait(server, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(metrics, "_MAX_ROWS", 10)
    lines = []
    for failure in ("raises", "blocks"):
        wandb = server(failure)
        start = time.monotonic()
        writer = WandbWriter("project", "a1", tmp_path, {}, lines.append)
        for step in range(1000):
            writer.write(step, dict(loss=1.0))
        writer.close()
        assert time.monotonic() - start < 5.0  # a limit for a call that waits, not a measurement
        wandb.answers.set()
    raised, blocked = lines
    assert "from here on (ConnectionError: no server)" in raised
    assert "has not taken all metrics" in blocked


def test_resumed_run_continues_its_run(server, tmp_path):
    wandb = server()
    config = runs.write_config(tmp_path)
    settings = dict(train__wandb_project="long", train__eval_every_steps=0, model__num_layers=1)
    runs.train(config, tmp_path / "run", **settings, train__steps=4)
    runs.train(config, tmp_path / "run", **settings, train__steps=6)
    first, second = wandb.starts
    assert first["id"] == second["id"] and second["config"]["train.steps"] == 6
    assert [step for step, values in wandb.rows if "loss" in values] == [1, 2, 3, 4, 5, 6]


def test_run_without_the_package_raises(tmp_path, monkeypatch):
    from jaxlc.core import errors

    monkeypatch.setattr(errors, "is_installed", lambda package: package != "wandb")
    config = read_config(str(runs.write_config(tmp_path)))
    config.train.wandb_project = "long"
    with pytest.raises(
        UserError, match=r"config.train.wandb_project needs the package wandb.*\[wandb\]"
    ):
        run(config, tmp_path / "run")
