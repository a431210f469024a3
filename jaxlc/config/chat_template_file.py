"""The file that `data.chat_template` may name. Imports no jax."""

import re
from pathlib import Path

from jaxlc.config.schema import CHAT_TEMPLATES
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import local_path

ADVICE = f"set --config.data.chat_template to {', '.join(CHAT_TEMPLATES)} or a Jinja file"


def template_path(setting: str) -> Path | None:
    """The path in data.chat_template; None if it is empty, one of CHAT_TEMPLATES or the text of a template."""
    return None if not setting or setting in CHAT_TEMPLATES or "{" in setting else local_path(setting)


def read_template(path: Path, advice: str = ADVICE) -> str:
    """The text of a chat template.

    Args:
      advice: how to set a template, for the error.
    Raises:
      UserError: the file cannot be read, or is no Jinja template.
    """
    import jinja2  # only where a file is named

    try:
        text = path.read_text(encoding="utf-8")
        # The tag `generation` of published templates is an extension of `jaxlc.data.tokens.chat_templates`.
        without_tag = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", text)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_tag)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the chat template {str(path)!r} ({reason_of(error)}): {advice}") from error
    except (jinja2.TemplateSyntaxError, ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits
        line = f" line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UserError(f"{path}{line} is not a valid Jinja template ({reason_of(error)})") from error
    return text
