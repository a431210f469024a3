"""Rollouts by the policy itself, on the mesh of the run, or by a server, in the background of
training: answers to prompts, with their rewards.

For a server, the policy after each step is an adapter in a directory that the server sees, too.
Step s is trained on answers of version max(0, s - 1 - rollouts.lag). A version, the number of the
step that made it, is written once by each start. After a restart the same requests are made again, of the same
versions with the same seeds, and files of rollouts that exist are used.
"""

import asyncio
import functools
import itertools
import queue
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from jax.experimental.multihost_utils import process_allgather

from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY, committed_steps
from jaxlc.config import Config
from jaxlc.config.models.config_json import family_of
from jaxlc.config.models.pretrained import original_of
from jaxlc.core import UserError, gib
from jaxlc.core.files import displayed, file_fingerprint, local_path, new_directory
from jaxlc.data.sequences.packing import epoch_order
from jaxlc.data.tokens.encoder import stops_of
from jaxlc.generation.generate_text import rollout_memory
from jaxlc.generation.generator import Generator
from jaxlc.generation.sampling import Sampling
from jaxlc.hf.adapters import WEIGHTS_FILE, Params, write_adapters
from jaxlc.hf.load import paths_of
from jaxlc.models import decoder, lora
from jaxlc.posttrain.agents import (
    FAILED,
    Agents,
    Request,
    Turn,
    in_background,
    seed_of,
    write_rewarded,
)
from jaxlc.posttrain.rollouts import Rollouts
from jaxlc.posttrain.server import Server, open_teacher
from jaxlc.posttrain.traces import open_traces
from jaxlc.runtime.watchdog import on_process_0
from jaxlc.step.step import TrainStep

_HELDOUT = 2**32 - 1  # the attempt of answers for evaluation, for other random numbers
Records = list[dict[str, Any]]


class RolloutMaker(ABC):
    """Makes the rollouts of a run. Every process calls its methods."""

    def __init__(self, step: TrainStep, source: Rollouts):
        """
        Raises:
          UserError: the agent or the reward cannot be loaded, or the teacher cannot be used.
        """
        self._step = step
        self._source = source
        config = self._config = step.config
        self._prompts = (*source.prompts, *source.eval_prompts)
        teacher = open_teacher(config, source.tokenizer, source.prompts[0].text)
        self._agents = Agents(config, source.tokenizer, self._prompts, teacher)
        self._stops = stops_of(config, source.tokenizer, source.workdir)

    @property
    @abstractmethod
    def lines(self) -> list[str]:
        """For the start report."""

    @abstractmethod
    def __call__(self, params: dict, step: int, path: Path) -> None:
        """Makes the rollouts of `step`, with the parameters before it, which will be in `path`."""

    def heldout(self, params: dict, step: int, path: Path) -> dict[str, float]:
        """Means over the answers to rollouts.eval_prompts, which are written to `path`, with the
        parameters of `step`.

        Raises:
          UserError: more than rollouts.max_failed of the answers have no reward.
        """
        numbers = range(len(self._source.prompts), len(self._prompts))
        records = self._answers(params, numbers, step, step, _HELDOUT)

        def means() -> dict[str, float]:
            write_rewarded(records, self._config, path)
            sources = (str(path),)
            # as if the next step trained on them
            traces = open_traces(self._config, self._source.tokenizer, sources, step=step + 1)
            rewards = traces.rewards
            return dict(
                mean=rewards["reward"],
                deviation=rewards["reward_deviation"],
                answer_tokens=rewards["answer_tokens"],
                truncated=rewards["truncated"],
            )

        return on_process_0(means)

    @abstractmethod
    def _answers(
        self, params: dict, numbers: Sequence[int], step: int, version: int, attempt: int
    ) -> Records:
        """The answers to prompts with their rewards, in process 0; in others none.

        Args:
          params: after step `version`.
          attempt: of `step`, for its random numbers.
        """


