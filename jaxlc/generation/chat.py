"""A chat with a model: messages become one growing sequence of tokens, whose cache stays between turns."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.data.texts.documents import Chat
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.generation.generate_text import generator_of, stops_for, template_of
from jaxlc.generation.generator import Batch, Generation, Generator, Output, Stream
from jaxlc.generation.sampling import Sampling
from jaxlc.step.language_model import TrainedModel


class Conversation:
    """One sequence that grows by prompts and answers, whose cache stays between them. All answers
    use the same two programs, of a chunk and of a decoding step.

    Attributes:
      num_prefilled: tokens of prompts that were computed for the last answer.
    """

    def __init__(self, generator: Generator, max_tokens: int, chunk_tokens: int):
        """
        Args:
          max_tokens: the largest number of tokens of the sequence.
          chunk_tokens: tokens of a prompt that are computed at once.
        """
        self._generator, self._max_tokens = generator, max_tokens
        self._batch = Batch(generator, [np.zeros(max_tokens - 1, np.int32)], 1, chunk_tokens)
        self._ids = np.zeros(0, np.int32)  # of the tokens in the cache
        self._states = [(0, self._batch.copied_states())]
        self.num_prefilled = 0

    def answer(
        self,
        ids: np.ndarray,
        *,
        max_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        stream: Stream | None = None,
        is_ended: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Continues the sequence `ids`, of which only the tokens from the first difference to the
        last call are computed. In layers with a recurrent state, these are the tokens from the end
        of a prompt or an answer before it.

        Args:
          is_ended: called before each token; the answer ends if it is True, with the reason "interrupted".
        Raises:
          UserError: the sequence and an answer of `max_tokens` are too long.
        """
        if len(ids) + max_tokens > self._max_tokens:
            raise UserError(
                f"the conversation has {len(ids):,} tokens, and with an answer of {max_tokens:,} more than"
                f" max_context={self._max_tokens:,}: start a new one, or use a larger max_context"
            )
        num_kept = self._rewind(ids)
        self.num_prefilled = len(ids) - num_kept
        logits_BV = self._batch.extend(ids[num_kept:])
        self._ids = ids
        self._keep_states()
        output = Output(self._generator.tokenizer, stop, stop_ids, max_tokens, ids)
        indices = np.zeros(1, np.int32)
        while not is_ended():
            tokens_B, log_probs_B = self._batch.choose(logits_BV, sampling, indices)
            output.add(int(tokens_B[0]), float(log_probs_B[0]))
            if stream and (text := output.take()):
                stream(0, text)
            if output.finish_reason:
                break
            logits_BV = self._batch.decode(np.repeat(tokens_B[:1], len(tokens_B)))
            self._ids = np.append(self._ids, tokens_B[:1])
        self._keep_states()
        output.finish_reason = output.finish_reason or "interrupted"
        return output.result()

    def _rewind(self, ids: np.ndarray) -> int:
        """Returns how many of the tokens in the cache are kept: those before the first difference,
        without the last token of `ids`, whose logits are needed.
        """
        length = min(len(self._ids), len(ids) - 1)
        differences = np.flatnonzero(self._ids[:length] != ids[:length])
        kept = int(differences[0]) if len(differences) else length
        if any(self._batch.is_state):
            while self._states[-1][0] > kept:
                self._states.pop()
            kept, states = self._states[-1]
            self._batch.restore(states)
        self._batch.rewind(ids[:kept])
        return kept

    def _keep_states(self) -> None:
        self._states.append((len(self._ids), self._batch.copied_states()))


_CHUNK_TOKENS = 256  # of a prompt, per context rank


class ChatSession:
    """The history of a chat, and the tokens of its answers as they were generated."""

    def __init__(
        self,
        result: TrainedModel,
        *,
        system: str = "",
        sampling: Sampling,
        max_tokens: int,
        max_context: int,
        chat_template: str = "",
    ):
        """
        Args:
          system: the system prompt; "": none.
          max_tokens: the largest number of tokens of an answer.
          max_context: the largest number of tokens of the chat, whose cache is allocated at once.
          chat_template: as for `jaxlc.generate`.
        Raises:
          UserError: there is no chat template.
        """
        template, generator = template_of(result, chat_template), generator_of(result)
        self._encoder, self._stops = (
            Encoder(result.tokenizer, template),
            stops_for(result, template),
        )
        self._system, self._sampling, self._max_tokens = system, sampling, max_tokens
        self._turns: list[np.ndarray] = []  # the ids up to the end of each answer
        chunk_tokens = _CHUNK_TOKENS * generator.mesh.shape["context"]
        self.conversation = Conversation(generator, max_context, chunk_tokens)

    def say(
        self,
        text: str,
        stream: Stream | None = None,
        is_ended: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """The answer to a message of the user, which both join the history.

        Args:
          is_ended: as for `Conversation.answer`; an answer that it ends joins the history as it is.
        Raises:
          UserError: the chat has become too long; the history stays as it was.
        """
        message, where = dict(role="user", content=text), repr(text[:40])
        if self._turns:
            ids = self._encoder.continued(self._turns[-1], Chat([message]), where)
        else:
            first = [dict(role="system", content=self._system)] if self._system else []
            ids, _ = self._encoder.prompt(Chat([*first, message]), where)
        answer = self.conversation.answer(
            ids,
            max_tokens=self._max_tokens,
            sampling=self._sampling,
            stop=self._stops.texts,
            stop_ids=self._stops.ids,
            stream=stream,
            is_ended=is_ended,
        )
        self._turns.append(np.concatenate([ids, answer.tokens]))
        return answer

    def undo(self) -> None:
        """Removes the last message and its answer from the history."""
        del self._turns[-1:]
