"""Rewards of answers: a function of the user's, with a limit of its time."""

import importlib
import importlib.util
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import local_path

Reward = Callable[[str, str, Mapping[str, Any]], float]  # prompt, answer, the record of the prompt
_SETTING = "config.rollouts.reward"


def load_reward(name: str) -> Reward:
    """The function FILE.py:FUNCTION or MODULE:FUNCTION.

    Raises:
      UserError: there is no such function, or its module raises an error.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UserError(
            f"invalid value {name!r} for {_SETTING}: expected FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    try:
        module = _module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise UserError(f"{_SETTING}={name!r} cannot be loaded: {reason_of(error)}") from error
    reward = getattr(module, function, None)
    if not callable(reward):
        raise UserError(f"{_SETTING}={name!r}: {place} has no function {function!r}")
    return reward


def _module_of_file(place: str):
    spec = importlib.util.spec_from_file_location("jaxlc_reward", local_path(place))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewarded(
    reward: Reward, prompt: str, answer: str, record: Mapping[str, Any], limit_seconds: float
) -> float:
    """`reward(prompt, answer, record)`.

    Args:
      limit_seconds: 0: no limit.
    Raises:
      UserError: the function raises an error, takes longer, or returns no finite number.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(float(reward(prompt, answer, record)))
        except BaseException as error:  # also SystemExit: it would end this thread without a word
            errors.append(error)

    # Python cannot end it, but the process can end without it
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_seconds or None)
    if thread.is_alive():
        raise UserError(
            f"{_SETTING} took longer than config.rollouts.reward_seconds={limit_seconds:g}, for the answer"
            f" {answer[:80]!r}"
        )
    if errors:
        raise UserError(
            f"{_SETTING} failed for the answer {answer[:80]!r}: {reason_of(errors[0])}"
        ) from errors[0]
    if not math.isfinite(results[0]):
        raise UserError(
            f"{_SETTING} returned {results[0]} for the answer {answer[:80]!r}: expected a finite number"
        )
    return results[0]
