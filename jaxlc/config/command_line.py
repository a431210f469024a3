"""Command lines: `--config=NAME[:variant] --config.a.b=value --workdir=DIR --flag=value`. Imports no jax.

The flags of a verb are the fields of a dataclass: their types convert the values, as those of settings do, and their
comments are the help.
"""

import dataclasses
import os
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ml_collections import ConfigDict

from jaxlc.config.checks.unused_settings import check_used
from jaxlc.config.files import read_config, shipped_configs
from jaxlc.config.frozen import SECTIONS, Config
from jaxlc.config.help import HELP_SECTIONS, field_comments, settings_help
from jaxlc.config.setting_paths import converted, hint_at, is_part, set_at
from jaxlc.config.settings import Settings
from jaxlc.config.stages import Stage, load_stages
from jaxlc.config.values import typed, without_none
from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import did_you_mean

_SETTING = "--config."


@dataclass(frozen=True, kw_only=True)
class VerbFlags:
    """The flags of a verb: the fields of a subclass. `--flag_name=value` sets one; a bool needs no value."""

    positional: ClassVar[tuple[str, ...]] = ()  # fields that are arguments without a name; a tuple takes the rest
    moved: ClassVar[Mapping[str, str]] = {}  # flags that the verb had, and what to use instead


@dataclass(frozen=True, kw_only=True)
class ConfigFlags(VerbFlags):
    """The flags of every verb that takes a config."""

    config: str = ""  # name of a shipped config or path of a .py file, with an optional variant: 256k, 256k:h100, my.py
    workdir: str = ""  # directory for checkpoints, metrics and plots; default: runs/NAME[-variant]


@dataclass(frozen=True, kw_only=True)
class StageFlags(ConfigFlags):
    """The flags of a verb that can select a stage."""

    stage: str = ""  # name of one stage, for a config with stages


FlagsT = TypeVar("FlagsT", bound=VerbFlags)


@dataclass(frozen=True, kw_only=True)
class ParsedCommand(Generic[FlagsT]):
    flags: FlagsT
    stages: tuple[Stage, ...] = ()  # one without a name for a config without stages
    config_path: str = ""  # as given: a shipped name or a path, without the variant
    variant: str = ""  # "": none
    workdir: str = ""

    @property
    def config(self) -> Config:
        """The config of the only stage.

        Raises:
          UserError: there are several stages.
        """
        if len(self.stages) > 1:
            names = ", ".join(stage.name for stage in self.stages)
            raise UserError(f"the config has the stages {names}: choose one with --stage=NAME")
        return self.stages[0].config


# The config to start from, made of that of --config, or None, and of the values of the flags; None: no config.
Base = Callable[[ConfigDict | None, Mapping[str, Any]], ConfigDict | None]


