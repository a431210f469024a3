"""Agents and rewards: functions of the user's. An agent asks the policy over several turns, with
tools between them; a reward gets its answers, with retries and a limit of its time.

An agent never sees logits or the mesh. A client gives it turns of the policy as token ids, and
records what training needs: log-probabilities, experts and the version of the policy. The ids of a
turn are the ids before it and the encoded new messages, so no token is rendered or encoded twice.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import itertools
import runpy
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxlc.config import Config
from jaxlc.config.rollouts_schema import RolloutsConfig
from jaxlc.core import UserError, reason_of
from jaxlc.core.files import displayed, local_path
from jaxlc.data.texts.documents import ASSISTANT, Chat
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.interrupts import in_thread
from jaxlc.posttrain.records import FAILED, encoded_array
from jaxlc.posttrain.rollouts import write_rollouts
from jaxlc.posttrain.traces import Prompt

# (prompt, answer, record) and fields of `Answer` by name, or (group, record); see docs/post_training.md
Reward = Callable[..., Any]
_SETTING = "config.rollouts.reward"
_MORE = ("turns", "tokens", "reason")
# of functions of the user; a tool that cancels a task may cancel the agent that waits for it
_FAILURES = (Exception, SystemExit, asyncio.CancelledError)
T = TypeVar("T")


class SamplerError(UserError):
    """The policy cannot answer, such as a server that is lost; not a failure of the agent."""


class Turn(NamedTuple):
    """What the policy answers."""

    tokens: np.ndarray  # int32 [n], the end-of-turn token included
    log_probs: np.ndarray  # float32 [n], of the sampler
    text: str  # without special tokens
    # "stop": a token or string that ends an answer; "length": rollouts.max_tokens; "context": the prompt fills
    # data.seq_len, and there are no tokens
    reason: str
    experts: np.ndarray | None = None  # of the prompt and all tokens but the last

    @property
    def message(self) -> dict[str, str]:
        """For the next call of `Trajectory.ask`, unchanged: other messages start a new context."""
        return dict(role=ASSISTANT, content=self.text)


class Answer(NamedTuple):
    """What a reward gets of an answer."""

    prompt: str
    answer: str  # the text of the last turn
    turns: list[str]  # the texts of all turns of the policy
    tokens: list[list[int]]  # of each context, with its prompt
    reason: str  # why the last turn ended, see `Turn`


# Token ids of a prompt, the most tokens of the answer, and the index of the request in its step, which decides
# the random numbers
Request = tuple[np.ndarray, int, int]
Sample = Callable[[np.ndarray, int, int], Awaitable[Turn]]  # answers a request
Teacher = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]  # adds candidates to a record


class Context(NamedTuple):
    """The tokens until the end of a turn."""

    tokens: np.ndarray  # int32 [n]
    sampled: np.ndarray  # bool [n]
    log_probs: np.ndarray  # float32, of the sampled ones
    experts: np.ndarray | None  # of all tokens but the last


@dataclass(frozen=True, eq=False)
class Client:
    """The policy, for one call of an agent."""

    prompt: Prompt
    encoder: Encoder
    config: Config
    sample: Sample
    indices: Iterator[int]  # of its requests
    trajectories: list["Trajectory"] = field(default_factory=list)

    def trajectory(self) -> "Trajectory":
        """A new one, whose turns share a reward."""
        self.trajectories.append(Trajectory(self))
        return self.trajectories[-1]


class Trajectory:
    """Turns of the policy in one context or several ones, such as before and after a summary. A
    history that does not start with an earlier one starts a new context.

    Attributes:
      contexts: those that no other one continues.
      result: the reward, or why there is none.
    """

    def __init__(self, client: Client):
        self.turns: list[Turn] = []
        self.contexts: list[Context] = []
        self.result: float | str = ""
        self._client = client
        self._contexts = list[Context]()
        # tools and messages of `ask`, with the answer, and their tokens
        self._chats: list[tuple[list[Any], np.ndarray]] = []

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> Turn:
        """The answer to the messages of a chat.

        Args:
          messages: to continue a context, those of an earlier call, the `Turn.message` of its answer, and new ones.
        """
        chat = [tools, *messages]
        encoder = self._client.encoder
        where = self._client.prompt.where
        known = [x for x in self._chats if chat[: len(x[0])] == x[0]]
        if known:
            before, tokens = max(known, key=lambda x: len(x[0]))
            ids = encoder.continued(tokens, Chat(chat[len(before) :], tools), where)
        else:
            ids, _ = encoder.prompt(Chat(list(messages), tools), where)
        turn = await self.sample(ids)
        self._chats.append(([*chat, turn.message], np.concatenate([ids, turn.tokens])))
        return turn

    async def sample(self, ids: Sequence[int] | np.ndarray) -> Turn:
        """The continuation of token ids, which start with those of an earlier turn, or a new
        context.
        """
        ids = np.asarray(ids, np.int32)
        client = self._client
        room = client.config.data.seq_len + 1 - len(ids)
        turn = Turn(np.zeros(0, np.int32), np.zeros(0, np.float32), "", "context")
        if room > 0:
            most = min(client.config.rollouts.max_tokens, room)
            turn = await client.sample(ids, most, next(client.indices))
        self.turns.append(turn)
        if not len(turn.tokens):
            return turn
        tokens = np.concatenate([ids, turn.tokens])
        log_probs = turn.log_probs
        experts = turn.experts
        sampled = np.arange(len(tokens)) >= len(ids)
        known = [x for x in self._contexts if np.array_equal(ids[: len(x.tokens)], x.tokens)]
        if known:
            before = max(known, key=lambda x: len(x.tokens))
            self.contexts = [x for x in self.contexts if x is not before]
            sampled[: len(before.sampled)] = before.sampled
            log_probs = np.concatenate([before.log_probs, log_probs])
            if experts is not None:  # those that were used when a token was sampled
                experts = np.concatenate([before.experts, experts[len(before.experts) :]])
        context = Context(tokens, sampled, log_probs, experts)
        self._contexts.append(context)
        self.contexts.append(context)
        return turn

    @property
    def answer(self) -> Answer:
        return Answer(
            prompt=self._client.prompt.text,
            answer=self.turns[-1].text,
            turns=[turn.text for turn in self.turns],
            tokens=[x.tokens.tolist() for x in self.contexts],
            reason=self.turns[-1].reason,
        )

    def records(self, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The record of each context, or of none, with its reward or why it failed, and `fields`."""
        turns = [turn.text for turn in self.turns]
        text = dict(prompt=self._client.prompt.text, answer="\n".join(turns))
        name = FAILED if isinstance(self.result, str) else "reward"
        fields = {**fields, "text": text, name: self.result}
        for context in self.contexts:
            if context.experts is not None:
                fields |= dict(routed_experts=encoded_array(context.experts))
            yield dict(
                tokens=context.tokens.tolist(),
                loss_mask=context.sampled.astype(int).tolist(),
                sampled_log_probs=context.log_probs.tolist(),
                truncated=self.turns[-1].reason != "stop",
                **fields,
            )
        if not self.contexts:
            yield fields


