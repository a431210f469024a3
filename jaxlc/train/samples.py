"""Texts that a run generates during training, for prompts that stay the same: train.sample_prompts.

The sampler is the same as for rollouts. It reads the parameters of the training state, without a copy; its KV cache
exists between two steps only.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from jaxlc.config.models.pretrained import original_of
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.core.files import replacing
from jaxlc.core.text import gib
from jaxlc.data.tokens.chat_templates import fitting_template
from jaxlc.data.tokens.encoder import stops_of
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.generation.generate_text import PromptEncoder, sample_memory
from jaxlc.generation.generator import Generator
from jaxlc.generation.sampling import Sampling
from jaxlc.step.step import TrainStep

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
        train, data = step.config.train, step.config.data
        if step.model is not None:
            raise Unsupported(
                "unsupported: config.train.sample_every_steps with a custom model, which has no KV cache"
            )
        template = None
        if train.sample_chat:
            template = fitting_template(data.chat_template, tokenizer, flag="data.chat_template")
        encode = PromptEncoder(tokenizer=tokenizer, template=template)
        self._prompts = [encode(prompt) for prompt in train.sample_prompts]
        if any(not ids.size for ids in self._prompts):
            raise UserError("config.train.sample_prompts has an empty prompt; remove it")
        self._step, self._tokenizer, self._template = step, tokenizer, template
        self._generator = Generator(step, None, tokenizer, copies=False)
        self.problem = ""

    @property
    def lines(self) -> list[str]:
        """Memory of the samples, for the start report."""
        memory, every = sample_memory(self._step), self._step.config.train.sample_every_steps
        return [
            f"samples    {memory.num_sequences} texts of up to {memory.num_tokens:,} tokens every {every} steps; beside"
            f" the training state, per device: KV cache {gib(memory.cache_bytes)} GiB"
        ]

    def __call__(self, params: dict, workdir: Path) -> dict[str, str]:
        """The text that follows each prompt. Random numbers are the same at every step."""
        config, train = self._step.config, self._step.config.train
        original = original_of(config.model.init_from, workdir)
        stops = stops_of(config, self._tokenizer, original, self._template)
        is_greedy = train.sample_temperature <= 0
        sampling = Sampling(
            temperature=train.sample_temperature,
            top_p=1.0 if is_greedy else _TOP_P,
            seed=train.seed % 2**32,
        )
        self._generator.set_params(params)
        try:
            generations = self._generator(
                self._prompts,
                max_tokens=train.sample_tokens,
                sampling=sampling,
                stop=stops.texts,
                stop_ids=stops.ids,
            )
        finally:  # the next training step donates the parameters
            self._generator.set_params(None)
        return {
            prompt: generation.text
            for prompt, generation in zip(train.sample_prompts, generations, strict=True)
        }


def write_samples(path: Path, texts: Mapping[str, str]) -> None:
    """Writes one JSON object per prompt."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as out:
        for prompt, text in texts.items():
            out.write(json.dumps(dict(prompt=prompt, text=text)).encode() + b"\n")
