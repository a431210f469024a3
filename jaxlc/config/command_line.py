"""Command lines: `--config=NAME[:variant] --config.a.b=value --workdir=DIR`. Imports no jax.

absl and ml_collections parse; their errors become one line that names the setting.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import tuple_parser

from jaxlc.config.checks.unused_settings import check_used
from jaxlc.config.files import read_config, shipped_configs
from jaxlc.config.frozen import Config, field_types
from jaxlc.config.help import HELP_SECTIONS, settings_help
from jaxlc.config.loading import check_key
from jaxlc.config.mixture import PATH as MIXTURE
from jaxlc.config.mixture import is_source_path
from jaxlc.config.stage_configs import with_stage_setting
from jaxlc.config.stages import Stage, load_stages
from jaxlc.config.values import describe_type, invalid_value, parse_integer
from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import did_you_mean

_OVERRIDE = re.compile(r"--?(no)?config\.(?P<key>[^=]*)")
_STAGE_OVERRIDE = re.compile(r"--?config\.stages\.(?P<path>[^=]*)=(?P<value>.*)", re.DOTALL)
_STANDARD_FLAGS = {
    "config": "name of a shipped config or path of a .py file, with an optional variant: 256k, 256k:h100, my.py",
    "workdir": "directory for checkpoints, metrics and plots; default: runs/NAME[-variant]",
}


@dataclass(frozen=True, kw_only=True)
class ParsedCommand:
    stages: tuple[Stage, ...]  # one without a name for a config without stages
    config_path: str  # as given: a shipped name or a path, without the variant
    variant: str  # "": none
    workdir: str
    extra: dict[str, str | None]  # flags of the command; None: not given

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
    main: Callable[[ParsedCommand], int],
    argv: Sequence[str],
    *,
    description: str,
    extra_flags: Mapping[str, str] | None = None,
    switches: Collection[str] = (),
    base: "Base | None" = None,
) -> int:
    """Parses `argv`, runs `main`, and returns the exit status: 2 after a UserError, printed as one line on stderr.

    Args:
      switches, base: see `parse`.
    """
    try:
        if any(arg in ("--help", "-help", "-h") for arg in argv[1:]):
            print(help_text(description, extra_flags, [arg for arg in argv[1:] if arg in HELP_SECTIONS]))
            return 0
        return main(parse(argv, extra_flags=extra_flags, switches=switches, base=base))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output ended, as in `jaxlc plan --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        return 128 + signal.SIGPIPE


# The config to start from, of the file's config (None without --config) and the flags of the command; None: no config.
Base = Callable[[ConfigDict | None, Mapping[str, str | None]], ConfigDict | None]


def parse(
    argv: Sequence[str],
    *,
    extra_flags: Mapping[str, str] | None = None,
    switches: Collection[str] = (),
    base: Base | None = None,
) -> ParsedCommand:
    """Reads a command line, program name first.

    Args:
      extra_flags: name -> help of the flags of this command, all strings. `stage` selects one stage of the config.
      switches: names of `extra_flags` that have no value; in `extra` they are "true" or None.
      base: makes or changes the config by these flags, before overrides of settings are applied.
    Raises:
      UserError: an unknown flag or key, a value of the wrong type, a config file that is missing or fails.
    """
    known = flags.FlagValues()
    for name, text in {**_STANDARD_FLAGS, **(extra_flags or {})}.items():
        flags.DEFINE_string(name, None, text, flag_values=known)
    argv = [f"{arg}=true" if arg.lstrip("-") in switches else arg for arg in argv]
    try:
        rest = known(argv, known_only=True)  # the overrides remain: they are parsed with the types of the config
    except flags.Error as error:
        raise UserError(f"{error}; write it as --name=value") from None
    extra = {name: known[name].value for name in extra_flags or {}}
    for name in switches:
        if extra[name] not in (None, "true"):
            raise UserError(f"invalid --{name}={extra[name]}: expected --{name} without a value")
    source: str = known["config"].value or ""
    config = read_config(source) if source else None
    if base is not None:
        config = base(config, extra)
    if config is None:
        raise UserError(
            "no config is given: use --config=NAME or --config=FILE.py; the shipped configs are"
            f" {', '.join(shipped_configs())}"
        )
    config_path, _, variant = source.partition(":")
    config = _override(config, rest, known=list(known))
    stem = "-".join(filter(None, [Path(config_path).stem, variant.replace("/", "-")]))
    return ParsedCommand(
        stages=_selected(load_stages(config), extra.pop("stage", None)),
        config_path=config_path,
        variant=variant,
        workdir=known["workdir"].value or f"runs/{stem}",
        extra=extra,
    )


def _selected(stages: tuple[Stage, ...], name: str | None) -> tuple[Stage, ...]:
    """The stage with this name, or all stages."""
    selected = tuple(stage for stage in stages if name in (None, stage.name))
    if name is not None and not selected:
        names = [stage.name for stage in stages if stage.name]
        advice = did_you_mean(name, names) if names else "the config has no stages"
        raise UserError(f"unknown --stage={name}: {advice}")
    return selected


def help_text(description: str, extra_flags: Mapping[str, str] | None = None, sections: Sequence[str] = ()) -> str:
    """The text of `--help`.

    Args:
      sections: sections of the config to list; default: all.
    """
    usage = [f"  --{name:<20} {text}" for name, text in {**_STANDARD_FLAGS, **(extra_flags or {})}.items()]
    settings = f"Settings and their defaults (one section: --help SECTION, of {', '.join(HELP_SECTIONS)}):"
    return "\n".join([description.strip(), "", *usage, "", settings, settings_help(sections or HELP_SECTIONS)])


def _override(config: ConfigDict, argv: Sequence[str], known: list[str]) -> ConfigDict:
    """Applies `--config.a.b=value` arguments to `config`, and returns it."""
    argv = [argv[0], *(arg for arg in argv[1:] if not _apply_nested_override(config, arg))]
    for override in filter(None, map(_OVERRIDE.match, argv)):
        check_used(config.get("stages") or (), override["key"])
    # The parsers of ml_collections parse "a,b" as a Python expression, and do not accept 1e3 as an integer.
    config_flags.register_flag_parser_for_type(tuple, _CommaSeparated())
    config_flags.register_flag_parser_for_type(int, _Integer())
    overrides = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=overrides, sys_argv=list(argv))
        positional = overrides(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        is_setting = error.flagname.partition(".")[0] in HELP_SECTIONS
        candidates = [f"config.{error.flagname}"] if is_setting else known
        advice = did_you_mean(error.flagname, candidates, "--{}")
        raise UserError(f"unknown flag --{error.flagname}: {advice}") from None
    except flags.IllegalFlagValueError as error:
        raise UserError(_wrong_type(str(error))) from None
    except flags.Error as error:
        raise UserError(f"{error}; write it as --name=value") from None
    if positional:
        raise UserError(f"{positional[0]!r} is not a flag; write settings as --config.section.key=value")
    return config


def _apply_nested_override(config: ConfigDict, arg: str) -> bool:
    """Applies `--config.stages.NAME.KEY=VALUE` and `--config.data.mixture.NAME.FIELD=VALUE`, which absl cannot parse.

    Returns:
      Whether `arg` is one of them.
    Raises:
      UserError: an unknown setting, or one that cannot be set in this config.
    """
    if of_stage := _STAGE_OVERRIDE.match(arg):
        config.stages = with_stage_setting(config.get("stages") or (), of_stage["path"], of_stage["value"])
        return True
    override = _OVERRIDE.match(arg)
    if override is None:
        return False
    key = override["key"]
    check_key(key)
    if key == MIXTURE:
        raise UserError(f"config.{MIXTURE} is a group of sources: set --config.{MIXTURE}.NAME.paths=...")
    if key == "train.steps" and (stages := config.get("stages")):
        names = ", ".join(f"--config.stages.{stage.name}.steps" for stage in stages)
        raise UserError(f"config.train.steps has no effect in a config with stages: use {names}")
    if not is_source_path(key):
        return False
    if "=" not in arg:
        raise UserError(f"{arg}: write it as --name=value")
    check_used(config.get("stages") or (), key)
    config.data.mixture.set_field(key, arg.partition("=")[2])
    return True


class _CommaSeparated(tuple_parser.TupleParser):
    """ "a,b" -> ("a", "b")."""

    def parse(self, argument: str | tuple[str, ...]) -> tuple[str, ...]:
        if isinstance(argument, str) and argument[:1] not in ("(", "["):
            return tuple(argument.split(",")) if argument else ()
        return super().parse(argument)


class _Integer(flags.IntegerParser):
    """ "1000" or "1e3" -> 1000."""

    def convert(self, argument: str | int) -> int:
        return parse_integer(argument) if isinstance(argument, str) else super().convert(argument)


def _wrong_type(message: str) -> str:
    """The error of absl, "flag --config.a.b=value: reason", with our description of the type as the reason."""
    match = re.match(r"flag --config\.(\w+)\.(\w+)=(.*?): ", message, re.DOTALL)
    if match is None:
        return message
    section, name, value = match.groups()
    return invalid_value(f"{section}.{name}", value, describe_type(field_types(section)[name]))