async def answer_once(client: Client, record: Mapping[str, Any]) -> Trajectory:
    """The agent of rollouts without one: one answer to the prompt."""
    trajectory = client.trajectory()
    await trajectory.sample(client.prompt.ids)
    return trajectory


class Agents:
    """Makes the rollouts of a step.

    Attributes:
      agent: (client, record) -> a trajectory of the client, or a list of them.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        teacher: Teacher | None = None,
    ):
        """
        Raises:
          UserError: config.rollouts.agent or reward cannot be loaded, or the agent is not asynchronous.
        """
        rollouts = config.rollouts
        setting = "config.rollouts.agent"
        self.config = config
        self.prompts = prompts
        self.teacher = teacher
        self.encoder = Encoder(tokenizer, config.data.chat_template)
        self.reward = load_function(rollouts.reward, "config.rollouts.reward")
        self.agent = load_function(rollouts.agent, setting) if rollouts.agent else answer_once
        if not inspect.iscoroutinefunction(self.agent):
            raise UserError(
                f"{setting}={rollouts.agent!r} is not asynchronous: define it with `async def`"
            )

    async def rollouts(
        self,
        numbers: Sequence[int],
        step: int,
        policy_step: int,
        sample: Sample,
        end: Callable[[int], None] = lambda _: None,
    ) -> list[dict[str, Any]]:
        """The records of the answers to prompts, in the order of `numbers`, with their rewards.

        Args:
          sample: gets indices that are the number of the agent plus multiples of the number of agents.
          end: called with the number of each agent that asks no more.
        Raises:
          SamplerError: of `sample`.
        """
        num_answers = self.config.rollouts.answers_per_prompt
        num_agents = len(numbers) * num_answers

        async def call(prompt: Prompt, agent: int) -> list[Trajectory]:
            """Runs the agent; returns its trajectories, or if it fails all of the client."""
            indices = itertools.count(agent, num_agents)
            client = Client(prompt, self.encoder, self.config, sample, indices)
            try:
                result = await self.agent(client, prompt.record)
                trajectories = [result] if isinstance(result, Trajectory) else list(result)
                if not trajectories or not all(x.contexts for x in trajectories):
                    raise ValueError("expected one or more trajectories with a turn")
            except SamplerError:
                raise
            except _FAILURES as error:
                trajectories = client.trajectories or [client.trajectory()]
                for trajectory in trajectories:
                    trajectory.result = f"config.rollouts.agent failed: {reason_of(error)}"
            finally:
                end(agent)
            return trajectories

        async def group(at: int, number: int) -> list[tuple[Trajectory, dict[str, Any]]]:
            prompt = self.prompts[number]
            agents = range(at * num_answers, (at + 1) * num_answers)
            calls = await asyncio.gather(*[call(prompt, agent) for agent in agents])
            trajectories = list(itertools.chain(*calls))
            ended = [x for x in trajectories if not x.result]
            answers = [x.answer for x in ended]
            rewards = await rewards_of(self.reward, answers, prompt.record, self.config.rollouts)
            for trajectory, reward in zip(ended, rewards, strict=True):
                trajectory.result = reward
            fields = dict(policy_step=policy_step, group=f"{step}-{number}")
            return [(trajectory, fields) for trajectory in trajectories]

        groups = await asyncio.gather(*[group(*x) for x in enumerate(numbers)])
        records = []
        # of the step, which may have a prompt twice
        for name, (trajectory, fields) in enumerate(itertools.chain(*groups)):
            records += trajectory.records(fields | dict(trajectory=str(name)))
        if self.teacher is None:
            return records
        return await asyncio.gather(*map(self.teacher, records))


def seed_of(config: Config, *numbers: int) -> int:
    """A random seed of 32 bits that depends on data.seed and the numbers."""
    seed = np.random.SeedSequence([config.data.seed % 2**32, *numbers])
    return int(seed.generate_state(1)[0])


def write_rewarded(records: Sequence[Mapping[str, Any]], config: Config, path: Path) -> None:
    """Writes rollouts to `path`.

    Raises:
      UserError: more than rollouts.max_failed of the answers have no reward; they are next to `path`.
    """
    # an answer has a record for each of its contexts
    answers = {(x["group"], x["trajectory"]): x.get(FAILED) for x in records}
    failures = [reason for reason in answers.values() if reason]
    limit = config.rollouts.max_failed
    are_too_many = len(failures) > limit * len(answers)
    if are_too_many:
        # a name that is not read as the file of a step
        path = path.with_suffix(f".unrewarded{path.suffix}")
    write_rollouts(records, path)
    if are_too_many:
        raise UserError(
            f"{len(failures)} of {len(answers)} answers have no reward, more than config.rollouts.max_failed={limit:g};"
            f" the first: {failures[0]}; the answers are in {displayed(path)}"
        )


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """The function FILE.py:FUNCTION or MODULE:FUNCTION.

    Args:
      setting: that has this name, for errors.
    Raises:
      UserError: there is no such function, or its module raises an error.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UserError(
            f"invalid value {name!r} for {setting}: expected FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    try:
        if place.endswith(".py"):
            names = runpy.run_path(str(local_path(place)))
        else:
            names = vars(importlib.import_module(place))
    except Exception as error:
        raise UserError(f"{setting}={name!r} cannot be loaded: {reason_of(error)}") from error
    if not callable(names.get(function)):
        raise UserError(f"{setting}={name!r}: {place} has no function {function!r}")
    return names[function]


async def rewards_of(
    reward: Reward, group: Sequence[Answer], record: Mapping[str, Any], settings: RolloutsConfig
) -> list[float | str]:
    """The reward of each answer to a prompt, or why it failed after settings.reward_retries. Calls
    of an asynchronous function overlap.
    """
    names = inspect.signature(reward).parameters
    if "group" in names:
        return await _retried(lambda: reward(list(group), record), len(group), settings)
    calls = []
    for answer in group:
        more = {name: getattr(answer, name) for name in _MORE if name in names}
        call = functools.partial(reward, answer.prompt, answer.answer, record, **more)
        calls.append(_retried(call, 1, settings))
    if inspect.iscoroutinefunction(reward):
        results = await asyncio.gather(*calls)
    else:
        results = [await call for call in calls]
    return [x for (x,) in results]


async def _retried(
    call: Callable[[], Any], num_numbers: int, settings: RolloutsConfig
) -> list[float | str]:
    """The numbers that a call returns, or why the last one failed."""
    limit = settings.reward_seconds
    problem = ""
    for _ in range(settings.reward_retries + 1):
        try:
            async with asyncio.timeout(limit or None):
                value = await asyncio.wrap_future(in_thread(call))
                if inspect.isawaitable(value):
                    value = await value
            numbers = np.atleast_1d(np.array(value, float))
            if numbers.shape == (num_numbers,) and np.isfinite(numbers).all():
                return numbers.tolist()
            problem = f"returned {value}: expected {num_numbers} finite number"
        except TimeoutError:
            problem = f"took longer than config.rollouts.reward_seconds={limit:g}"
        except _FAILURES as error:
            problem = f"failed: {reason_of(error)}"
    return [f"{_SETTING} {problem}"] * num_numbers


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:  # SystemExit of a task of an agent stops the loop
            with contextlib.suppress(SystemExit):
                loop.run_forever()

    in_thread(run)
    return loop


def in_background(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine in the event loop of a daemon thread. There is one loop, since agents and
    rewards may keep connections and locks, which belong to one.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())
