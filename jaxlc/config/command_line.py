"""Command lines: `--config=NAME[:variant] --config.a.b=value --workdir=DIR --flag=value`. Imports
no jax.

The flags of a verb are the fields of a dataclass. Their types convert the values, as the types of
settings do. The comments of fields, of flags and of settings, are the text of `--help`; they are
read from the source of the class.
"""

import ast
import dataclasses
import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from ml_collections import ConfigDict

from jaxlc import interrupts
from jaxlc.config.files import read_config, shipped_configs, unset_shape
from jaxlc.config.frozen import DEFAULT_PRESET, SECTIONS, Config, Stage, StageConfig
from jaxlc.config.loading import load_stages
from jaxlc.config.other_names import meaning_of
from jaxlc.config.settings import Settings, advice_for, fields_of, hint_at, is_part, item_of, joined
from jaxlc.config.values import (
    as_argument,
    defaults_of,
    describe_type,
    invalid_value,
    out_of_range,
    typed,
)
from jaxlc.core import UserError, did_you_mean, nearest_name, raise_first
from jaxlc.core.files import full_disk_explained, local_path
from jaxlc.core.text import guarded

_KEY_WIDTH = 54
_WIDTH = 160
HELP_SECTIONS = (*SECTIONS, "stages")


class Setting(NamedTuple):
    """A setting as the help describes it."""

    key: str  # "mesh.context"; with NAME for a source or a stage: "stages.NAME.steps"
    default: str  # as on the command line
    meaning: str  # with the choices, where they are few


def settings_help(sections: Iterable[str] = HELP_SECTIONS) -> str:
    """The settings of `sections`: key, default, description and, where they are few, the allowed
    values.
    """
    lines: list[str] = []
    for section in sections:
        lines.append(f"\n{section}: {section_text(section)}")
        for setting in settings_of(section):
            text = textwrap.wrap(setting.meaning, _WIDTH - _KEY_WIDTH)
            flag = f"--config.{setting.key}={setting.default}"
            lines += [
                f"  {flag:<{_KEY_WIDTH - 3}} {text[0]}",
                *(" " * _KEY_WIDTH + line for line in text[1:]),
            ]
    return "\n".join(lines)


def section_text(section: str) -> str:
    """What a section of HELP_SECTIONS is for: the docstring of its class."""
    return " ".join(_docstring(SECTIONS.get(section, StageConfig)).split())


