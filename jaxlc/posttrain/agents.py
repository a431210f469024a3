"""Agents: functions of the user's that ask the policy over several turns, with tools between them.

An agent never sees logits or the mesh. A client gives it turns of the policy as token ids, and
records what training needs: log-probabilities, experts and the version of the policy. The ids of a
turn are the ids before it and the encoded new messages, so no token is rendered or encoded twice.
"""

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxlc.config import Config
from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.files import displayed
from jaxlc.data.texts.documents import ASSISTANT, Chat
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.posttrain.records import encoded_array
from jaxlc.posttrain.rewards import Answer, Reward, load_function, rewards_of
from jaxlc.posttrain.rollouts import write_rollouts
from jaxlc.posttrain.traces import Prompt

FAILED = "failed"  # the field of a record that is not trained on: why


class SamplerError(UserError):
    """The policy cannot answer, such as a server that is lost; not a failure of the agent."""


class Request(NamedTuple):
    """A turn that an agent waits for."""

    ids: np.ndarray  # int32 [tokens], of the prompt
    max_tokens: int
    agent: int  # its number in the rollouts of a step
    number: int  # of the requests of this agent


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


class Sampler(Protocol):
    """Answers the requests of agents."""

    async def sample(self, request: Request) -> Turn: ...

    def end(self, agent: int) -> None:
        """An agent asks no more."""


Teacher = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]  # adds candidates to a record
Sample = Callable[[np.ndarray, int], Awaitable[Turn]]  # ids and the most tokens


@dataclass(kw_only=True, eq=False)
class Context:
    """The tokens until the end of a turn."""

    tokens: np.ndarray  # int32 [n]
    sampled: np.ndarray  # bool [n]
    log_probs: np.ndarray  # float32, of the sampled ones
    experts: np.ndarray | None  # of all tokens but the last
    chat: Sequence[Any] = ()  # of `ask`: the tools and the messages
    is_continued: bool = False  # by another one


class Client:
    """The policy, for one call of an agent."""

    def __init__(self, prompt: Prompt, encoder: Encoder, config: Config, sample: Sample):
        self.prompt, self.encoder, self.trajectories = prompt, encoder, list[Trajectory]()
        self._config, self._sample = config, sample

    def trajectory(self) -> "Trajectory":
        """A new one, whose turns share a reward."""
        self.trajectories.append(Trajectory(self))
        return self.trajectories[-1]

    async def turn(self, ids: np.ndarray) -> Turn:
        """The continuation of token ids, without a record."""
        room = self._config.data.seq_len + 1 - len(ids)
        if room < 1:
            return Turn(np.zeros(0, np.int32), np.zeros(0, np.float32), "", "context")
        return await self._sample(ids, min(self._config.rollouts.max_tokens, room))


class Trajectory:
    """Turns of the policy in one context or several ones, such as before and after a summary. A
    history that does not start with an earlier one starts a new context.
    """

    def __init__(self, client: Client):
        self.turns: list[Turn] = []
        self._client, self._contexts = client, list[Context]()

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> Turn:
        """The answer to the messages of a chat.

        Args:
          messages: to continue a context, those of an earlier call, the `Turn.message` of its answer, and new ones.
        """
        chat, encoder, where = [tools, *messages], self._client.encoder, self._client.prompt.where
        known = [x for x in self._contexts if x.chat and chat[: len(x.chat)] == x.chat]
        before = max(known, key=lambda x: len(x.chat), default=None)
        if before is None:
            ids, _ = encoder.prompt(Chat(list(messages), tools), where)
        else:
            new = Chat(chat[len(before.chat) :], tools)
            ids = encoder.continued(before.tokens, new, where)
        return await self._turn(ids, before, chat)

    async def sample(self, ids: Sequence[int] | np.ndarray) -> Turn:
        """The continuation of token ids, which start with those of an earlier turn, or a new
        context.
        """
        ids = np.asarray(ids, np.int32)
        known = [x for x in self._contexts if np.array_equal(ids[: len(x.tokens)], x.tokens)]
        return await self._turn(ids, max(known, key=lambda x: len(x.tokens), default=None))

    @property
    def contexts(self) -> list[Context]:
        """Those that no other one continues."""
        return [x for x in self._contexts if not x.is_continued]

    @property
    def answer(self) -> Answer:
        return Answer(
            prompt=self._client.prompt.text,
            answer=self.turns[-1].text,
            turns=[turn.text for turn in self.turns],
            tokens=[x.tokens.tolist() for x in self.contexts],
            reason=self.turns[-1].reason,
        )

    async def _turn(
        self, ids: np.ndarray, before: Context | None, chat: Sequence[Any] = ()
    ) -> Turn:
        turn = await self._client.turn(ids)
        self.turns.append(turn)
        if not len(turn.tokens):
            return turn
        num_tokens, experts = len(ids) + len(turn.tokens), turn.experts
        sampled, log_probs = np.arange(num_tokens) >= len(ids), turn.log_probs
        if before is not None:
            before.is_continued = True
            sampled[: len(before.sampled)] = before.sampled
            log_probs = np.concatenate([before.log_probs, log_probs])
            if experts is not None:  # those that were used when a token was sampled
                experts = np.concatenate([before.experts, experts[len(before.experts) :]])
        self._contexts.append(
            Context(
                tokens=np.concatenate([ids, turn.tokens]),
                sampled=sampled,
                log_probs=log_probs,
                experts=experts,
                chat=[*chat, turn.message] if chat else (),
            )
        )
        return turn


