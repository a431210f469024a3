"""Rollouts by the policy itself, on the mesh of the run: answers to prompts, with their rewards."""

import asyncio
import itertools
import queue
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from jaxlc.config import Config
from jaxlc.config.models.pretrained import original_of
from jaxlc.core.text import gib
from jaxlc.data.sequences.packing import epoch_order
from jaxlc.data.tokens.encoder import stops_of
from jaxlc.generation.generate_text import rollout_memory
from jaxlc.generation.generator import Generator
from jaxlc.generation.sampling import Sampling
from jaxlc.posttrain.agents import (
    FAILED,
    Request,
    Turn,
    check_failures,
    make_agents,
    seed_of,
)
from jaxlc.posttrain.rewards import in_thread
from jaxlc.posttrain.rollouts import Rollouts, on_process_0, write_rollouts
from jaxlc.posttrain.server import open_teacher
from jaxlc.step.step import TrainStep

HELDOUT = 2**32 - 1  # the attempt of answers for evaluation, for other random numbers
_MEANS = ("mean", "deviation", "answer_tokens", "truncated")


class PolicyRollouts:
    """Makes the rollouts of a step with the parameters before it.

    Rollouts are a function of the parameters, data.seed and the step. The parameters are copied
    once in the compute dtype, sharded as they are, and the copy is freed afterwards; compiled
    programs remain.
    """

    def __init__(self, step: TrainStep, source: Rollouts):
        self._step, self._source = step, source
        self._prompts = (*source.prompts, *source.eval_prompts)
        teacher = open_teacher(step.config, source.tokenizer, source.prompts[0].text)
        self._agents = make_agents(step.config, source.tokenizer, self._prompts, teacher)
        self._generator = Generator(step, None, source.tokenizer)

    @property
    def lines(self) -> list[str]:
        """Memory of the rollouts, for the start report."""
        rollouts = self._step.config.rollouts
        longest = max(len(prompt.ids) for prompt in self._prompts) + rollouts.max_tokens
        memory = rollout_memory(self._step, 0 if rollouts.agent else longest)
        return [
            f"rollouts   {memory.num_sequences:,} sequences of up to {memory.num_tokens:,} tokens; beside the training"
            f" state, per device: KV cache {gib(memory.cache_bytes)} GiB, weights {gib(memory.weights_bytes)} GiB",
        ]

    def __call__(self, params: dict, step: int, path: Path) -> None:
        """Writes the rollouts of `step` to `path`, unless it exists, as after a resume; every
        process calls it.
        """
        # Processes must agree, also on file systems that show them different states of the file.
        if broadcast_one_to_all(np.int32(path.is_file())):
            return
        config, num_prompts = self._step.config, len(self._source.prompts)
        prompts, traces = prompts_of_step(config, num_prompts, step), []
        asked, most = list(prompts), len(prompts) + config.rollouts.max_replacements
        for attempt in itertools.count():
            traces += self._answers(params, prompts, step, attempt, path)
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
        on_process_0(lambda: write_rollouts(traces, path))

    def heldout(self, params: dict, step: int, path: Path) -> dict[str, float]:
        """Means over the answers to rollouts.eval_prompts, which are written to `path`, with the
        parameters of `step`; every process calls it.
        """
        numbers = list(range(len(self._source.prompts), len(self._prompts)))
        traces = self._answers(params, numbers, step, HELDOUT, path)
        return means_of(traces, path)

    def _answers(
        self, params: dict, prompts: list[int], step: int, attempt: int, path: Path
    ) -> list[dict[str, Any]]:
        """The answers to prompts with their rewards, in process 0; in others none.

        Agents run in a thread of process 0, and this thread of all processes answers them together.
        """
        num_agents = len(prompts) * self._step.config.rollouts.answers_per_prompt
        rounds, result = _Rounds(num_agents), None
        if jax.process_index() == 0:
            answers = self._agents.rollouts(prompts, step, step - 1, rounds.sample, rounds.end)
            result = rounds.started(answers)
        self._generator.set_params(params)
        try:
            while len(batch := _shared(rounds.next() if result else [])):
                turns = self._generate(batch, num_agents, step, attempt)
                rounds.answer(turns if result else [])
        finally:  # the next training step donates the parameters
            self._generator.set_params(None)

        def ended() -> list[dict[str, Any]]:
            traces = result.result()
            check_failures(traces, self._step.config, path)
            return traces

        return on_process_0(ended) or []

    def _generate(
        self, batch: list[Request], num_agents: int, step: int, attempt: int
    ) -> list[Turn]:
        config, source = self._step.config, self._source
        original = original_of(config.model.init_from, source.workdir)
        stops = stops_of(config, source.tokenizer, original)
        sampling = Sampling(
            temperature=config.posttrain.temperature,
            top_p=config.rollouts.top_p,
            seed=seed_of(config, step, attempt),
            scales_log_probs=True,
        )
        # a power of two, since each number of prompts has its own programs
        num_more = min(num_agents, 2 ** (len(batch) - 1).bit_length()) - len(batch)
        padded = batch + batch[:1] * num_more
        generations = self._generator(
            [ids for ids, _, _ in padded],
            max_tokens=[most for _, most, _ in padded],
            sampling=sampling,
            stop=stops.texts,
            stop_ids=stops.ids,
            indices=[index for _, _, index in padded],
        )
        return [
            Turn(x.tokens, x.log_probs, x.text, x.finish_reason, x.experts)
            for x in generations[: len(batch)]
        ]