def _docstring(cls: type) -> str:
    """The docstring in the source of a class: `python -OO` has no others."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    return ast.get_docstring(definition) or ""


def settings_of(section: str) -> Iterator[Setting]:
    """The settings of a section of HELP_SECTIONS, of the sources of a mixture, and of a stage."""
    path = "stages.NAME" if section == "stages" else section
    part = hint_at(path)
    comments = field_comments(part)
    defaults = defaults_of(part)
    if section.partition(".")[0] == "model" and "NAME" not in section:
        defaults = dict.fromkeys(comments, "from the preset") | {
            "preset": DEFAULT_PRESET,
            "init_from": "",
        }
    for name, hint in fields_of(part).items():
        key = joined(path, name)
        meaning = comments.get(name, "").rstrip(".")
        if item_of(hint):
            yield Setting(key, "", meaning)
            yield from settings_of(f"{key}.NAME")
        elif is_part(hint) and path == "model":
            yield from settings_of(key)
        elif not is_part(hint):
            choices = f"; {describe_type(hint)}" if typing.get_origin(hint) is Literal else ""
            yield Setting(key, as_argument(defaults[name]), meaning + choices)


def field_comments(cls: type) -> dict[str, str]:
    """The comments above and behind each field of a dataclass or NamedTuple, joined to one line; ""
    if it has none.
    """
    comments: dict[str, list[str]] = {}
    for part in reversed(cls.__mro__):
        own = vars(part).get("__annotations__", ())
        comments |= {name: [] for name in own}
        above: list[str] = []
        name = ""
        source = io.StringIO(inspect.getsource(part) if own else "")
        for token in tokenize.generate_tokens(source.readline):
            first = token.line.split(":")[0].strip()
            if token.type == tokenize.NAME and token.string == first and first in own:
                name = first
                comments[name].extend(above)
                above = []
            elif token.type == tokenize.COMMENT:
                (comments[name] if name else above).append(token.string.lstrip("# "))
            elif token.type == tokenize.NEWLINE:
                name = ""
    return {name: " ".join(lines) for name, lines in comments.items()}


_SETTING = "config."


@dataclass(frozen=True, kw_only=True)
class VerbFlags:
    """The flags of a verb: the fields of a subclass. `--flag_name=value` sets one; a bool needs no
    value. The docstring of the subclass begins the text of `--help`.
    """

    # strings given without a name; a tuple of them takes the rest
    positional: ClassVar[tuple[str, ...]] = ()
    interrupted: ClassVar[str] = "interrupted"  # printed after Ctrl-C: what is kept


@dataclass(frozen=True, kw_only=True)
class ConfigFlags(VerbFlags):
    """The flags of every verb that takes a config."""

    uses_devices: ClassVar[bool] = True  # False: the mesh of the config need not divide its model
    fixed: ClassVar[dict[str, Any]] = {}  # settings that the verb replaces, by their paths
    # (the config that --config names, or None, and the values of the flags) -> the config to start from, or None
    base: ClassVar[Callable[[ConfigDict | None, Mapping[str, Any]], ConfigDict | None]] = (
        lambda config, flags: config
    )

    # name of a shipped config or path of a .py file, with an optional variant: 256k, 256k:h100,
    # my.py
    config: str = ""
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
    workdir: str = ""
    arguments: Sequence[str] = ()  # the command line, without the name of the program

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


def run_main(
    main: Callable[[ParsedCommand[Any]], int],
    argv: Sequence[str],
    *,
    flags: type[VerbFlags] = ConfigFlags,
) -> int:
    """Parses `argv`, runs `main`, and returns the exit status: that of a UserError, 130 after Ctrl-C.

    The error, or the message of the interrupt, is printed as one line on stderr.

    Args:
      flags: see `parse`.
    """

    def run() -> int:
        try:
            with interrupts.handled(flags.interrupted):
                if any(arg in ("--help", "-help", "-h") for arg in argv[1:]):
                    print(help_text(flags, _help_sections(argv[1:], flags)))
                    return 0
                return main(parse(argv, flags=flags))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_status
        except KeyboardInterrupt as interrupt:
            return interrupts.end(interrupt)

    try:
        with full_disk_explained("the disk", lambda: "free space, then run the same command again"):
            return guarded(run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def parse(argv: Sequence[str], *, flags: type[VerbFlags] = ConfigFlags) -> ParsedCommand[Any]:
    """Reads a command line, program name first.

    Args:
      flags: the flags of the verb. A config is read if they are ConfigFlags.
    Raises:
      UserError: an unknown flag or key, a value of the wrong type, a config file that is missing or fails.
    """
    values, overrides = _values(argv[1:], flags)
    parsed = flags(**values)
    raise_first(invalid_value(f"--{name}", *problem) for name, *problem in out_of_range(parsed))
    if not isinstance(parsed, ConfigFlags):
        return ParsedCommand(flags=parsed, arguments=argv[1:])
    config = read_config(parsed.config) if parsed.config else None
    config = type(parsed).base(config, vars(parsed))
    if config is None:
        raise UserError(
            "no config is given: use --config=NAME or --config=FILE.py; the shipped configs are"
            f" {', '.join(shipped_configs())}"
        )
    settings = config if isinstance(config, Settings) else Settings(values=config.to_dict())
    if overrides.get("model.init_from"):
        unset_shape(settings, kept=overrides)
    settings.update_from_flattened_dict(overrides | parsed.fixed)
    stages = load_stages(settings, overrides=overrides, on_devices=parsed.uses_devices)
    name = getattr(parsed, "stage", "")
    selected = tuple(stage for stage in stages if name in ("", stage.name))
    if not selected:
        names = [stage.name for stage in stages if stage.name]
        advice = did_you_mean(name, names) if names else "the config has no stages"
        raise UserError(f"unknown --stage={name}: {advice}")
    path, _, variant = parsed.config.partition(":")
    stem = "-".join(filter(None, [Path(path).stem, variant.replace("/", "-")]))
    workdir = str(local_path(parsed.workdir or f"runs/{stem}"))
    return ParsedCommand(flags=parsed, stages=selected, workdir=workdir, arguments=argv[1:])


def _values(
    arguments: Sequence[str], flags: type[VerbFlags]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flags by their names, and the settings by their paths. One with several values may be repeated.

    Raises:
      UserError: an unknown flag, an invalid value, or an argument without a name that is missing or one too many.
    """
    hints = dict[str, Any]()  # the type of each flag, int for int | None, without its range
    for name, hint in typing.get_type_hints(flags).items():
        kinds = typing.get_args(hint)
        if typing.get_origin(hint) is not ClassVar:
            hints[name] = kinds[0] if type(None) in kinds else hint
    values = dict[str, Any]()
    overrides = dict[str, Any]()
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word == "-":
            _add_positional(values, word, hints, flags)
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        is_negated = name.startswith("noconfig.")
        name = name.removeprefix("no") if is_negated else name
        hint = _hint(name, hints, flags)
        if is_negated and (hint is not bool or has_value):
            raise UserError(f"invalid {word}: only a setting that is true or false has this form")
        if not has_value and hint is bool:
            value = str(not is_negated)
        # as after an empty shell variable
        elif not has_value and (value := next(words, "--")).startswith("--"):
            raise UserError(f"Missing value for flag --{name}; write it as --name=value")
        given, key = (values, name) if name in hints else (overrides, name.removeprefix(_SETTING))
        if typing.get_origin(hint) is list:  # repeated as a whole, without commas
            value = [value] if value else []
        elif not is_part(hint):
            value = typed(key if given is overrides else f"--{key}", value, hint)
        if given is values and value == "":
            raise UserError(f"invalid --{key}=: its value is empty; give one, or remove the flag")
        # an empty list replaces the values before it
        if isinstance(value, (tuple, list)) and value:
            value = type(value)([*given.get(key, ()), *value])
        given[key] = value
    for field in dataclasses.fields(flags):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise UserError(
                f"no {field.name.upper()} is given: {field_comments(flags)[field.name]}"
            )
    return values, overrides


