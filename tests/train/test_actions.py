"""Which actions run after a step, and what they add to the position."""

import dataclasses

import pytest

from jaxlc.train.callbacks import Action, Position, Stop, run_due


def position(step: int) -> Position:
    return Position(state=None, step=step, next_sequence=4 * step)


@pytest.mark.parametrize(
    "step, stop, names",
    [
        (0, None, "evaluate"),
        (1, None, ""),
        (2, None, "evaluate"),
        (3, None, "save"),
        (6, None, "save evaluate"),
        (1, Stop.SIGTERM, "save"),
        (2, Stop.SIGINT, "save"),
        (4, None, "evaluate roll"),
        (4, Stop.SIGTERM, "save"),
        (1, Stop.DONE, "save evaluate score roll"),
    ],
    ids=str,
)
def test_actions_run_at_their_periods_and_when_the_run_stops(step, stop, names):
    ran = []

    def action(name, every, **when):
        return Action(every, lambda position: ran.append(name) or position, **when)

    actions = (
        action("save", 3, at_signal=True),
        action("evaluate", 2, at_start=True, at_resume=True),
        action("score", 0, at_start=True, at_resume=True),
        action("roll", 4, at_resume=True),
    )
    run_due(actions, position(step), stop)
    assert " ".join(ran) == names


def test_later_action_gets_what_an_earlier_one_added():
    saved = []
    actions = (
        Action(1, lambda position: dataclasses.replace(position, rows=[dict(step=1)])),
        Action(1, lambda position: saved.append(position.rows) or position),
    )
    assert run_due(actions, position(1)).rows == saved[0] == [dict(step=1)]
