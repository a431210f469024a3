"""Errors of configs, and their advice, which removes the error when it is followed."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from jaxlc.config import defaults, load_stages
from jaxlc.config.settings import hint_at, set_at
from jaxlc.core.errors import UserError

_VALUE = r"[\w.,:/-]*[\w/-]"


def changed(section: str, **values) -> ConfigDict:
    """The defaults with some values replaced, possibly by values of another type."""
    config = defaults().to_dict()
    config[section].update(values)
    return ConfigDict(config)


def rejected(config: ConfigDict) -> str:
    """The error of a config, which is one line and whose advice removes that error."""

    def read(settings: dict[str, Any]) -> None:
        values = config.to_dict()
        for path, value in settings.items():
            if value is None:
                _remove(values, path)
            else:
                set_at(values, path, value)
        load_stages(ConfigDict(values))

    return followed(read)


def followed(attempt: Callable[[dict[str, Any]], object]) -> str:
    """The error of `attempt({})`. `attempt(settings)` must not raise it again with any settings
    that it advises.

    Another error may follow, if its own advice removes it.
    """
    message = _error(attempt, {})
    assert message and "\n" not in message
    for path in re.findall(r"config\.([\w.]*\w)", message.partition("did you mean ")[2]):
        hint_at(path)
    for settings in advised(message):
        assert _is_resolved(attempt, settings, {message}), f"{settings} does not help: {message}"
    return message


def _is_resolved(
    attempt: Callable[[dict[str, Any]], object], settings: dict[str, Any], seen: set[str]
) -> bool:
    message = _error(attempt, settings)
    if message in seen:
        return False
    further = (
        _is_resolved(attempt, settings | more, seen | {message}) for more in advised(message)
    )
    return not message or any(further)


def _error(attempt: Callable[[dict[str, Any]], object], settings: dict[str, Any]) -> str:
    try:
        attempt(settings)
    except UserError as error:
        return str(error)
    return ""


def advised(message: str) -> Iterator[dict[str, Any]]:
    """Yields the settings of each piece of advice in an error, None for one to remove.

    Advice is --config.A.B=VALUE or, for the setting with which the error begins, "use 4096 or
    4098", "set it to VALUE", "remove it" or "did you mean VALUE?".
    """
    if nearest := re.match(
        r"invalid value .* for config\.([\w.]+): .*did you mean ([\w.-]+)\?\)?$", message
    ):
        yield {nearest[1]: nearest[2]}
    for words in re.findall(rf"(?:--(?:no)?config\.[\w.]*\w(?:=(?:{_VALUE})?)? ?)+", message):
        found = re.findall(rf"--(no)?config\.([\w.]*\w)(=(?:{_VALUE})?)?", words)
        settings = {path: "false" if no else value[1:] for no, path, value in found if no or value}
        if settings and not any(value.isupper() for value in settings.values()):
            yield settings
    if first := re.match(
        r"config\.([\w.]+)[= ].*[;:] (?:.*\bor )?(use \d+ or \d+|use \d+|set it to [\w.]+|remove it)$",
        message,
    ):
        path, advice = first.groups()
        yield from (
            {path: value} for value in re.findall(r"\d[\w.]*|(?<=to )\w+", advice) or [None]
        )


def flags(settings: dict[str, Any]) -> list[str]:
    """The command-line flags of settings."""
    return [f"--config.{path}={value}" for path, value in settings.items()]


def _remove(values: dict[str, Any], path: str) -> None:
    *parts, name = path.split(".")
    for part in parts:
        values = values[part]
    del values[name]
