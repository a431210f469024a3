"""The token ids of prompts: plain text, or the message of a user in the chat template of the model."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.core.foreign_files import valid_unicode
from jaxlc.data.texts.chats import Chat
from jaxlc.data.tokens.chat import ChatTemplate
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.fitting_template import fitting_template
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.train.result.run_result import Result

_MARGIN_TOKENS = 8  # a template splits the text, which may then have a few more tokens


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Converts text to token ids."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None  # None: plain text

    def __call__(self, text: str, answer_prefix: str = "") -> np.ndarray:
        """The ids of a prompt, int32 [tokens].

        Args:
          answer_prefix: the start of the answer, which the model continues; in a chat, after the header of the
            assistant.
        """
        text = valid_unicode(text)
        prompt = text if self.template is None else Chat([dict(role="user", content=text)])
        return self._encoder.prompt(prompt, repr(text[:40]), answer_prefix)[0]

    @functools.cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.tokenizer, self.template or "")

    @property
    def warnings(self) -> list[str]:
        """What was noticed in prompts, one line each."""
        return self._encoder.notes.lines("prompts")

    @property
    def overhead_tokens(self) -> int:
        """At least the number of tokens that a prompt has in addition to those of its text."""
        extra = len(self("a", "a")) - len(self.tokenizer.encode(b"aa"))
        return extra if self.template is None else extra + _MARGIN_TOKENS

    def counter(self) -> Callable[[str], int]:
        """Returns at least the number of tokens of the prompt with a text."""
        overhead_tokens = self.overhead_tokens
        return lambda text: len(self.tokenizer.encode(text.encode())) + overhead_tokens


def template_of(result: Result, setting: str = "", *, flag: str = "--chat_template") -> ChatTemplate:
    """The chat template of the prompts of generate, eval and lm-evaluation-harness.

    Args:
      setting: as data.chat_template; empty: that of the run, or of the tokenizer.
      flag: that sets a template, for errors.
    Raises:
      UserError: there is no chat template, or it does not fit the tokenizer.
    """
    return fitting_template(setting or result.config.data.chat_template, result.tokenizer, flag=flag)


def encoder_of(result: Result, *, chat: bool, chat_template: str = "") -> PromptEncoder:
    """The encoder of a run, or of a Hugging Face directory, whose texts start as in `transformers`.

    Args:
      chat_template: `setting` of `template_of`.
    Raises:
      UserError: as `template_of`, or a template without `chat`.
    """
    if chat_template and not chat:
        raise UserError(f"chat_template={chat_template!r} has no effect without chat: set both")
    return PromptEncoder(
        tokenizer=result.tokenizer,
        template=template_of(result, chat_template) if chat else None,
    )
