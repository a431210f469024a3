"""Text generation with the model of a run or of a Hugging Face directory: `jaxlc.generate`."""

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxlc.config.models.context_length import context_warning
from jaxlc.config.models.pretrained import COPY_DIRECTORY, eos_token_ids
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.generation.generator import Generation, Generator, Stream
from jaxlc.generation.prompts import PromptEncoder, encoder_of
from jaxlc.generation.sampling import Sampling
from jaxlc.step.language_model import LanguageModel
from jaxlc.train.result.run_result import Result

Prompt = str | Sequence[int] | np.ndarray
# Generators keep compiled programs and a copy of the parameters.
_generators: weakref.WeakKeyDictionary[LanguageModel, Generator] = weakref.WeakKeyDictionary()


def generate_text(
    result: Result,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    chunk_tokens: int = 0,
    stream: Stream | None = None,
    frees_params: bool = False,
    chat: bool = False,
    chat_template: str = "",
) -> list[Generation]:
    """Continues `prompts` with the model of `result`; see `jaxlc.generate`.

    Args:
      frees_params: free the float32 parameters if the generator has them in another dtype. `result` cannot be used
        afterwards.
    """
    if isinstance(prompts, np.ndarray) or any(isinstance(prompt, int) for prompt in prompts):
        raise UserError("invalid prompts: expected a string, or a list of strings or of arrays of token ids")
    encode = encoder_of(result, chat=chat, chat_template=chat_template)
    encoded = [encode(prompt) if isinstance(prompt, str) else np.asarray(prompt) for prompt in prompts]
    generator = generator_of(result)
    warn_beyond_context(result, max(map(len, encoded), default=0) + max_tokens)
    if frees_params:
        for stored, cast in zip(jax.tree.leaves(result.params), jax.tree.leaves(generator.params), strict=True):
            if stored.dtype != cast.dtype:
                stored.delete()
    return generator(
        encoded,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=[*([stop] if isinstance(stop, str) else stop), *encode.stop_texts],
        stop_ids=stop_ids(encode, result.workdir),
        chunk_tokens=chunk_tokens,
        stream=stream,
        shows_progress=True,
    )


def generator_of(result: Result) -> Generator:
    """The generator of the model of `result`; the same one in later calls.

    Raises:
      Unsupported: a custom model, whose attention has no KV cache.
    """
    model, step = result.model, result.train_step
    if step.model is not None:
        raise Unsupported("unsupported: generation with a custom model, whose attention has no KV cache")
    if model not in _generators:
        _generators[model] = Generator(step, result.params, result.tokenizer, is_pretrained=result.is_pretrained)
    return _generators[model]


def warn_beyond_context(result: Result, num_tokens: int) -> None:
    """Prints a warning on stderr, on one process, if texts of `num_tokens` are longer than the context of the model."""
    config = result.train_step.config
    trained_tokens = 0 if result.is_pretrained else config.data.seq_len
    warning = context_warning(config.model, num_tokens, trained_tokens=trained_tokens)
    if warning and result.train_step.model is None and jax.process_index() == 0:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def stop_ids(encode: PromptEncoder, workdir: Path) -> list[int]:
    """The end-of-turn token of a chat, the end-of-document token, and the tokens that a pretrained model names."""
    ids = {*encode.stop_ids, encode.tokenizer.end_of_document_id}
    return sorted(ids.union(eos_token_ids(workdir), eos_token_ids(workdir / COPY_DIRECTORY)))
