import signal

import pytest

from jaxlc import interrupts
from jaxlc.cli.training import train
from jaxlc.config.command_line import run_main
from jaxlc.train import loop
from jaxlc.train.callbacks import PreemptionGuard, Stop
from tests.train import runs


@pytest.mark.parametrize(
    "number, stop, status",
    [
        (signal.SIGTERM, Stop.SIGTERM, 143),
        (signal.SIGINT, Stop.SIGINT, 130),
        (signal.SIGHUP, Stop.SIGHUP, 129),
        (signal.SIGUSR1, Stop.SIGTERM, 143),
        (signal.SIGUSR2, Stop.SIGTERM, 143),
    ],
)
def test_guard_after_signal_stops_with_its_exit_status(number, stop, status):
    previous = signal.getsignal(number)
    with PreemptionGuard() as guard:
        assert guard.stop() is None
        signal.raise_signal(number)
        assert guard.stop() is stop and stop.value == status
    assert signal.getsignal(number) is previous


def test_guard_after_second_ctrl_c_raises():
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), PreemptionGuard():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


def test_guard_after_a_later_second_signal_raises(monkeypatch):
    """Two signals at once are one request: `timeout` and the end of a terminal send them twice."""
    with pytest.raises(KeyboardInterrupt), PreemptionGuard() as guard:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert guard.stop() is Stop.SIGHUP
        monkeypatch.setattr(interrupts, "_REPEAT_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("number", "own"),
    [(signal.SIGHUP, signal.SIG_IGN), (signal.SIGUSR1, lambda number, frame: None)],
    ids=["ignored, as by nohup", "of the program"],
)
def test_guard_with_a_handler_of_the_program_does_not_stop(number, own):
    handler = signal.signal(number, own)
    with PreemptionGuard() as guard:
        signal.raise_signal(number)
        assert guard.stop() is None
    assert signal.signal(number, handler) is own


def test_guard_after_sigterm_and_ctrl_c_stops():
    with PreemptionGuard() as guard:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert guard.stop() is Stop.SIGINT


@pytest.mark.parametrize(
    "steps, words",
    [
        ([], "there is no checkpoint in"),
        ([5, 10], "is of step 10; run the same command again to resume from it"),
    ],
    ids=["none", "two"],
)
def test_train_interrupted_outside_loop_names_latest_checkpoint(
    tmp_path, monkeypatch, capsys, steps, words
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run", interrupt)
    for step in steps:
        (tmp_path / "run" / "checkpoints" / str(step)).mkdir(parents=True)
    config = runs.write_config(tmp_path)
    argv = ["jaxlc.train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    assert run_main(train, argv) == 130
    stderr = capsys.readouterr().err
    assert stderr.startswith("interrupted; ") and words in stderr