class PolicyRollouts(RolloutMaker):
    """Makes the rollouts of a step before it.

    Rollouts are a function of the parameters, data.seed and the step. The parameters are copied
    once in the compute dtype, sharded as they are, and the copy is freed afterwards; compiled
    programs remain.
    """

    def __init__(self, step: TrainStep, source: Rollouts):
        super().__init__(step, source)
        self._generator = Generator(step, None, source.tokenizer)

    @property
    def lines(self) -> list[str]:
        rollouts = self._config.rollouts
        longest = max(len(prompt.ids) for prompt in self._prompts) + rollouts.max_tokens
        memory = rollout_memory(self._step, 0 if rollouts.agent else longest)
        return [
            f"rollouts   {memory.num_sequences:,} sequences of up to {memory.num_tokens:,} tokens; beside the training"
            f" state, per device: KV cache {gib(memory.cache_bytes)} GiB, weights {gib(memory.weights_bytes)} GiB"
        ]

    def __call__(self, params: dict, step: int, path: Path) -> None:
        # Processes must agree, also on file systems that show them different states of the file.
        if on_process_0(path.is_file):
            return
        config = self._config
        num_prompts = len(self._source.prompts)
        prompts = prompts_of_step(config, num_prompts, step)
        records = []
        asked = list(prompts)
        most = len(prompts) + config.rollouts.max_replacements
        # an order of their own: the steps that follow use other prompts
        order = epoch_order(num_prompts, config.data.seed + 1, step).tolist()
        for attempt in itertools.count():
            records.extend(self._answers(params, prompts, step, step - 1, attempt))
            num_lacking = on_process_0(lambda: _num_without_advantage(records))
            wanted = min(num_lacking + config.rollouts.prompts_per_step, most)
            others = [number for number in order if number not in asked]
            prompts = others[: wanted - len(asked)]
            if not prompts:
                break
            asked += prompts
        on_process_0(lambda: write_rewarded(records, config, path))

    def _answers(
        self, params: dict, numbers: Sequence[int], step: int, version: int, attempt: int
    ) -> Records:
        """Agents run in the background of process 0, and this thread of all processes answers them
        together.
        """
        num_agents = len(numbers) * self._config.rollouts.answers_per_prompt
        rounds = _Rounds(num_agents)
        records = []
        if jax.process_index() == 0:
            agents = self._agents.rollouts(numbers, step, version, rounds.sample, rounds.end)
            result = in_background(agents)
            result.add_done_callback(lambda _: rounds.batches.put([]))
        self._generator.set_params(params)
        try:
            while batch := on_process_0(rounds.next):
                turns = self._generate(batch, num_agents, step, attempt)
                if jax.process_index() == 0:
                    rounds.answer(turns)
        finally:  # the next training step donates the parameters
            self._generator.set_params(None)
        on_process_0(lambda: records.extend(result.result()))
        return records

    def _generate(
        self, batch: list[Request], num_agents: int, step: int, attempt: int
    ) -> list[Turn]:
        config = self._config
        sampling = Sampling(
            temperature=config.posttrain.temperature,
            top_p=config.rollouts.top_p,
            seed=seed_of(config, step, attempt),
            scales_log_probs=True,
        )
        # a power of two, since each number of prompts has its own programs
        num_more = min(num_agents, 2 ** (len(batch) - 1).bit_length()) - len(batch)
        prompts, max_tokens, indices = zip(*(batch + batch[:1] * num_more))
        generations = self._generator(
            prompts, max_tokens=max_tokens, sampling=sampling, stops=self._stops, indices=indices
        )
        return [
            Turn(x.tokens, x.log_probs, x.text, x.finish_reason, x.experts)
            for x in generations[: len(batch)]
        ]


class _Rounds:
    """Collects the requests of agents: a batch has those of all agents that run."""

    def __init__(self, num_agents: int):
        self._num_agents = num_agents
        self._running = set(range(num_agents))
        self._waiting: dict[int, tuple[Request, Future]] = {}  # by index
        self._asked: list[Future] = []  # of the batch that `next` returned
        # an empty one: all agents have ended
        self.batches: queue.SimpleQueue[list[tuple[Request, Future]]] = queue.SimpleQueue()

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
            self.batches.put([self._waiting[index] for index in sorted(self._waiting)])
            self._waiting = {}

    def next(self) -> list[Request]:
        """Waits for a batch."""
        batch = self.batches.get()
        self._asked = [future for _, future in batch]
        return [request for request, _ in batch]

    def answer(self, turns: list[Turn]) -> None:
        for future, turn in zip(self._asked, turns, strict=True):
            future.set_result(turn)


def prompts_of_step(config: Config, num_prompts: int, step: int) -> list[int]:
    """The numbers of the prompts of a step."""
    per_step = config.rollouts.prompts_per_step
    positions = [divmod(i, num_prompts) for i in range((step - 1) * per_step, step * per_step)]
    seed = config.data.seed
    return [int(epoch_order(num_prompts, seed, epoch)[index]) for epoch, index in positions]


def _num_without_advantage(records: Sequence[Mapping[str, Any]]) -> int:
    groups = {record["group"] for record in records}
    rewards = {(record["group"], record["reward"]) for record in records if FAILED not in record}
    num_rewards = Counter(group for group, _ in rewards)
    return sum(num_rewards[group] < 2 for group in groups)


