"""usage: python -m jaxlc.evals.harness --model_args path=SOURCE --tasks TASK,TASK [flags of
`lm_eval run`]

Evaluates a run or a Hugging Face directory with lm-evaluation-harness
(https://github.com/EleutherAI/lm-evaluation-harness). Arguments of the model, as
NAME=VALUE,NAME=VALUE: path, step, max_length, chat_template, seed, data, fsdp, context and tensor.

From Python: `lm_eval.simple_evaluate(HarnessModel(path), tasks=[...])`. Needs the package lm_eval.
"""

import functools
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import Collator, has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import jaxlc
from jaxlc.config.models.pretrained import CONFIG_FILE, read_json
from jaxlc.core import MESH_AXES, UserError, errors
from jaxlc.data.texts.documents import Chat
from jaxlc.data.tokens.chat_templates import ChatTemplate
from jaxlc.data.tokens.encoder import Stops
from jaxlc.data.tokens.tokenizers import named_tokens, read_tokenizer_config
from jaxlc.generation.generate_text import generator_of, stops_for, template_of
from jaxlc.generation.sampling import Sampling
from jaxlc.step.language_model import TrainedModel

NAME = "jaxlc"  # the model in lm_eval
_MAX_NEW_TOKENS = 256  # default of tasks without a limit, as for the model `hf`


