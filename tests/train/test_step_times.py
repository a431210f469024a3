"""Times of steps: the loop with a device and a host whose clock the test moves."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jaxlc.config import defaults, load
from jaxlc.runtime import watchdog
from jaxlc.step.batch import Batch
from jaxlc.step.step import StepMetrics
from jaxlc.train import loop, step_profiler
from jaxlc.train.callbacks import Action, Callback, Callbacks, Position
from jaxlc.train.reports import metrics as pending_metrics
from jaxlc.train.stage_setup import num_tokens_until
from tests import environment

NUM_STEPS = 105
PERIOD = 10  # of evaluations and saves
EVALUATION_SECONDS, SAVE_SECONDS, TRACE_SECONDS, CALLBACK_SECONDS, HOST_SECONDS = (
    30.0,
    5.0,
    25.0,
    0.4,
    0.1,
)
TRACED_STEPS = "33:36"
WAITING_SECONDS = {13: 40.0, 64: 2.0}  # for the batch of a step


ADD = pending_metrics.PendingMetrics.add


class Machine:
    """A device that processes steps in order, and a host that dispatches them.

    Attributes:
      now: the clock of the host.
      seconds: the time of the device for each step.
    """

    def __init__(self, *, blocks: bool):
        """
        Args:
          blocks: a dispatch returns after the step before has ended, as with donated buffers on a GPU.
        """
        self.now, self.seconds, self.ends, self.added, self._blocks = 100.0, {}, {}, {}, blocks

    def run_step(self, state: int, batch: Batch) -> tuple[int, StepMetrics]:
        step, free = state + 1, self.ends.get(state, 0.0)
        self.seconds[step] = 0.75 + 0.5 * (step % 3)
        self.ends[step] = max(self.now, free) + self.seconds[step]
        if self._blocks:
            self.now = max(self.now, free)
        values = dict.fromkeys(StepMetrics._fields) | dict(
            loss=float(step), grad_norm=1.0, learning_rate=np.nan, target_tokens=1.0, is_finite=True
        )
        return step, StepMetrics(**values)

    def device_get(self, metrics: StepMetrics) -> StepMetrics:
        self.block_until_ready(int(metrics.loss))
        return metrics

    def add(self, pending: pending_metrics.PendingMetrics, step: int, metrics: StepMetrics) -> None:
        self.added[step] = self.now
        ADD(pending, step, metrics)

    def end_of(self, metrics: StepMetrics) -> float:
        """When a thread that waits from `add` on records the end."""
        step = int(metrics.loss)
        return max(self.ends[step], self.added[step])

    def block_until_ready(self, state: int) -> None:
        self.now = max(self.now, self.ends[state])

    def cudaProfilerStart(self):  # noqa: N802
        self.now += TRACE_SECONDS

    cudaProfilerStop = cudaProfilerStart  # noqa: N815

    def action(self, seconds: float):
        """An action of the host that needs the result of the last step."""

        def run(position: Position) -> Position:
            self.now = max(self.now, self.ends[position.step]) + seconds
            return position

        return run

    def batches(self, *_):
        for step in range(1, NUM_STEPS + 1):
            self.now += WAITING_SECONDS.get(step, HOST_SECONDS)
            yield (
                dict.fromkeys(("tokens", "targets", "loss_weights", "positions", "segment_ids"), 0),
                step == NUM_STEPS,
            )


def rows_of(
    machine: Machine, tmp_path, *, log_every_steps: int, callbacks: list[Callback]
) -> list[dict]:
    """The rows of `NUM_STEPS` steps."""
    config = defaults()
    config.train.update(log_every_steps=log_every_steps)
    config.profile.update(steps=TRACED_STEPS, tool="nsys")
    rows: list[dict] = []
    run = SimpleNamespace(
        stage=SimpleNamespace(
            name="",
            end_step=NUM_STEPS,
            config=load(config),
            step=SimpleNamespace(model=None, mesh=None, reference=None),
            source=SimpleNamespace(stop_waiting=lambda: None),
        ),
        workdir=tmp_path,
        callbacks=Callbacks(callbacks),
        saves=(Action(PERIOD, machine.action(SAVE_SECONDS)),),
        actions=(Action(PERIOD, machine.action(EVALUATION_SECONDS)),),
        metrics=SimpleNamespace(write=lambda **row: rows.append(row)),
        timings=SimpleNamespace(take=dict),
        progress=SimpleNamespace(
            start_stage=lambda *_: None,
            update=lambda **_: None,
            log=print,
            first_step_ended=lambda _: None,
        ),
    )
    guard = SimpleNamespace(calling=lambda _: contextlib.nullcontext(), stop=lambda: None)
    loop._train(run, Position(state=0, step=0, next_sequence=0), machine.run_step, guard)
    return rows


@pytest.mark.parametrize("has_callback", [False, True])
@pytest.mark.parametrize("log_every_steps", [1, 7, 100])
@pytest.mark.parametrize("blocks", [False, True])
def test_step_seconds_equal_the_time_of_the_device(
    blocks, log_every_steps, has_callback, tmp_path, monkeypatch
):
    machine = Machine(blocks=blocks)
    monkeypatch.setattr(pending_metrics, "now", lambda: machine.now)
    monkeypatch.setattr(pending_metrics, "end_of", machine.end_of)
    monkeypatch.setattr(
        pending_metrics.PendingMetrics, "add", lambda *arguments: machine.add(*arguments)
    )
    for name in ("device_get", "block_until_ready"):
        monkeypatch.setattr(pending_metrics.jax, name, getattr(machine, name))
    monkeypatch.setattr(step_profiler, "_cuda_runtime", lambda: machine)
    monkeypatch.setattr(loop, "training_batches", machine.batches)
    measured = []

    @contextlib.contextmanager
    def fetching(step):
        seconds = []
        yield seconds
        measured.extend(seconds)

    monkeypatch.setattr(watchdog, "fetching", fetching)

    class Sleeping(Callback):
        def on_step(self, step, metrics):
            machine.now += CALLBACK_SECONDS

    callbacks = [Sleeping()] if has_callback else []
    rows = rows_of(machine, tmp_path, log_every_steps=log_every_steps, callbacks=callbacks)
    assert [row["step"] for row in rows] == sorted(
        {*range(log_every_steps, NUM_STEPS, log_every_steps), NUM_STEPS}
    )
    first = 1
    for row in rows:
        expected = np.mean([machine.seconds[step] for step in range(first, row["step"] + 1)])
        assert row["step_seconds"] == pytest.approx(expected, rel=0.02), row["step"]
        first = row["step"] + 1
    # of the watchdog
    assert measured == pytest.approx([machine.seconds[step] for step in range(1, NUM_STEPS + 1)])


def test_tokens_of_a_finished_run_with_fewer_steps_are_those_of_the_run():
    config = load(defaults())
    stages = [
        SimpleNamespace(first_step=first, end_step=end, config=config)
        for first, end in ((0, 2), (2, 3))
    ]
    tokens = [num_tokens_until(stages, step) / config.tokens_per_step for step in (1, 2, 3, 5)]
    assert tokens == [1, 2, 3, 5]


_ERROR_IN_FLIGHT = """
import jax
from jaxlc.train.reports.metrics import PendingMetrics
x = jax.numpy.ones((128, 128))
step = jax.jit(lambda x: jax.lax.fori_loop(0, 10_000, lambda _, x: jax.numpy.tanh(x @ x), x)).lower(x).compile()
pending = PendingMetrics(0)
pending.dispatching()
pending.add(1, step(x))
pending.close()
raise RuntimeError("of a callback")
"""


def test_error_while_a_step_is_in_flight_does_not_abort_python():
    done = subprocess.run(
        [sys.executable, "-c", _ERROR_IN_FLIGHT],
        env=environment.for_user(JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "RuntimeError: of a callback")
