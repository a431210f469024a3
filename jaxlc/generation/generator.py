"""Text generation on the mesh of a model: prefill in chunks, then one token per sequence and step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.core.errors import UserError
from jaxlc.core.text import Update, no_progress, progress_lines
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.generation.cached_decoder import BATCH_SPEC, TOKENS_SPEC, CachedStep, abstract_params, cast_params
from jaxlc.generation.sampling import Sampling, TextStream, choose_tokens
from jaxlc.models import decoder
from jaxlc.models.cache import CacheLayout, NewTokens, empty_cache, layout_for
from jaxlc.models.kinds import stacked_tables
from jaxlc.models.rope import TablesOfKinds, depends_on_length
from jaxlc.runtime.watchdog import Program
from jaxlc.step.step import TrainStep

Stream = Callable[[int, str], None]  # index of the prompt, new text


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The continuation of one prompt."""

    text: str  # without special tokens and the stop string
    tokens: np.ndarray = field(repr=False)  # int32, the end-of-document token or the tokens of a stop string included
    log_probs: np.ndarray = field(repr=False)  # float32, of the tokens; see `Sampling.scales_log_probs`
    num_prompt_tokens: int
    finish_reason: str  # "stop": an end-of-document token or a stop string; "length": max_tokens


class Generator:
    """Generates text with the parameters of a model. Programs are compiled once per length, see `cache.layout_for`.

    Every process of a run must make the same calls.
    """

    def __init__(self, step: TrainStep, params: dict, tokenizer: Tokenizer, *, is_pretrained: bool = False):
        """
        Args:
          step: the training step of the model, for its config and mesh.
          params: the tree of `decoder.init`, sharded over the mesh; they are copied in the compute dtype.
          is_pretrained: see `Result.is_pretrained`; a continuation has the RoPE of its prompt.
        """
        self.config, self.mesh, self.tokenizer = step.config, step.mesh, tokenizer
        self._rope_by_prompt = is_pretrained and depends_on_length(step.config.model)
        self.cached_step = CachedStep(
            config=self.config, mesh=self.mesh, compute_dtype=step.compute_dtype, cache_dtype=step.compute_dtype
        )
        self._steps: dict[CacheLayout, Program] = {}
        self.set_params(params)

    def set_params(self, params: dict | None) -> None:
        """Replaces the parameters; compiled programs remain. None frees the memory of the copy."""
        config = self.config
        dims = decoder.dims_of(config.model, config.lora)
        dtype = self.cached_step.compute_dtype
        self.params = None if params is None else cast_params(params, abstract_params(params, dims, self.mesh, dtype))

    def __call__(
        self,
        prompts: Sequence[np.ndarray],
        *,
        max_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        indices: Sequence[int] | None = None,
        chunk_tokens: int = 0,
        stream: Stream | None = None,
        shows_progress: bool = False,
    ) -> list[Generation]:
        """Continues all prompts as one batch.

        Args:
          prompts: token ids, int [tokens] each, at least one token; the lengths may differ.
          max_tokens: the largest number of new tokens of each prompt.
          stop: strings that end a continuation.
          stop_ids: token ids that end a continuation.
          indices: of the prompts among the prompts of all calls; each has its own random numbers. None: 0, 1, ...
          chunk_tokens: tokens of a prompt that are computed at once, over all context ranks. 0: 2,048 per rank.
          stream: called with new text as soon as it is known.
          shows_progress: print lines on stderr while long prompts are computed.
        Raises:
          UserError: a prompt has no tokens, or an id that is not in the vocabulary; a number is out of range.
        """
        prompts = [self._checked(prompt) for prompt in prompts]
        for name, value, smallest in (("max_tokens", max_tokens, 1), ("chunk_tokens", chunk_tokens, 0)):
            if value < smallest:
                raise UserError(f"invalid value {value} for {name}: expected {smallest} or more")
        if not prompts:
            return []
        batch = _Batch(self, prompts, max_tokens, chunk_tokens)
        indices_P = np.array(range(len(prompts)) if indices is None else indices, np.int32)
        is_shown = shows_progress and jax.process_index() == 0
        with progress_lines("reading the prompt", is_shown=is_shown) as progress:
            logits_BV = jax.block_until_ready(batch.prefill(progress))
        outputs = [_Output(self.tokenizer, stop, stop_ids, max_tokens, prompt) for prompt in prompts]
        while True:
            tokens_B, log_probs_B = batch.choose(logits_BV, sampling, indices_P)
            for index, output in enumerate(outputs):
                output.add(int(tokens_B[index]), float(log_probs_B[index]))
                if stream and (text := output.take()):
                    stream(index, text)
            if all(output.finish_reason for output in outputs):
                return [output.result() for output in outputs]
            logits_BV = batch.decode(tokens_B)

    def _checked(self, prompt: np.ndarray) -> np.ndarray:
        ids = np.asarray(prompt)
        vocab_size = self.config.model.vocab_size
        if not ids.size:
            raise UserError("a prompt is empty: expected at least one token")
        if ids.ndim != 1:
            raise UserError(f"invalid prompt with shape {list(ids.shape)}: expected a text or a list of token ids")
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
            raise UserError(f"invalid token id in a prompt: expected integers from 0 to {vocab_size - 1}")
        return ids.astype(np.int32)

    def step(self, layout: CacheLayout) -> Program:
        """The compiled `CachedDecoder` of this cache layout; the cache is updated in place."""
        if layout not in self._steps:
            self._steps[layout] = Program("generation", self.cached_step.jitted(layout))
        return self._steps[layout]

    def tables(self, layout: CacheLayout, prompts: Sequence[np.ndarray]) -> TablesOfKinds | None:
        """The argument `tables` of `step`."""
        if not self._rope_by_prompt:
            return None
        return stacked_tables(self.config.model, layout.max_tokens, [len(prompt) for prompt in prompts])