@register_model(NAME)
class HarnessModel(TemplateLM):
    """A model for lm-evaluation-harness, with the tokens and rules of its model `hf` for the
    exported directory.

    Every process of a run makes the same requests; process 0 returns the results of
    `simple_evaluate`, the others None.
    """

    def __init__(
        self,
        path: str | Path | TrainedModel,
        *,
        step: int | None = None,
        batch_size: int | str = 1,
        max_length: int = 0,
        device: str | None = None,
        chat_template: str = "",
        seed: int | None = None,
        **mesh: int,
    ):
        """
        Args:
          path: workdir of a run, a Hugging Face directory, or a loaded `Result`.
          step: the checkpoint of the run. None: the latest one.
          batch_size: requests that are computed together.
          max_length: tokens of a request, of which longer ones lose the first; the window of rolling log-likelihoods.
            0: max_position_embeddings of a Hugging Face directory, data.seq_len of a run.
          device: of PyTorch, which lm_eval always passes; it has no effect.
          chat_template: chatml, llama3 or a Jinja file, used with --apply_chat_template. "": the template of the run
            or of the tokenizer.
          seed: of sampling; each request has its own random numbers, in batches of any size. --gen_kwargs seed=N goes
            first. None: the third number of --seed, as for the model `hf`.
          mesh: sizes of mesh axes, such as context=4. None: the mesh of the run.
        Raises:
          UserError: an unknown argument, or the model cannot be loaded.
        """
        super().__init__()
        if unknown := mesh.keys() - set(MESH_AXES):
            expected = ", ".join(
                ["path", "step", "max_length", "chat_template", "seed", *MESH_AXES]
            )
            raise UserError(f"unknown argument {min(unknown)!r} of the model: expected {expected}")
        if not str(batch_size).isdecimal() or not int(batch_size):
            raise UserError(f"invalid --batch_size={batch_size}: expected a number of at least 1")
        self._result = (
            path
            if isinstance(path, TrainedModel)
            else jaxlc.load(path, step=step, mesh=mesh or None)
        )
        self._tokenizer = self._result.tokenizer
        self._template_setting = chat_template
        self.batch_size = int(batch_size)
        torch = sys.modules.get("torch")  # lm_eval gives it the seed
        known_seed = torch.initial_seed() % 2**32 if torch else 0
        self._seed = known_seed if seed is None else int(seed)
        trained = (
            read_json(self._result.workdir / CONFIG_FILE) if self._result.is_pretrained else {}
        )
        self.max_length = (
            int(max_length)
            or trained.get("max_position_embeddings")
            or self._result.config.data.seq_len
        )
        self._is_primary = jax.process_index() == 0
        if not self._is_primary:
            # lm_eval shares the requests out by `rank`, which stays 0. It reads this variable to find the process
            # that reports.
            os.environ["LOCAL_RANK"] = str(jax.process_index())

    @property
    def eot_token_id(self) -> int:
        eos = self._special_id("eos_token")
        return self._tokenizer.end_of_document_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text follows."""
        bos = self._special_id("bos_token")
        if bos is None:
            return next(iter(self._tokenizer.start_ids.tolist()), self.eot_token_id)
        return bos

    @property
    def tokenizer_name(self) -> str:
        return str(self._result.workdir).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the template. Raises UserError for a name, which is an argument of the
        model.
        """
        if isinstance(chat_template, str):
            raise UserError(
                f"invalid --apply_chat_template {chat_template}: pass it without a value, and"
                f" chat_template={chat_template} in --model_args"
            )
        return self._template.source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a chat; without `add_generation_prompt` its last message is continued."""
        chat = Chat(chat_history)
        return self._template.prompt(chat, continues_last=not add_generation_prompt).text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """The ids of a text with special tokens; start tokens come first unless the text has them."""
        ids = self._encode(string)
        has_start = add_special_tokens is None and has_bos_prefix(
            string, self._special_texts.get("bos_token")
        )
        if add_special_tokens is False or has_start:
            return ids
        return [*self._tokenizer.start_ids.tolist(), *ids]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in windows of at most `max_length` tokens that do not
        overlap.
        """
        windows = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            )
            windows.append([make_disjoint_window(window) for window in found])
        scored = iter(
            self._loglikelihood_tokens([(("", ""), *pair) for pairs in windows for pair in pairs])
        )
        return [sum(next(scored)[0] for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues prompts up to a stop string, an end-of-text token or the number of tokens of
        the task.
        """
        ordered = Collator(
            [(*request.args, index) for index, request in enumerate(requests)],
            sort_fn=lambda request: (-len(request[0]), request[0]),
            group_fn=lambda request: request[1],
            group_by="gen_kwargs",
        )
        texts = []
        for batch in self._shown(ordered.get_batched(n=self.batch_size), "generate_until"):
            prompts, (settings, *_), indices = zip(*batch)
            texts += self._generate(prompts, settings, indices)
        return ordered.get_original(texts)

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **_
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding gives it.

        Requests of equal input, such as answers of one token to the same question, are computed
        once.

        Args:
          requests: (texts, ids of the context, ids of the continuation).
        """
        by_input: dict[tuple[int, ...], list[int]] = {}
        for index, (texts, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation has {len(continuation):,} tokens, and max_length is {self.max_length:,}: pass a"
                    " larger max_length in --model_args"
                )
            if not continuation:
                raise UserError(
                    f"the continuation {texts[1]!r} of {texts[0][-50:]!r} has no token of its own: the tokenizer"
                    " merges it into the last token of the context; change where the task splits the text"
                )
            context = context or [self.prefix_token_id]  # as for an empty text
            by_input.setdefault((*context, *continuation)[-self.max_length - 1 : -1], []).append(
                index
            )
        # the longest first: it shows whether the memory suffices
        inputs = sorted(by_input, key=len, reverse=True)
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        batches = [
            inputs[first : first + self.batch_size]
            for first in range(0, len(inputs), self.batch_size)
        ]
        for batch in self._shown(batches, "loglikelihood"):
            parts = [[(index, requests[index][2]) for index in by_input[ids]] for ids in batch]
            candidates = [[token for _, x in part for token in x] for part in parts]
            positions = [
                [position for _, x in part for position in range(len(ids) - len(x), len(ids))]
                for ids, part in zip(batch, parts)
            ]
            # few sizes, few compiled programs
            num_candidates = 2 ** (max(map(len, candidates)) - 1).bit_length()
            log_probs_Bn, is_best_Bn, *_ = self._result.model.scores(
                self._rows(batch, len(batch[0])),
                *(self._rows(x, num_candidates) for x in (positions, candidates)),
            )
            for part, log_probs_n, is_best_n in zip(parts, log_probs_Bn, is_best_Bn):
                ends = np.cumsum([len(x) for _, x in part])
                pieces = zip(part, np.split(log_probs_n, ends), np.split(is_best_n, ends))
                for (index, _), log_probs, is_best in pieces:
                    total = float(log_probs.sum(dtype=np.float64))
                    results[index] = total, bool(is_best.all())
        return results

    def _generate(
        self, prompts: Sequence[str], settings: dict, indices: Sequence[int]
    ) -> list[str]:
        """The continuations of a batch of prompts, with their indices among all requests."""
        wanted = normalize_gen_kwargs(settings, _MAX_NEW_TOKENS)
        max_tokens = wanted.pop("max_gen_toks")
        stop = wanted.pop("until", None) or []
        temperature = wanted.pop("temperature", 1.0 if wanted.pop("do_sample") else 0.0)
        top_p = wanted.pop("top_p", 1.0)
        seed = int(wanted.pop("seed", self._seed))
        if unknown := wanted.keys():
            raise UserError(
                f"unsupported generation setting {min(unknown)!r}: expected do_sample, temperature, top_p, seed, until"
                " or max_gen_toks"
            )
        if max_tokens >= self.max_length:
            raise UserError(
                f"the task generates {max_tokens:,} tokens, and max_length is {self.max_length:,}: pass a larger"
                " max_length in --model_args, or --gen_kwargs max_gen_toks=N"
            )
        ids = [self.tok_encode(prompt)[-(self.max_length - max_tokens) :] for prompt in prompts]
        generations = generator_of(self._result)(
            [np.array(row, np.int32) for row in self._filled(ids)],
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=temperature, top_p=top_p if temperature else 1.0, seed=seed
            ),
            stops=Stops([*self._stops.ids, self.eot_token_id], [*stop, *self._stops.texts]),
            indices=self._filled(indices),
        )
        return [generation.text for generation in generations[: len(prompts)]]

    def _rows(self, rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
        """int32 [batch_size, length]: shorter rows are padded at the end, and rows repeat in an
        incomplete batch.
        """
        return np.array(
            [[*row, *[0] * (length - len(row))] for row in self._filled(rows)], np.int32
        )

    def _filled(self, rows: Sequence) -> list:
        """Rows of an incomplete batch, with repetitions of the last one: all batches use the same
        program.
        """
        return [*rows, *[rows[-1]] * (self.batch_size - len(rows))]

    def _shown(self, batches: Iterable, what: str) -> Iterable:
        return tqdm(batches, desc=f"batches of {what}", disable=not self._is_primary)

    def _encode(self, text: str) -> list[int]:
        ((ids, _),) = self._tokenizer.encode_with_offsets([text], special_tokens=True)
        return ids.tolist()

    @functools.cached_property
    def _stops(self) -> Stops:
        return stops_for(self._result)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return template_of(self._result, self._template_setting, flag="--model_args chat_template")

    @functools.cached_property
    def _special_texts(self) -> dict[str, str]:
        """The tokens that tokenizer_config.json names, such as bos_token."""
        file = self._tokenizer.file
        return {} if file is None else named_tokens(read_tokenizer_config(file.parent))

    def _special_id(self, name: str) -> int | None:
        text = self._special_texts.get(name)
        return self._encode(text)[0] if text else None


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns the exit status, 2 after a
    UserError.
    """
    try:
        errors.require("lm_eval", "jaxlc.evals.harness")
        from lm_eval.__main__ import cli_evaluate

        sys.argv = [argv[0], "run", "--model", NAME, *argv[1:]]
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
