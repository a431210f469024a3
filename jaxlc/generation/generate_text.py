"""Text generation with the model of a run or of a Hugging Face directory: `jaxlc.generate`."""

import sys
import weakref
from collections.abc import Sequence

import jax
import numpy as np

from jaxlc.config.models.context_length import context_warning
from jaxlc.config.models.pretrained import original_of
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.data.tokens.chat import ChatTemplate
from jaxlc.data.tokens.stops import Stops, stops_of
from jaxlc.generation.generator import Generation, Generator, Stream
from jaxlc.generation.prompts import encoder_of
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
    for warning in encode.warnings if jax.process_index() == 0 else ():
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    generator, stops = generator_of(result), stops_for(result, encode.template)
    warn_beyond_context(result, max(map(len, encoded), default=0) + max_tokens)
    if frees_params:
        for stored, cast in zip(jax.tree.leaves(result.params), jax.tree.leaves(generator.params), strict=True):
            if stored.dtype != cast.dtype:
                stored.delete()
    return generator(
        encoded,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=[*([stop] if isinstance(stop, str) else stop), *stops.texts],
        stop_ids=stops.ids,
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


def stops_for(result: Result, template: ChatTemplate | None = None) -> Stops:
    """What ends the answers of the model of `result` to prompts in `template`."""
    original = original_of(result.config.model.init_from, result.workdir)
    return stops_of(result.config, result.tokenizer, original, template)
