"""Text generation with the model of a run or of a Hugging Face directory: `jaxlc.generate`.

A prompt is plain text, or the message of a user in the chat template of the model. `Sampler`
generates texts during training, for prompts that stay the same (train.sample_prompts). It reads the
parameters of the training state, without a copy; its KV cache exists between two steps only. In a
chat, messages become one growing sequence of tokens, whose cache stays between turns.

Device memory of generation: the KV cache, and the copy of the weights in the compute dtype. Nothing
is compiled.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jaxlc.config.models.pretrained import context_warning
from jaxlc.core import UserError, gib, print_to_stderr
from jaxlc.core.files import valid_unicode
from jaxlc.data.texts.documents import Chat
from jaxlc.data.tokens.chat_templates import ChatTemplate, fitting_template
from jaxlc.data.tokens.encoder import Encoder, Stops, stops_of
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.generation.generator import (
    Batch,
    CachedStep,
    Generation,
    Generator,
    Output,
    Stream,
    abstract_params,
)
from jaxlc.generation.sampling import Sampling
from jaxlc.models.contract import layout_for
from jaxlc.posttrain.trees import num_equal
from jaxlc.step.language_model import LanguageModel, TrainedModel
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class GenerationMemory:
    """Bytes per device; the temporaries of the programs are not counted."""

    num_sequences: int  # generated together
    num_tokens: int  # per sequence, of the prompt and the answer
    cache_bytes: int  # keys and values, and states of recurrent layers
    weights_bytes: int  # the copy of the parameters in the compute dtype

    @property
    def num_bytes(self) -> int:
        return self.cache_bytes + self.weights_bytes


def generation_memory(step: TrainStep, num_sequences: int, num_tokens: int) -> GenerationMemory:
    """The memory of `num_sequences` sequences of `num_tokens` tokens on the mesh of `step`, with a
    cache in the compute dtype."""
    cached = CachedStep(config=step.config, mesh=step.mesh, compute_dtype=step.compute_dtype)
    cache = cached.abstract_cache(
        layout_for(num_tokens, step.mesh), cached.padded_batch_size(num_sequences)
    )
    params = abstract_params(step, step.abstract_state.params)
    return GenerationMemory(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        cache_bytes=bytes_per_device(cache),
        weights_bytes=bytes_per_device(params),
    )


def rollout_memory(step: TrainStep, num_tokens: int = 0) -> GenerationMemory | None:
    """The memory of config.rollouts, which exist between two steps, beside the training state;
    None: the policy makes no rollouts.

    Args:
      num_tokens: of the longest prompt and its answer. 0: unknown, as many as fit into a sequence.
    """
    rollouts = step.config.rollouts
    if rollouts.source != "model":
        return None
    num_sequences = rollouts.prompts_per_step * rollouts.answers_per_prompt
    return generation_memory(step, num_sequences, num_tokens or step.config.data.seq_len + 1)


def sample_memory(step: TrainStep) -> GenerationMemory | None:
    """The memory of the texts of train.sample_prompts; None: there are none. A prompt has at most
    as many tokens as bytes, or in a chat a few more. The weights are those of the training state.
    """
    train = step.config.train
    if not train.sample_every_steps:
        return None
    longest = max(len(prompt.encode()) for prompt in train.sample_prompts) + _MARGIN_TOKENS
    memory = generation_memory(step, len(train.sample_prompts), longest + train.sample_tokens)
    return replace(memory, weights_bytes=0)


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

    def counter(self) -> Callable[[str], int]:
        """Returns at least the number of tokens of the prompt with a text."""

        def count(text: str) -> int:
            return len(self.tokenizer.encode(text.encode()))

        more = len(self("a", "a")) - count("aa") + (_MARGIN_TOKENS if self.template else 0)
        return lambda text: count(text) + more


def template_of(
    result: TrainedModel, setting: str, *, flag: str = "--chat_template"
) -> ChatTemplate:
    """The chat template of the prompts of generate, eval and lm-evaluation-harness.

    Args:
      setting: as data.chat_template; empty: the template of the run, or of the tokenizer.
      flag: that sets a template, for errors.
    Raises:
      UserError: there is no chat template, or it does not fit the tokenizer.
    """
    return fitting_template(
        setting or result.config.data.chat_template, result.tokenizer, flag=flag
    )


def encoder_of(result: TrainedModel, *, chat: bool, chat_template: str) -> PromptEncoder:
    """The encoder of a run, or of a Hugging Face directory, whose texts start as in `transformers`.

    Args:
      chat_template: `setting` of `template_of`.
    Raises:
      UserError: as `template_of`, or a template without `chat`.
    """
    if chat_template and not chat:
        raise UserError(f"chat_template={chat_template!r} has no effect without chat: set both")
    return PromptEncoder(
        tokenizer=result.tokenizer, template=template_of(result, chat_template) if chat else None
    )


# Generators keep compiled programs and a copy of the parameters.
_generators: weakref.WeakKeyDictionary[LanguageModel, Generator] = weakref.WeakKeyDictionary()


def generator_of(result: TrainedModel) -> Generator:
    """The generator of the model of `result`; the same one in later calls.

    Raises:
      Unsupported: a custom model, whose attention has no KV cache.
    """
    model = result.model
    if model not in _generators:
        _generators[model] = Generator(
            result.train_step, result.params, result.tokenizer, is_pretrained=result.is_pretrained
        )
    return _generators[model]


def warn_beyond_context(result: TrainedModel, num_tokens: int) -> None:
    """Prints a warning on stderr, on one process, if texts of `num_tokens` are longer than the
    context of the model.
    """
    config = result.train_step.config
    trained_tokens = 0 if result.is_pretrained else config.data.seq_len
    warning = context_warning(config.model, num_tokens, trained_tokens=trained_tokens)
    if warning and result.train_step.model is None and jax.process_index() == 0:
        print_to_stderr(f"warning: {warning}")


def stops_for(result: TrainedModel, template: ChatTemplate | None = None) -> Stops:
    """What ends the answers of the model of `result` to prompts in `template`."""
    return stops_of(result.config, result.tokenizer, result.workdir, template)


SAMPLES = "samples"  # directory in the workdir: STEP.jsonl; and the name of the texts in reports
_TOP_P = 0.9


class Sampler:
    """Generates the texts of a stage. Every process makes the same calls.

    Attributes:
      problem: why sampling has ended; "": it has not.
    """

    def __init__(self, step: TrainStep, tokenizer: Tokenizer):
        """
        Raises:
          UserError: a prompt is empty, or there is no chat template for train.sample_chat.
          Unsupported: a custom model.
        """
        train = step.config.train
        data = step.config.data
        template = None
        if train.sample_chat:
            template = fitting_template(data.chat_template, tokenizer, flag="data.chat_template")
        encode = PromptEncoder(tokenizer=tokenizer, template=template)
        self._prompts = [encode(prompt) for prompt in train.sample_prompts]
        if any(not ids.size for ids in self._prompts):
            raise UserError("config.train.sample_prompts has an empty prompt; remove it")
        self._step = step
        self._template = template
        self._generator = Generator(step, None, tokenizer, copies=False)
        self.problem = ""

    @property
    def lines(self) -> list[str]:
        """Memory of the samples, for the start report."""
        memory = sample_memory(self._step)
        every = self._step.config.train.sample_every_steps
        return [
            f"samples    {memory.num_sequences} texts of up to {memory.num_tokens:,} tokens every {every} steps; beside"
            f" the training state, per device: KV cache {gib(memory.cache_bytes)} GiB"
        ]

    def __call__(self, params: dict, workdir: Path) -> dict[str, str]:
        """The text that follows each prompt. Random numbers are the same at every step."""
        config = self._step.config
        train = self._step.config.train
        stops = stops_of(config, self._generator.tokenizer, workdir, self._template)
        is_greedy = train.sample_temperature <= 0
        sampling = Sampling(
            temperature=train.sample_temperature,
            top_p=1.0 if is_greedy else _TOP_P,
            seed=train.seed % 2**32,
        )
        self._generator.set_params(params)
        try:
            generations = self._generator(
                self._prompts, max_tokens=train.sample_tokens, sampling=sampling, stops=stops
            )
        finally:  # the next training step donates the parameters
            self._generator.set_params(None)
        return {
            prompt: generation.text
            for prompt, generation in zip(train.sample_prompts, generations, strict=True)
        }


_CHUNK_TOKENS = 256  # of a prompt, per context rank


class ChatSession:
    """A chat: one sequence that grows by prompts and answers, whose cache stays between them. All
    answers use the same two programs, of a chunk and of a decoding step.

    Attributes:
      num_prefilled: tokens of prompts that were computed for the last answer.
    """

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
        template = template_of(result, chat_template)
        generator = generator_of(result)
        self._encoder = Encoder(result.tokenizer, template)
        self._stops = stops_for(result, template)
        self._system = system
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._max_context = max_context
        self._turns: list[np.ndarray] = []  # the ids up to the end of each answer
        chunk_tokens = _CHUNK_TOKENS * generator.mesh.shape["context"]
        self._batch = Batch(generator, [np.zeros(max_context - 1, np.int32)], 1, chunk_tokens)
        self._ids = np.zeros(0, np.int32)  # of the tokens in the cache
        self._states = [(0, self._batch.copied_states())]
        self.num_prefilled = 0

    def say(
        self, text: str, stream: Stream | None = None, is_ended: Callable[[], bool] = lambda: False
    ) -> Generation:
        """The answer to a message of the user, which both join the history.

        Args:
          is_ended: as for `answer`; an answer that it ends joins the history as it is.
        Raises:
          UserError: the chat has become too long; the history stays as it was.
        """
        message = dict(role="user", content=text)
        where = repr(text[:40])
        if self._turns:
            ids = self._encoder.continued(self._turns[-1], Chat([message]), where)
        else:
            first = [dict(role="system", content=self._system)] if self._system else []
            ids, _ = self._encoder.prompt(Chat([*first, message]), where)
        answer = self.answer(ids, stream, is_ended)
        self._turns.append(np.concatenate([ids, answer.tokens]))
        return answer

    def undo(self) -> None:
        """Removes the last message and its answer from the history."""
        del self._turns[-1:]

    def answer(
        self,
        ids: np.ndarray,
        stream: Stream | None = None,
        is_ended: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Continues the sequence `ids`, of which only the tokens from the first difference to the
        last call are computed. In layers with a recurrent state, these are the tokens from the end
        of a prompt or an answer before it.

        Args:
          is_ended: called before each token; the answer ends if it is True, with the reason "interrupted".
        Raises:
          UserError: the sequence and an answer are too long.
        """
        if len(ids) + self._max_tokens > self._max_context:
            raise UserError(
                f"the conversation has {len(ids):,} tokens, and with an answer of {self._max_tokens:,} more than"
                f" max_context={self._max_context:,}: start a new one, or use a larger max_context"
            )
        # the tokens of the cache before the first difference, without the last token of `ids`, whose
        # logits are needed
        num_kept = num_equal(self._ids, ids[:-1])
        if any(jax.tree.leaves(self._batch.is_state)):
            while self._states[-1][0] > num_kept:
                self._states.pop()
            num_kept, states = self._states[-1]
            self._batch.restore(states)
        self._batch.rewind(ids[:num_kept])
        self.num_prefilled = len(ids) - num_kept
        logits_BV = self._batch.extend([ids[num_kept:]] * self._batch.num_sequences)
        self._ids = ids
        self._keep_states()
        output = Output(self._encoder.tokenizer, self._stops, self._max_tokens, ids)
        indices = np.zeros(1, np.int32)
        while not is_ended():
            tokens_B, log_probs_B = self._batch.choose(logits_BV, self._sampling, indices)
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

    def _keep_states(self) -> None:
        self._states.append((len(self._ids), self._batch.copied_states()))