class _Batch:
    """The state of one call: the cache, and how many tokens each sequence has. Sequences are added so that the batch
    splits over the mesh; they repeat the last prompt's first token."""

    def __init__(self, generator: Generator, prompts: list[np.ndarray], max_tokens: int, chunk_tokens: int):
        self._generator, cached_step = generator, generator.cached_step
        num_padding = cached_step.padded_batch_size(len(prompts)) - len(prompts)
        self._prompts = [*prompts, *([prompts[-1][:1]] * num_padding)]
        longest = max(map(len, prompts))
        layout = layout_for(longest + max_tokens, generator.mesh)
        self._chunk_tokens = cached_step.prefill_tokens(longest, chunk_tokens)
        self._step, self._tables = generator.step(layout), generator.tables(layout, self._prompts)
        self._cache = empty_cache(cached_step.abstract_cache(layout, len(self._prompts)))
        self._num_tokens_B = np.zeros(len(self._prompts), np.int32)  # in the cache

    def prefill(self, progress: Update = no_progress) -> jax.Array:
        """Runs all prompts; returns the logits of the first new token, float32 [B, V]."""
        logits_BV = previous_BV = None
        lengths_B = np.array([len(prompt) for prompt in self._prompts], np.int32)
        for first in range(0, int(lengths_B.max()), self._chunk_tokens):
            new_B = np.clip(lengths_B - first, 0, self._chunk_tokens)
            chunk_logits_BV = self._run([prompt[first : first + self._chunk_tokens] for prompt in self._prompts], new_B)
            if previous_BV is not None:  # the devices compute this chunk while the next one is prepared
                previous_BV.block_until_ready()
                progress(first, int(lengths_B.max()))
            previous_BV = chunk_logits_BV
            ends_B1 = ((new_B > 0) & (lengths_B <= first + self._chunk_tokens))[:, None]
            logits_BV = chunk_logits_BV if logits_BV is None else jnp.where(ends_B1, chunk_logits_BV, logits_BV)
        return logits_BV

    def decode(self, tokens_B: np.ndarray) -> jax.Array:
        """Appends one token to each sequence; returns the logits of the next one, float32 [B, V]."""
        return self._run(
            list(tokens_B[:, None]), np.ones(len(tokens_B), np.int32), self._generator.cached_step.decode_tokens
        )

    def choose(self, logits_BV: jax.Array, sampling: Sampling, indices_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        padded_B = np.pad(indices_P, (0, len(self._prompts) - len(indices_P)))
        indices_B = np.stack([padded_B, self._num_tokens_B])
        return jax.device_get(
            choose_tokens(
                logits_BV,
                np.uint32(sampling.seed),
                indices_B,
                np.float32(1.0 if sampling.is_greedy else sampling.temperature),
                np.float32(sampling.top_p),
                greedy=sampling.is_greedy,
                scales_log_probs=sampling.scales_log_probs,
            )
        )

    def _run(self, chunks: list[np.ndarray], new_B: np.ndarray, chunk_tokens: int = 0) -> jax.Array:
        chunk_tokens = chunk_tokens or self._chunk_tokens
        tokens_BC = np.stack([np.pad(chunk, (0, chunk_tokens - len(chunk))) for chunk in chunks]).astype(np.int32)
        counts = (self._global(x.astype(np.int32), BATCH_SPEC) for x in (self._num_tokens_B, new_B))
        arguments = self._global(tokens_BC, TOKENS_SPEC), NewTokens(*counts)
        logits_BV, self._cache = self._step(self._generator.params, self._cache, *arguments, self._tables)
        self._num_tokens_B = self._num_tokens_B + new_B.astype(np.int32)
        return logits_BV

    def _global(self, x: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(self._generator.mesh, spec), lambda index: x[index])


class _Output:
    """The new tokens of one prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        stop_ids: Sequence[int],
        max_tokens: int,
        prompt: np.ndarray,
    ):
        self._stream = TextStream(tokenizer, stop, prompt)
        self._stop_ids, self._max_tokens, self._num_prompt_tokens = set(stop_ids), max_tokens, len(prompt)
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self.finish_reason = ""  # empty: not finished

    def add(self, token: int, log_prob: float) -> None:
        """Adds the next token; those after the end are ignored."""
        if self.finish_reason:
            return
        self._tokens.append(token)
        self._log_probs.append(log_prob)
        is_end = token in self._stop_ids
        self._stream.add(token, is_hidden=is_end)
        if is_end or self._stream.is_stopped:
            self.finish_reason = "stop"
        elif len(self._tokens) == self._max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            self._stream.finish()  # which may complete a stop string
            self.finish_reason = "stop" if self._stream.is_stopped else self.finish_reason

    def take(self) -> str:
        return self._stream.take(is_last=bool(self.finish_reason))

    def result(self) -> Generation:
        return Generation(
            text=self._stream.text,
            tokens=np.array(self._tokens, np.int32),
            log_probs=np.array(self._log_probs, np.float32),
            num_prompt_tokens=self._num_prompt_tokens,
            finish_reason=self.finish_reason,
        )