async def answer_once(client: Client, record: Mapping[str, Any]) -> Trajectory:
    """The agent of rollouts without one: one answer to the prompt."""
    trajectory = client.trajectory()
    await trajectory.sample(client.prompt.ids)
    return trajectory


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Makes the rollouts of a step."""

    config: Config
    encoder: Encoder
    prompts: Sequence[Prompt]
    # (client, record) -> a trajectory of the client, or a list of them
    agent: Callable[..., Awaitable[Trajectory | Sequence[Trajectory]]]
    reward: Reward
    teacher: Teacher | None = None

    async def rollouts(
        self, numbers: Sequence[int], step: int, policy_step: int, sampler: Sampler
    ) -> list[dict[str, Any]]:
        """The records of the answers to prompts, in the order of `numbers`, with their rewards.

        Raises:
          SamplerError: of the sampler.
        """
        num_answers = self.config.rollouts.answers_per_prompt

        async def group(at: int, number: int) -> list[dict[str, Any]]:
            prompt, agents = self.prompts[number], range(at * num_answers, (at + 1) * num_answers)
            calls = await asyncio.gather(*[self._call(prompt, x, sampler) for x in agents])
            ended = [pair for pairs in calls for pair in pairs]
            answers = [trajectory.answer for trajectory, failure in ended if not failure]
            rewards = await rewards_of(self.reward, answers, prompt.record, self.config.rollouts)
            results, fields = iter(rewards), dict(policy_step=policy_step, group=f"{step}-{number}")
            return [
                record
                for name, (trajectory, failure) in enumerate(ended)
                for record in self._records(
                    trajectory, prompt, str(name), failure or next(results), fields
                )
            ]

        groups = await asyncio.gather(*[group(*x) for x in enumerate(numbers)])
        records = [record for records in groups for record in records]
        if self.teacher is None:
            return records
        return await asyncio.gather(*map(self.teacher, records))

    async def _call(
        self, prompt: Prompt, number: int, sampler: Sampler
    ) -> list[tuple[Trajectory, str]]:
        """Runs the agent; returns its trajectories, or all of the client and why it failed."""
        requests = itertools.count()

        async def sample(ids: np.ndarray, max_tokens: int) -> Turn:
            return await sampler.sample(Request(ids, max_tokens, number, next(requests)))

        client = Client(prompt, self.encoder, self.config, sample)
        try:
            result = await self.agent(client, prompt.record)
            trajectories = [result] if isinstance(result, Trajectory) else list(result)
            if not trajectories or not all(x.contexts for x in trajectories):
                raise ValueError("expected one or more trajectories with a turn")
            return [(trajectory, "") for trajectory in trajectories]
        except SamplerError:
            raise
        except Exception as error:
            failure = f"config.rollouts.agent failed: {reason_of(error)}"
            return [(x, failure) for x in client.trajectories or [client.trajectory()]]
        finally:
            sampler.end(number)

    def _records(
        self,
        trajectory: Trajectory,
        prompt: Prompt,
        name: str,
        result: float | str,
        fields: Mapping[str, Any],
    ) -> Iterator[dict[str, Any]]:
        """The record of each context of a trajectory, with its reward or why it failed."""
        turns = [turn.text for turn in trajectory.turns]
        fields = {**fields, "text": dict(prompt=prompt.text, answer="\n".join(turns))}
        if self.config.rollouts.agent:
            fields |= dict(trajectory=name)
        fields |= {FAILED: result} if isinstance(result, str) else dict(reward=result)
        for context in trajectory.contexts:
            experts = {}
            if context.experts is not None:
                experts = dict(routed_experts=encoded_array(context.experts))
            yield dict(
                **experts,
                tokens=context.tokens.tolist(),
                loss_mask=context.sampled.astype(int).tolist(),
                sampled_log_probs=context.log_probs.tolist(),
                truncated=trajectory.turns[-1].reason != "stop",
                **fields,
            )
        if not trajectory.contexts:
            yield fields


def make_agents(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[Prompt], teacher: Teacher | None = None
) -> Agents:
    """Loads config.rollouts.agent and reward.

    Raises:
      UserError: one of them cannot be loaded, or the agent is not asynchronous.
    """
    name, setting = config.rollouts.agent, "config.rollouts.agent"
    agent = load_function(name, setting) if name else answer_once
    if not inspect.iscoroutinefunction(agent):
        raise UserError(f"{setting}={name!r} is not asynchronous: define it with `async def`")
    return Agents(
        config=config,
        encoder=Encoder(tokenizer, config.data.chat_template),
        prompts=prompts,
        agent=agent,
        reward=load_function(config.rollouts.reward, "config.rollouts.reward"),
        teacher=teacher,
    )


def seed_of(config: Config, *numbers: int) -> int:
    """A random seed of 32 bits that depends on data.seed and the numbers."""
    seed = np.random.SeedSequence([config.data.seed % 2**32, *numbers])
    return int(seed.generate_state(1)[0])


def check_failures(records: Sequence[Mapping[str, Any]], config: Config, path: Path) -> None:
    """Raises UserError if more than rollouts.max_failed of the records have no reward; they are
    kept next to `path`.
    """
    failures = [record[FAILED] for record in records if FAILED in record]
    limit = config.rollouts.max_failed
    if len(failures) > limit * len(records):
        # a name that is not read as the file of a step
        kept = path.with_suffix(f".unrewarded{path.suffix}")
        write_rollouts(records, kept)
        raise UserError(
            f"{len(failures)} of {len(records)} answers have no reward, more than config.rollouts.max_failed={limit:g};"
            f" the first: {failures[0]}; the answers are in {displayed(kept)}"
        )
