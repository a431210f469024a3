"""What ends an answer: one function for generation, evaluation, rollouts and export."""

from typing import NamedTuple

from jaxlc.config import Config
from jaxlc.config.models.pretrained import Pretrained, eos_token_ids
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.chat import ChatTemplate, load_chat_template
from jaxlc.data.tokens.fitting_template import end_of_turn_id
from jaxlc.data.tokens.tokenizers import Tokenizer


class Stops(NamedTuple):
    """What ends an answer."""

    ids: list[int]  # tokens: end of turn, end of document, those that the original model names
    texts: list[str]  # an end of turn that is not a token, as with the tokenizer `bytes`


def stops_of(
    config: Config, tokenizer: Tokenizer, original: Pretrained | None, template: ChatTemplate | None = None
) -> Stops:
    """What ends the answers of a model.

    Args:
      config: of the run, or of a model that was loaded as a run.
      original: the model that training started from, see `original_of`.
      template: of the prompts. None: that of the chats that the run trains on, if any.
    Raises:
      UserError: the chat template, or a file of the original model, cannot be read.
    """
    template = template or trained_template(config, tokenizer)
    end_of_turn = None if template is None else end_of_turn_id(template, tokenizer)
    ids = [] if end_of_turn is None else [end_of_turn]
    ids += [tokenizer.end_of_document_id, *(eos_token_ids(original.directory) if original else ())]
    is_text = template is not None and end_of_turn is None and bool(template.end_of_turn)
    return Stops(list(dict.fromkeys(ids)), [template.end_of_turn] if is_text else [])


def trained_template(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of the chats that a run trains on; None: it has none.

    Traces and prompts of rollouts may be chats, which only their records say.

    Raises:
      UserError: the template of data.chat_template cannot be read.
    """
    data = config.data
    has_chats = any(source.has_chats for source in data.mixture) or data.traces or config.rollouts.prompts
    return template_if_any(data.chat_template, tokenizer) if data.chat_template or has_chats else None


def template_if_any(setting: str, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of data.chat_template, or else of the tokenizer; None: it has none that can be used.

    Raises:
      UserError: the template of `setting` cannot be used.
    """
    try:
        template = load_chat_template(setting, tokenizer.file)
        _ = template.end_of_turn  # compiles it
    except UserError:
        if setting:
            raise
        return None
    return template
