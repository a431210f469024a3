"""Rollouts by the policy itself, on the mesh of the run: answers to prompts, with their rewards."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from jaxlc.config.models.pretrained import original_of
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.core.files import displayed
from jaxlc.core.text import gib
from jaxlc.data.sequences.packing import epoch_order
from jaxlc.data.sequences.source import DataSource
from jaxlc.data.tokens.encoder import stops_of
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.generation.generate_text import rollout_memory
from jaxlc.generation.generator import Generation, Generator
from jaxlc.generation.sampling import Sampling
from jaxlc.posttrain.records import encoded_experts
from jaxlc.posttrain.rewards import load_reward, rewarded
from jaxlc.posttrain.rollouts import Rollouts, write_rollouts
from jaxlc.posttrain.traces import Prompt
from jaxlc.step.step import TrainStep

_HELDOUT = 2**32 - 1  # the attempt of answers for evaluation, for other random numbers
_MEANS = ("mean", "deviation", "answer_tokens", "truncated")


class PolicyRollouts:
    """Makes the rollouts of a step with the parameters before it.

    Rollouts are a function of the parameters, data.seed and the step. The parameters are copied
    once in the compute dtype, sharded as they are, and the copy is freed afterwards; compiled
    programs remain.
    """

    def __init__(
        self,
        step: TrainStep,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt] = (),
    ):
        self._step, self._tokenizer, self._num_prompts = step, tokenizer, len(prompts)
        self._prompts = (*prompts, *eval_prompts)
        self._reward = load_reward(step.config.rollouts.reward)
        self._generator: Generator | None = None

    @property
    def lines(self) -> list[str]:
        """Memory of the rollouts, for the start report."""
        longest = max(len(prompt.ids) for prompt in self._prompts)
        memory = rollout_memory(self._step, longest + self._step.config.rollouts.max_tokens)
        return [
            f"rollouts   {memory.num_sequences:,} sequences of up to {memory.num_tokens:,} tokens; beside the training"
            f" state, per device: KV cache {gib(memory.cache_bytes)} GiB, weights {gib(memory.weights_bytes)} GiB",
        ]

    def __call__(self, params: dict, step: int, path: Path, workdir: Path) -> None:
        """Writes the rollouts of `step` to `path`, unless it exists, as after a resume; every
        process calls it.
        """
        # Processes must agree, also on file systems that show them different states of the file.
        if broadcast_one_to_all(np.int32(path.is_file())):
            return
        config, num_prompts = self._step.config, self._num_prompts
        prompts, traces = self._prompts_of_step(step), []
        asked, most = list(prompts), len(prompts) + config.rollouts.max_replacements
        for attempt in itertools.count():
            traces += self._answers(params, prompts, step, attempt, path, workdir)
            if len(asked) == most:
                break
            num_lacking = int(broadcast_one_to_all(np.int32(_num_without_advantage(traces))))
            # an order of their own: the steps that follow use other prompts
            order = epoch_order(num_prompts, config.data.seed + 1, step).tolist()
            others = [number for number in order if number not in asked]
            prompts = others[
                : min(num_lacking + config.rollouts.prompts_per_step, most) - len(asked)
            ]
            if not prompts:
                break
            asked += prompts
        if jax.process_index() == 0:
            write_rollouts(traces, path)

    def heldout(self, params: dict, step: int, path: Path, workdir: Path) -> dict[str, float]:
        """Means over the answers to rollouts.eval_prompts, which are written to `path`, with the
        parameters of `step`; every process calls it.
        """
        numbers = list(range(self._num_prompts, len(self._prompts)))
        traces = self._answers(params, numbers, step, _HELDOUT, path, workdir)
        means = np.zeros(len(_MEANS))
        if traces:
            rewards = [trace["reward"] for trace in traces]
            lengths = [sum(trace["loss_mask"]) for trace in traces]
            truncated = np.mean([trace["truncated"] for trace in traces])
            means[:] = np.mean(rewards), np.std(rewards), np.mean(lengths), truncated
            write_rollouts(traces, path)
        return dict(zip(_MEANS, broadcast_one_to_all(means).tolist()))

    def _answers(
        self, params: dict, prompts: list[int], step: int, attempt: int, path: Path, workdir: Path
    ) -> list[dict[str, Any]]:
        """The answers to prompts with their rewards, in process 0; in others none."""
        settings = self._step.config.rollouts
        numbers = np.repeat(prompts, settings.answers_per_prompt).tolist()
        generations = self._generate(params, numbers, step, attempt, workdir)
        if jax.process_index() != 0:
            return []
        traces = [
            _trace(self._prompts[number], generation, f"{step}-{number}", step - 1)
            for number, generation in zip(numbers, generations, strict=True)
        ]
        try:
            for number, trace in zip(numbers, traces):
                trace["reward"] = rewarded(
                    self._reward,
                    **trace["text"],
                    record=self._prompts[number].record,
                    limit_seconds=settings.reward_seconds,
                )
        except UserError as error:
            # a name that is not read as the file of a step
            kept = path.with_suffix(f".unrewarded{path.suffix}")
            write_rollouts(traces, kept)
            raise UserError(f"{error}; the answers are in {displayed(kept)}") from error
        return traces

    def _prompts_of_step(self, step: int) -> list[int]:
        num_prompts, per_step = self._num_prompts, self._step.config.rollouts.prompts_per_step
        positions = [divmod(i, num_prompts) for i in range((step - 1) * per_step, step * per_step)]
        seed = self._step.config.data.seed
        return [int(epoch_order(num_prompts, seed, epoch)[index]) for epoch, index in positions]

    def _generate(
        self, params: dict, numbers: list[int], step: int, attempt: int, workdir: Path
    ) -> list[Generation]:
        settings, config = self._step.config.rollouts, self._step.config
        original = original_of(config.model.init_from, workdir)
        stops = stops_of(config, self._tokenizer, original)
        if self._generator is None:
            self._generator = Generator(self._step, params, self._tokenizer)
        else:
            self._generator.set_params(params)
        seed = np.random.SeedSequence([config.data.seed % 2**32, step, attempt])
        sampling = Sampling(
            temperature=config.posttrain.temperature,
            top_p=settings.top_p,
            seed=int(seed.generate_state(1)[0]),
            scales_log_probs=True,
        )
        try:
            return self._generator(
                [self._prompts[number].ids for number in numbers],
                max_tokens=settings.max_tokens,
                sampling=sampling,
                stop=stops.texts,
                stop_ids=stops.ids,
            )
        finally:  # the next training step donates the parameters
            self._generator.set_params(None)


def make_policy_rollouts(step: TrainStep, source: DataSource) -> PolicyRollouts | None:
    """None: another program makes the rollouts, or there are none.

    Raises:
      UserError: the reward cannot be loaded.
      Unsupported: a custom model.
    """
    if not isinstance(source, Rollouts) or not source.prompts:
        return None
    if step.model is not None:
        raise Unsupported(
            "config.rollouts.source='model' is unsupported with a custom model: it has no KV cache"
        )
    return PolicyRollouts(step, source.tokenizer, source.prompts, source.eval_prompts)


def _num_without_advantage(traces: Sequence[Mapping[str, Any]]) -> int:
    rewards: dict[str, set[float]] = {}
    for trace in traces:
        rewards.setdefault(trace["group"], set()).add(trace["reward"])
    return sum(len(values) == 1 for values in rewards.values())


def _trace(prompt: Prompt, generation: Generation, group: str, policy_step: int) -> dict[str, Any]:
    """The record of an answer, without its reward."""
    ids, experts = prompt.ids, generation.experts
    recorded = {} if experts is None else dict(routed_experts=encoded_experts(experts))
    return dict(
        **recorded,
        tokens=[*ids.tolist(), *generation.tokens.tolist()],
        loss_mask=[0] * len(ids) + [1] * len(generation.tokens),
        group=group,
        policy_step=policy_step,
        truncated=generation.finish_reason == "length",
        sampled_log_probs=generation.log_probs.tolist(),
        text=dict(prompt=prompt.text, answer=generation.text),  # for people
    )