def _add_positional(
    values: dict[str, Any], word: str, hints: Mapping[str, Any], flags: type[VerbFlags]
) -> None:
    """Adds an argument without a name to `values`."""
    for name in flags.positional:
        if not word:
            raise UserError(
                f"invalid {name.upper()}: it is empty; expected {field_comments(flags)[name]}"
            )
        is_tuple = typing.get_origin(hints[name]) is tuple
        if is_tuple or name not in values:
            value = (
                (*values.get(name, ()), word)
                if is_tuple
                else typed(name.upper(), word, hints[name])
            )
            values[name] = value
            return
    takes_config = issubclass(flags, ConfigFlags)
    name = word.partition("=")[0]
    is_config = word.partition(":")[0] in shipped_configs() or Path(word).suffix == ".py"
    advice = (
        f"did you mean --config={word}?" if is_config else "=" in word and _setting_advice(name)
    )
    form = "settings as --config.section.key=value" if takes_config else "flags as --name=value"
    raise UserError(f"{word!r} is not a flag: {(takes_config and advice) or f'write {form}'}")


def _hint(name: str, hints: Mapping[str, Any], flags: type[VerbFlags]) -> Any:
    """The type of a flag or setting.

    Raises:
      UserError: there is none; the message names the nearest flag, or the new spelling of an old one.
    """
    takes_config = issubclass(flags, ConfigFlags)
    if name.startswith(_SETTING) and takes_config:
        return hint_at(name.removeprefix(_SETTING))
    known = [flag for flag in hints if flag not in flags.positional]
    if name in known:
        return hints[name]
    new = name.replace("-", "_")
    if new in known:
        raise UserError(f"unknown flag --{name}: use --{new}")
    meaning = meaning_of(new)
    nearest = nearest_name(new, known, cutoff=0.8)
    if meaning.startswith("unsupported"):
        advice = meaning
    elif nearest:
        advice = f"did you mean --{nearest}?"
    else:
        advice = f"expected one of {', '.join(sorted(map('--{}'.format, known)))}"
        if takes_config:
            advice = _setting_advice(new) or f"{advice}, or --config.SECTION.NAME"
    raise UserError(f"unknown flag --{name}: {advice}")


def _setting_advice(path: str) -> str:
    """The setting that a name means, as the end of a sentence; "" if it means none."""
    try:
        hint_at(path)
    except UserError:
        return advice_for(path, form=f"--{_SETTING}{{}}")
    return f"did you mean --{_SETTING}{path}?"


def _help_sections(arguments: Sequence[str], flags: type[VerbFlags]) -> list[str]:
    """The sections of the config that follow --help; "all" is every section.

    Raises:
      UserError: an unknown section.
    """
    if "all" in arguments:
        return [*HELP_SECTIONS]
    sections = [word for word in arguments if word in HELP_SECTIONS]
    words = [word for word in arguments if not word.startswith("-") and word not in sections]
    if issubclass(flags, ConfigFlags) and len(words) > len(flags.positional):
        raise UserError(f"unknown section {words[-1]!r}: {did_you_mean(words[-1], HELP_SECTIONS)}")
    return sections


def help_text(flags: type[VerbFlags], sections: Sequence[str] = ()) -> str:
    """The text of `--help`: the settings of `sections`, or without sections the flags, and what
    each section is for.
    """
    if sections:
        return settings_help(sections).strip()
    lines = [_docstring(flags), ""]
    comments = field_comments(flags)
    fields = dataclasses.fields(flags)
    for field in sorted(fields, key=lambda field: field.name not in flags.positional):
        name = field.name.upper() if field.name in flags.positional else f"--{field.name}"
        has_default = field.default not in (dataclasses.MISSING, None, "", ()) and not isinstance(
            field.default, bool
        )
        default = f"; default: {as_argument(field.default)}" if has_default else ""
        lines.append(f"  {name:<22} {comments[field.name].rstrip('.')}{default}")
    if issubclass(flags, ConfigFlags):
        lines += [
            "",
            "Settings --config.SECTION.KEY=VALUE, by section (--help SECTION lists them, --help all lists all):",
        ]
        first_sentences = [
            re.split(r"\.$|\. (?=[A-Z])", section_text(section))[0] for section in HELP_SECTIONS
        ]
        lines += [
            f"  {section:<12} {text}" for section, text in zip(HELP_SECTIONS, first_sentences)
        ]
    return "\n".join(lines)
