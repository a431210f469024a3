"""Command lines: `--config=FILE[:variant] --config.a.b=value --workdir=DIR`. Imports no jax.

absl and ml_collections parse; what they answer to a mistake is turned into one sentence.
"""

import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import tuple_parser

from jaxlc.config.files import read_config, shipped_configs
from jaxlc.config.help import settings_help
from jaxlc.config.loading import check_key, describe_type, did_you_mean, field_types, load
from jaxlc.config.schema import Config
from jaxlc.core.errors import UserError

_OVERRIDE = re.compile(r"--?(no)?config\.(?P<key>[^=]*)")
_STANDARD_FLAGS = {
    "config": "the config file, and after a colon which of its variants: FILE[:variant]",
    "workdir": "where checkpoints, metrics and pictures go; runs/FILE[-variant] by default",
}


@dataclass(frozen=True, kw_only=True)
class ParsedCommand:
    config: Config
    config_path: str
    variant: str  # "" is none
    workdir: str
    extra: dict[str, str | None]  # the command's own flags; None where not given


def run_main(
    main: Callable[[ParsedCommand], int],
    argv: Sequence[str],
    *,
    description: str,
    extra_flags: Mapping[str, str] | None = None,
) -> int:
    """Parses `argv`, runs `main`, and returns the exit status: 2 after a UserError, told in one line on stderr."""
    try:
        if any(arg in ("--help", "-help", "-h") for arg in argv[1:]):
            print(help_text(description, extra_flags))
            return 0
        return main(parse(argv, extra_flags=extra_flags))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str], *, extra_flags: Mapping[str, str] | None = None) -> ParsedCommand:
    """Reads a command line, program name first.

    Args:
      extra_flags: name -> help of the command's own flags, all strings.
    Raises:
      UserError: an unknown flag or key, a value of the wrong type, a config file that is missing or fails.
    """
    known = flags.FlagValues()
    for name, text in {**_STANDARD_FLAGS, **(extra_flags or {})}.items():
        flags.DEFINE_string(name, None, text, flag_values=known)
    try:
        rest = known(argv, known_only=True)  # the overrides are left: which there are, the config file says
    except flags.Error as error:
        raise UserError(f"{error}; write it as --name=value") from None
    if not known["config"].value:
        raise UserError(
            "no config is given: use --config=NAME or --config=FILE.py; the shipped configs are"
            f" {', '.join(shipped_configs())}"
        )
    config_path, _, variant = known["config"].value.partition(":")
    config = _override(read_config(known["config"].value), rest, known=list(known))
    stem = "-".join(filter(None, [Path(config_path).stem, variant.replace("/", "-")]))
    return ParsedCommand(
        config=load(config),
        config_path=config_path,
        variant=variant,
        workdir=known["workdir"].value or f"runs/{stem}",
        extra={name: known[name].value for name in extra_flags or {}},
    )


def help_text(description: str, extra_flags: Mapping[str, str] | None = None) -> str:
    """What `--help` prints."""
    usage = [f"  --{name:<10} {text}" for name, text in {**_STANDARD_FLAGS, **(extra_flags or {})}.items()]
    return "\n".join([description.strip(), "", *usage, "", "Settings and their defaults:", settings_help()])


def _override(config: ConfigDict, argv: Sequence[str], known: list[str]) -> ConfigDict:
    """Applies `--config.a.b=value` arguments."""
    for arg in argv[1:]:
        if override := _OVERRIDE.match(arg):
            check_key(override["key"])
    # The parser of ml_collections takes "a,b" for Python and fails; ours takes it for two strings.
    config_flags.register_flag_parser_for_type(tuple, _CommaSeparated())
    overrides = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=overrides, sys_argv=list(argv))
        positional = overrides(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        nearest = difflib.get_close_matches(error.flagname, known, n=1)
        advice = did_you_mean(_dashed(nearest), _dashed(known))
        raise UserError(f"there is no flag --{error.flagname}; {advice}") from None
    except flags.IllegalFlagValueError as error:
        raise UserError(_wrong_type(str(error))) from None
    except flags.Error as error:
        raise UserError(f"{error}; write it as --name=value") from None
    if positional:
        raise UserError(f"{positional[0]!r} is not a flag; write settings as --config.section.key=value")
    return config


class _CommaSeparated(tuple_parser.TupleParser):
    """ "a,b" -> ("a", "b")."""

    def parse(self, argument: str | tuple[str, ...]) -> tuple[str, ...]:
        if isinstance(argument, str) and argument[:1] not in ("(", "["):
            return tuple(argument.split(","))
        return super().parse(argument)


def _dashed(names: list[str]) -> list[str]:
    return [f"--{name}" for name in names]


def _wrong_type(message: str) -> str:
    """absl says "flag --config.a.b=value: reason", and the reason is Python's."""
    match = re.match(r"flag --config\.(\w+)\.(\w+)=(.*?): ", message, re.DOTALL)
    if match is None:
        return message
    section, name, value = match.groups()
    return f"config.{section}.{name} is {value!r}, which is not {describe_type(field_types(section)[name])}"
