"""Chat templates that fit a tokenizer: their markers, such as <|im_end|>, are single tokens.

A model learns to end its answers with one token, at which inference engines stop.
"""

from jaxlc.core.errors import UserError
from jaxlc.data.tokens.chat import ChatTemplate, load_chat_template
from jaxlc.data.tokens.named_templates import TEMPLATES
from jaxlc.data.tokens.tokenizers import Tokenizer


def fitting_template(setting: str, tokenizer: Tokenizer, *, flag: str = "--config.data.chat_template") -> ChatTemplate:
    """The template of data.chat_template, or else of the tokenizer.

    Bytes have no special tokens, so every template fits them.

    Args:
      setting: as in `load_chat_template`.
      flag: that sets a template, for errors.
    Raises:
      UserError: there is no template, it cannot be read, or it does not fit; the message names those that fit.
    """
    named = (load_chat_template(name, tokenizer.file) for name in TEMPLATES)
    fitting = [name for name, template in zip(TEMPLATES, named) if not _split_markers(template, name, tokenizer)]
    advice = f"set {flag} to {', '.join(fitting)}{' or ' if fitting else ''}a Jinja file"
    template = load_chat_template(setting, tokenizer.file, advice=advice)
    if split := _split_markers(template, setting, tokenizer):
        raise UserError(
            f"{template.name} has {' and '.join(split)}, which the tokenizer {tokenizer.name!r} splits into several"
            f" tokens: {advice} whose markers are tokens of this tokenizer"
        )
    return template


def end_of_turn_id(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The token that ends an answer; None: the template has no such marker, or the tokenizer splits it."""
    return _token_id(template.end_of_turn, tokenizer)


def _split_markers(template: ChatTemplate, setting: str, tokenizer: Tokenizer) -> list[str]:
    """The markers that are not single tokens: all of a template in TEMPLATES; of other templates, the one that ends an
    answer, because published ones have headers of several tokens."""
    markers = template.markers if setting in TEMPLATES else [template.end_of_turn]
    return [x for x in markers if x and tokenizer.file is not None and _token_id(x, tokenizer) is None]


def _token_id(marker: str, tokenizer: Tokenizer) -> int | None:
    ((ids, _),) = tokenizer.encode_with_offsets([marker], special_tokens=True)
    return int(ids[0]) if len(ids) == 1 else None