def adapters_directory(config: Config, workdir: Path) -> Path:
    """The directory of the versions of the policy."""
    setting = config.rollouts.server_directory
    return (local_path(setting) if setting else workdir / "adapters").absolute()


class ServerRollouts(RolloutMaker):
    """Makes the rollouts of steps on a server; process 0 does."""

    def __init__(self, step: TrainStep, source: Rollouts):
        super().__init__(step, source)
        self._directory = adapters_directory(step.config, source.workdir)
        self._server = Server(
            url=step.config.rollouts.server,
            config=step.config,
            tokenizer=source.tokenizer,
            stops=self._stops,
        )
        self._next_step = 0  # the first one that was not asked for

    @property
    def lines(self) -> list[str]:
        """For the start report, after the server was probed.

        Raises:
          UserError: the server cannot be reached, or must be started in another way.
        """
        text = self._prompts[0].text
        on_process_0(lambda: in_background(self._server.check(text)).result())
        place = displayed(self._directory)
        return [f"rollouts   by the server {self._config.rollouts.server}; adapters in {place}"]

    def __call__(self, params: dict, step: int, path: Path) -> None:
        """Publishes the parameters before `step`, and asks for the rollouts of the steps that can be
        made.
        """
        self._publish(params, step - 1)
        if jax.process_index() == 0:
            lag = self._config.rollouts.lag
            first = max(step, self._next_step)
            self._next_step = min(step + lag, self._config.train.steps) + 1
            # no request refers to versions before this step's
            in_background(self._make(range(first, self._next_step), step - 1 - lag))

    def _answers(
        self, params: dict, numbers: Sequence[int], step: int, version: int, attempt: int
    ) -> Records:
        self._publish(params, version)
        records = []
        asked = (numbers, step, version, attempt)
        on_process_0(lambda: records.extend(in_background(self._records(*asked)).result()))
        return records

    async def _make(self, steps: Iterable[int], first_version: int) -> None:
        try:
            await self._server.unload(self._directory, first_version)
            await asyncio.gather(*map(self._write, steps))
        except Exception as error:
            self._source.train.failure = error

    async def _write(self, step: int) -> None:
        config = self._config
        path = self._source.train.path(step)
        if path.is_file():
            return
        numbers = prompts_of_step(config, len(self._source.prompts), step)
        version = max(0, step - 1 - config.rollouts.lag)
        write_rewarded(await self._records(numbers, step, version, 0), config, path)

    async def _records(
        self, numbers: Sequence[int], step: int, version: int, attempt: int
    ) -> Records:
        adapter = self._directory / str(version)
        if not adapter.is_dir():
            raise UserError(
                f"the rollouts of step {step} need the adapter {displayed(adapter)}, which does not exist: put it back,"
                " or use a different workdir"
            )
        # a server keeps the keys and values of a name that is loaded again: equal names have equal weights
        name = f"{version}-{file_fingerprint(adapter / WEIGHTS_FILE)}"
        seed = seed_of(self._config, step, attempt)
        await self._server.load(name, adapter)
        sample = functools.partial(self._server.sample, name, adapter, seed)
        return await self._agents.rollouts(numbers, step, version, sample)

    def _publish(self, params: dict, version: int) -> None:
        """Writes the adapter of a version, unless it exists, and removes those that no resumed run
        needs.
        """
        target = self._directory / str(version)
        if on_process_0(target.is_dir):
            return
        gathered = _gathered(params, self._step)
        on_process_0(lambda: self._write_version(gathered, target))

    def _write_version(self, params: Params, target: Path) -> None:
        config = self._config
        original = original_of(config.model.init_from, self._source.workdir)
        family = family_of(original and original.config_json(), config.model)
        has_images = original is not None and original.has_images
        with new_directory(target, "use another config.rollouts.server_directory") as partial:
            write_adapters(config, family, params, partial, has_images=has_images)
        saved = committed_steps(self._source.workdir / CHECKPOINTS_DIRECTORY)
        first = min([int(target.name), *saved] if saved else [0]) - config.rollouts.lag
        for other in self._directory.iterdir():
            if other.name.isdigit() and int(other.name) < first:
                shutil.rmtree(other)


def _gathered(params: dict, step: TrainStep) -> Params:
    """The trained parameters of a training state; every process calls it."""
    model = step.config.model
    trained, _ = lora.split(params, step.frozen)
    abstract = dict(paths_of(decoder.abstract_params(model, model.vocab_size, step.config.lora)))
    arrays = {}
    for path, x in paths_of(trained):
        without_padding = tuple(map(slice, abstract[path].shape))  # of the vocabulary
        arrays[path] = process_allgather(x, tiled=True)[without_padding]
    return SimpleNamespace(abstract=abstract, read=lambda paths: {x: arrays[x] for x in paths})
