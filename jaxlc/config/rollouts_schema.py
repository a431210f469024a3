"""The section `rollouts` of a config."""

from dataclasses import dataclass
from typing import Literal

from jaxlc.config.ranges import Above0UpTo1, From0UpTo1, From1, FromMinus1


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    """Traces that are made while training: a file for each step; docs/post_training.md."""

    # model: the policy answers prompts before each step, on the mesh of the run. files: another program writes files in
    # the format of data.traces, for which training waits. Empty: no rollouts.
    source: Literal["", "model", "files"] = ""
    # of the files STEP.jsonl, the first of which is 1.jsonl; with posttrain.replay_routing, STEP.parquet. Empty:
    # WORKDIR/rollouts
    directory: str = ""
    # files: the run ends if a file does not appear in this time; 0: no limit
    wait_seconds: float = 0.0
    # model: files with the field prompt (text, a list of messages, or token ids), and others for
    # the reward.
    prompts: tuple[str, ...] = ()
    # model: as prompts, whose answers are rewarded every train.eval_every_steps for evaluation only. Empty: none
    eval_prompts: tuple[str, ...] = ()
    # model: each step uses other prompts, in an order that depends on data.seed
    prompts_per_step: From1[int] = 8
    answers_per_prompt: From1[int] = 8  # model: sampled at posttrain.temperature
    max_tokens: From1[int] = 256  # model: longer answers are truncated
    # model: most groups without an advantage that other prompts replace in each step (dynamic sampling, DAPO)
    max_replacements: int = 0
    # model: sample from the smallest set of tokens with at least this probability
    top_p: Above0UpTo1[float] = 1.0
    # model: FILE.py:FUNCTION or MODULE:FUNCTION, an `async def` that is called as FUNCTION(client, record) for each
    # answer and returns trajectories of the client, of any number of turns. Empty: one answer to the prompt.
    agent: str = ""
    # model: FILE.py:FUNCTION or MODULE:FUNCTION, called as FUNCTION(prompt, answer, record) with two texts and the
    # record of the prompt, or as FUNCTION(group, record); it returns a number, or one for each answer of the group
    reward: str = ""
    # model: a call of the reward that takes longer has failed; 0: no limit
    reward_seconds: float = 60.0
    reward_retries: int = 1  # model: calls of the reward after one that has failed
    # model: the run ends if a larger share of the answers of a step has no reward, since the reward or the agent has
    # failed; otherwise those are counted and not trained on
    max_failed: From0UpTo1[float] = 0.0
    # files: traces with more training steps than this between policy_step and their use are left out. -1: no limit
    max_policy_age: FromMinus1[int] = -1
    # files: steps between exports of the weights, or of the adapters with LoRA, to WORKDIR/exported/STEP, for the
    # program that makes the rollouts; a multiple of train.checkpoint_every_steps. 0: none.
    export_every_steps: int = 0
    # called with the directory after each export; its failure ends the run
    export_command: str = ""