def run_main(
    main: Callable[[ParsedCommand[Any]], int],
    argv: Sequence[str],
    *,
    description: str | None,
    flags: type[VerbFlags] = ConfigFlags,
    base: Base | None = None,
) -> int:
    """Parses `argv`, runs `main`, and returns the exit status: 2 after a UserError, 130 after Ctrl-C.

    The error, or the message of the interrupt, is printed as one line on stderr.

    Args:
      flags, base: see `parse`.
    """
    try:
        if any(arg in ("--help", "-help", "-h") for arg in argv[1:]):
            print(help_text(description or "", flags, [arg for arg in argv[1:] if arg in HELP_SECTIONS]))
            return 0
        return main(parse(argv, flags=flags, base=base))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output ended, as in `jaxlc plan --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        return 128 + signal.SIGPIPE


def parse(argv: Sequence[str], *, flags: type[VerbFlags] = ConfigFlags, base: Base | None = None) -> ParsedCommand[Any]:
    """Reads a command line, program name first.

    Args:
      flags: the flags of the verb. A config is read if they are ConfigFlags.
      base: makes or changes the config by these flags, before overrides of settings are applied.
    Raises:
      UserError: an unknown flag or key, a value of the wrong type, a config file that is missing or fails.
    """
    values = _values(argv[1:], flags)
    overrides = {name.removeprefix(_SETTING): values.pop(name) for name in [*values] if name.startswith(_SETTING)}
    parsed = flags(**{name.removeprefix("--"): value for name, value in values.items()})
    if not isinstance(parsed, ConfigFlags):
        return ParsedCommand(flags=parsed)
    config = read_config(parsed.config) if parsed.config else None
    if base is not None:
        config = base(config, vars(parsed))
    if config is None:
        raise UserError(
            "no config is given: use --config=NAME or --config=FILE.py; the shipped configs are"
            f" {', '.join(shipped_configs())}"
        )
    config_path, _, variant = parsed.config.partition(":")
    stem = "-".join(filter(None, [Path(config_path).stem, variant.replace("/", "-")]))
    return ParsedCommand(
        flags=parsed,
        stages=_selected(load_stages(_with_overrides(config, overrides)), getattr(parsed, "stage", "")),
        config_path=config_path,
        variant=variant,
        workdir=parsed.workdir or f"runs/{stem}",
    )


def _with_overrides(config: ConfigDict, overrides: Mapping[str, Any]) -> Settings:
    """`config` with the values of `--config.PATH=value` arguments.

    Raises:
      UserError: a value that cannot be set, or that no stage would use.
    """
    settings = config if isinstance(config, Settings) else Settings(values=config.to_dict())
    for path, value in overrides.items():
        set_at(settings, path, value)
    stages = converted("stages", settings.stages)
    for path in overrides:
        if path.partition(".")[0] in SECTIONS:
            check_used(stages, path)
    return settings


def _selected(stages: tuple[Stage, ...], name: str) -> tuple[Stage, ...]:
    """The stage with this name, or all stages."""
    selected = tuple(stage for stage in stages if name in ("", stage.name))
    if not selected:
        names = [stage.name for stage in stages if stage.name]
        advice = did_you_mean(name, names) if names else "the config has no stages"
        raise UserError(f"unknown --stage={name}: {advice}")
    return selected


def _hints(flags: type[VerbFlags]) -> dict[str, Any]:
    """The type of each flag."""
    hints = typing.get_type_hints(flags)
    return {field.name: hints[field.name] for field in dataclasses.fields(flags)}


def _values(arguments: Sequence[str], flags: type[VerbFlags]) -> dict[str, Any]:
    """The values of the arguments, by "--flag" and "--config.a.b". A flag with several values may be repeated."""
    hints, values, positional = _hints(flags), dict[str, Any](), list[str]()
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        is_negated = name.startswith("noconfig.")
        name = "--" + (name.removeprefix("no") if is_negated else name)
        hint = _hint(name, hints, flags)
        if is_negated and (hint is not bool or has_value):
            raise UserError(f"invalid {word}: only a setting that is true or false has this form")
        if not has_value and hint is bool:
            value = str(not is_negated)
        elif not has_value and (value := next(words, None)) is None:
            raise UserError(f"Missing value for flag {name}; write it as --name=value")
        if typing.get_origin(hint) is list:  # repeated as a whole, without commas
            value = [*values.get(name, []), value]
        elif not is_part(hint):
            value = typed(name.removeprefix("--config.") if name.startswith(_SETTING) else name, value, hint)
        values[name] = (*values[name], *value) if isinstance(value, tuple) and name in values else value
    return values | _positional_values(positional, hints, flags)


def _hint(name: str, hints: Mapping[str, Any], flags: type[VerbFlags]) -> Any:
    """The type of a flag or setting.

    Raises:
      UserError: there is none; the message names the nearest flag, or the new spelling of an old one.
    """
    takes_config = issubclass(flags, ConfigFlags)
    if name.startswith(_SETTING) and takes_config:
        return hint_at(name.removeprefix(_SETTING))
    known = [flag for flag in hints if flag not in flags.positional]
    flag = name.removeprefix("--")
    if flag in known:
        return without_none(hints[flag])
    new = flag.replace("-", "_")
    if new in flags.moved or new in known:
        raise UserError(f"unknown flag {name}: use {flags.moved.get(new, f'--{new}')}")
    is_setting = takes_config and flag.partition(".")[0] in HELP_SECTIONS
    candidates = [f"config.{flag}"] if is_setting else known
    raise UserError(f"unknown flag {name}: {did_you_mean(flag, candidates, '--{}')}")


def _positional_values(words: Sequence[str], hints: Mapping[str, Any], flags: type[VerbFlags]) -> dict[str, Any]:
    """The values of the arguments without a name."""
    rest = list(words)
    values: dict[str, Any] = {}
    for name in flags.positional:
        is_tuple = typing.get_origin(hints[name]) is tuple
        if rest:
            values[name] = tuple(rest) if is_tuple else typed(f"--{name}", rest[0], hints[name])
            rest = rest[len(rest) if is_tuple else 1 :]
        elif dataclasses.MISSING is next(field.default for field in dataclasses.fields(flags) if field.name == name):
            raise UserError(f"no {name.upper()} is given: {field_comments(flags)[name]}")
    if rest and issubclass(flags, ConfigFlags):
        raise UserError(f"{rest[0]!r} is not a flag; write settings as --config.section.key=value")
    if rest:
        raise UserError(f"{rest[0]!r} is not a flag; write flags as --name=value")
    return values


def help_text(description: str, flags: type[VerbFlags] = ConfigFlags, sections: Sequence[str] = ()) -> str:
    """The text of `--help`.

    Args:
      sections: sections of the config to list; default: all.
    """
    text = "\n".join([description.strip(), "", *_flag_lines(flags)])
    if not issubclass(flags, ConfigFlags):
        return text
    settings = f"Settings and their defaults (one section: --help SECTION, of {', '.join(HELP_SECTIONS)}):"
    return "\n".join([text, "", settings, settings_help(sections or HELP_SECTIONS)])


def _flag_lines(flags: type[VerbFlags]) -> Iterator[str]:
    comments = {name: text for cls in reversed(flags.__mro__[:-1]) for name, text in field_comments(cls).items()}
    for field in dataclasses.fields(flags):
        name = field.name.upper() if field.name in flags.positional else f"--{field.name}"
        default = field.default
        has_default = default not in (dataclasses.MISSING, None, "", ()) and not isinstance(default, bool)
        shown = f"; default: {','.join(map(str, default)) if isinstance(default, tuple) else default}"
        yield f"  {name:<22} {comments[field.name]}{shown if has_default else ''}"
