"""Rewards of answers: a function of the user's, with retries and a limit of its time."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import runpy
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxlc.config.rollouts_schema import RolloutsConfig
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import local_path
from jaxlc.core.interrupts import in_thread

# (prompt, answer, record) and fields of `Answer` by name, or (group, record); see docs/post_training.md
Reward = Callable[..., Any]
_SETTING = "config.rollouts.reward"
_MORE = ("turns", "tokens", "reason")
T = TypeVar("T")


class Answer(NamedTuple):
    """What a reward gets of an answer."""

    prompt: str
    answer: str  # the text of the last turn
    turns: list[str]  # the texts of all turns of the policy
    tokens: list[list[int]]  # of each context, with its prompt
    reason: str  # why the last turn ended, see `agents.Turn`


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """The function FILE.py:FUNCTION or MODULE:FUNCTION.

    Args:
      setting: that has this name, for errors.
    Raises:
      UserError: there is no such function, or its module raises an error.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UserError(
            f"invalid value {name!r} for {setting}: expected FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    try:
        if place.endswith(".py"):
            names = runpy.run_path(str(local_path(place)))
        else:
            names = vars(importlib.import_module(place))
    except Exception as error:
        raise UserError(f"{setting}={name!r} cannot be loaded: {reason_of(error)}") from error
    if not callable(names.get(function)):
        raise UserError(f"{setting}={name!r}: {place} has no function {function!r}")
    return names[function]


async def rewards_of(
    reward: Reward, group: Sequence[Answer], record: Mapping[str, Any], settings: RolloutsConfig
) -> list[float | str]:
    """The reward of each answer to a prompt, or why it failed after settings.reward_retries. Calls
    of an asynchronous function overlap.
    """
    names = inspect.signature(reward).parameters
    if "group" in names:
        return await _retried(lambda: reward(list(group), record), len(group), settings)
    calls = []
    for answer in group:
        more = {name: getattr(answer, name) for name in _MORE if name in names}
        call = functools.partial(reward, answer.prompt, answer.answer, record, **more)
        calls.append(_retried(call, 1, settings))
    if inspect.iscoroutinefunction(reward):
        results = await asyncio.gather(*calls)
    else:
        results = [await call for call in calls]
    return [x for (x,) in results]


async def _retried(
    call: Callable[[], Any], num_numbers: int, settings: RolloutsConfig
) -> list[float | str]:
    """The numbers that a call returns, or why the last one failed."""
    limit = settings.reward_seconds
    problem = ""
    for _ in range(settings.reward_retries + 1):
        try:
            async with asyncio.timeout(limit or None):
                value = await asyncio.wrap_future(in_thread(call))
                if inspect.isawaitable(value):
                    value = await value
            numbers = np.atleast_1d(np.array(value, float))
            if numbers.shape == (num_numbers,) and np.isfinite(numbers).all():
                return numbers.tolist()
            problem = f"returned {value}: expected {num_numbers} finite number"
        except TimeoutError:
            problem = f"took longer than config.rollouts.reward_seconds={limit:g}"
        except (Exception, SystemExit) as error:
            problem = f"failed: {reason_of(error)}"
    return [f"{_SETTING} {problem}"] * num_numbers


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:  # SystemExit of a task of an agent stops the loop
            with contextlib.suppress(SystemExit):
                loop.run_forever()

    in_thread(run)
    return loop


def in_background(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine in the event loop of a daemon thread. There is one loop, since agents and
    rewards may keep connections and locks, which belong to one.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())