class _Rounds:
    """Collects the requests of agents: a batch has those of all agents that run."""

    def __init__(self, num_agents: int):
        self._num_agents, self._running = num_agents, set(range(num_agents))
        self._waiting: dict[int, tuple[Request, Future]] = {}  # by index
        self._batches: queue.SimpleQueue[list] = queue.SimpleQueue()
        self._answered: list[Future] = []

    def started(self, rollouts: Coroutine[Any, Any, list]) -> Future:
        """Runs the agents in another thread."""
        result = in_thread(lambda: asyncio.run(rollouts))
        result.add_done_callback(lambda _: self._batches.put([]))
        return result

    async def sample(self, *request: Any) -> Turn:
        future = Future()
        self._waiting[request[-1]] = request, future
        self._send()
        return await asyncio.wrap_future(future)

    def end(self, agent: int) -> None:
        self._running.discard(agent)
        self._send()

    def _send(self) -> None:
        # an agent that waits for a tool asks soon
        if self._waiting and self._running <= {x % self._num_agents for x in self._waiting}:
            self._batches.put([self._waiting[index] for index in sorted(self._waiting)])
            self._waiting = {}

    def next(self) -> list[Request]:
        """Waits for a batch; none: all agents have ended."""
        batch = self._batches.get()
        self._answered = [future for _, future in batch]
        return [request for request, _ in batch]

    def answer(self, turns: list[Turn]) -> None:
        for future, turn in zip(self._answered, turns, strict=True):
            future.set_result(turn)


def _shared(batch: list[Request]) -> list[Request]:
    """The requests of process 0, in all processes."""
    longest = max((len(ids) for ids, _, _ in batch), default=0)
    shape = broadcast_one_to_all(np.array([len(batch), longest + 3], np.int32))
    table = np.zeros(shape, np.int32)
    for row, (ids, most, index) in zip(table, batch):
        row[:3] = len(ids), most, index
        row[3 : 3 + len(ids)] = ids
    table = broadcast_one_to_all(table) if len(table) else table
    return [(row[3 : 3 + row[0]], *row[1:3].tolist()) for row in table]


def means_of(traces: Sequence[dict[str, Any]], path: Path) -> dict[str, float]:
    """Means over the answers of process 0, which writes them to `path`, in all processes."""
    on_process_0(lambda: write_rollouts(traces, path))
    means = np.zeros(len(_MEANS))
    if traces:
        rewarded = [trace for trace in traces if FAILED not in trace]
        rewards = [trace["reward"] for trace in rewarded]
        lengths = [sum(trace["loss_mask"]) for trace in rewarded]
        truncated = np.mean([trace["truncated"] for trace in rewarded])
        means[:] = np.mean(rewards), np.std(rewards), np.mean(lengths), truncated
    return dict(zip(_MEANS, broadcast_one_to_all(means).tolist()))


def prompts_of_step(config: Config, num_prompts: int, step: int) -> list[int]:
    """The numbers of the prompts of a step."""
    per_step = config.rollouts.prompts_per_step
    positions = [divmod(i, num_prompts) for i in range((step - 1) * per_step, step * per_step)]
    seed = config.data.seed
    return [int(epoch_order(num_prompts, seed, epoch)[index]) for epoch, index in positions]


def _num_without_advantage(traces: Sequence[Mapping[str, Any]]) -> int:
    rewards: dict[str, set[float]] = {}
    for trace in traces:
        rewards.setdefault(trace["group"], set())
        if FAILED not in trace:
            rewards[trace["group"]].add(trace["reward"])
    return sum(len(values) < 2 for values in rewards.values())
