"""The sections `posttrain` and `rollouts` of a config."""

from dataclasses import dataclass
from typing import Literal

from jaxlc.config.values import Above0, Above0UpTo1, From0Below1, From1, FromMinus1, ZeroOrAbove1


@dataclass(frozen=True, kw_only=True)
class PosttrainConfig:
    """Preference and policy losses on traces: prompts with several answers; docs/post_training.md."""

    # Empty: cross entropy of the answers. dpo: direct preference optimization, on pairs of answers. simpo: the same of
    # mean log-probabilities, without a reference. kto: on labeled answers, against the KL divergence of mismatched
    # answers; apo_zero_unpaired: without the divergence. grpo: the clipped policy gradient; the mean over answers of
    # the mean over their tokens. dapo: the mean over all tokens of the step. dr_grpo: the sum over tokens, divided by
    # max_answer_tokens and the number of answers. cispo: as dapo, but the ratio is limited at 1 + clip_high and has no
    # gradient; it weighs the gradient of the log-probability. reverse_kl: as dapo, but the advantage of a token is its
    # reference (teacher) minus its old log-probability.
    loss: Literal[
        "",
        "dpo",
        "simpo",
        "kto",
        "apo_zero_unpaired",
        "grpo",
        "dapo",
        "dr_grpo",
        "cispo",
        "reverse_kl",
    ] = ""
    clip_low: From0Below1[float] = 0.2  # policy losses: ratios are clipped at 1 - clip_low
    clip_high: float = 0.28  # policy losses: and at 1 + clip_high (clip-higher, DAPO)
    # grpo, dapo, dr_grpo: the largest ratio also where the advantage is negative (two-sided clipping); 0: no limit
    delta: ZeroOrAbove1[float] = 0.0
    # policy losses: the ratio of each token, or the geometric mean over the answer (GSPO).
    ratio: Literal["token", "sequence"] = "token"
    kl: float = 0.0  # policy losses: weight of the KL divergence from the reference (k3)
    # the reference model of dpo, kto, apo_zero_unpaired and kl. record: its log-probabilities are in the field
    # reference_log_probs of the records. base: the model without the adapters of LoRA, which takes one more forward
    # pass, but no other weights. model: reference_model, whose weights are in pinned host memory; one more
    # forward pass. auto: record if the first record of a file of data.traces has the field, else base with LoRA, else
    # model.
    reference: Literal["auto", "record", "base", "model"] = "auto"
    # reference=model: workdir of a run, Hugging Face directory or hub id ORGANIZATION/NAME, of a model with the same
    # settings. Empty: model.init_from.
    reference_model: str = ""
    # policy losses: the old log-probabilities, to which ratios compare the new ones: of the trainer, before the first
    # update on the answers. policy: from the training forward, so that all ratios are 1. record: from the field
    # old_log_probs of the records, such as of `jaxlc logprobs`. sampled: the sampler's, from sampled_log_probs.
    old_log_probs: Literal["policy", "record", "sampled"] = "policy"
    # policy losses: the loss of each token is multiplied by exp(old - sampled log-probability), within limits and
    # without a gradient; the field sampled_log_probs of the records has the sampler's values.
    importance_weights: bool = False
    # importance_weights: of each token, of an answer (from the sum of its differences), or their geometric mean over
    # the answer. truncate: weights outside of the limits become the limit; mask: they become 0.
    weight_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    weight_min: float = 0.0  # importance_weights: lower limit
    weight_max: float = 3.0  # importance_weights: upper limit; 0: none
    # policy losses: negative answers whose mean of sampled - new is above this have no loss (DeepSeek-V3.2). 0: none
    off_policy_mask_threshold: float = 0.0
    # policy losses: advantages of rewards are divided by their standard deviation in the group
    scale_advantages: bool = True
    mask_truncated: bool = False  # policy losses: answers with truncated=true have no loss
    # policy losses: groups whose advantages are all 0, such as of equal rewards, are packed (keep) or not (drop)
    no_advantage: Literal["drop", "keep"] = "drop"
    max_answer_tokens: int = 0  # dr_grpo: the constant length
    beta: Above0[float] = 0.1  # preference losses: inverse temperature of the implicit reward
    # dpo, simpo: probability that a pair is labeled the wrong way round
    label_smoothing: From0Below1[float] = 0.0
    target_margin: float = 0.5  # simpo: of the implicit rewards of the two answers (gamma)
    # kto, apo_zero_unpaired: weight of the losses of answers whose label is true
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0  # the same where the label is false
    # logits are divided by it before log-probabilities are computed, as in sampling
    temperature: Above0[float] = 1.0
    # traces without posttrain.loss: the loss is the KL divergence from a teacher instead of cross entropy, over this
    # number of its most probable next tokens and one bucket for all others. The records have them in the fields
    # teacher_tokens and teacher_log_probs, such as of `jaxlc logprobs --top_k`. 0: cross entropy
    teacher_top_k: int = 0
    # tokens go to the experts that the sampler chose, which the records have in the field routed_experts. The current
    # router determines the weights of these experts.
    replay_routing: bool = False

    @property
    def is_pairwise(self) -> bool:
        """Whether the loss is of pairs of a chosen and a rejected answer."""
        return self.loss in ("dpo", "simpo")

    @property
    def is_labeled(self) -> bool:
        """Whether the loss is of answers with a label."""
        return self.loss in ("kto", "apo_zero_unpaired")

    @property
    def is_policy(self) -> bool:
        """Whether the loss is of answers with an advantage."""
        return bool(self.loss) and not (self.is_pairwise or self.is_labeled)

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of a reference model."""
        needs_values = self.loss in ("dpo", "reverse_kl") or self.is_labeled
        return needs_values or bool(self.loss and self.kl)

    @property
    def uses_sampled(self) -> bool:
        """Whether the loss needs the log-probabilities of the sampler."""
        are_old = self.old_log_probs == "sampled"
        return are_old or self.importance_weights or self.off_policy_mask_threshold > 0

    @property
    def reads_reference(self) -> bool:
        """Whether batches have the log-probabilities of the reference; of auto, see
        `traces.with_reference`.
        """
        is_recorded = self.reference in ("auto", "record") and self.loss != "kto"
        return self.uses_reference and is_recorded

    @property
    def uses_reference_model(self) -> bool:
        """Whether the loss needs the weights of a reference model of its own."""
        return self.uses_reference and self.reference == "model"


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    """Traces that are made while training: a file for each step; docs/post_training.md. What is for the
    source `model` is also for `server`, unless it says `model only`.
    """

    # model: the policy answers prompts before each step, on the mesh of the run. server: on a vLLM server while steps
    # are trained. files: another program writes files in the format of data.traces, for which training waits. Empty:
    # no rollouts.
    source: Literal["", "model", "server", "files"] = ""
    # server: such as http://host:8000; the environment variable VLLM_API_KEY has its key
    server: str = ""
    # server: of an adapter for each version of the policy, which the server sees by the same path. Empty:
    # WORKDIR/adapters
    server_directory: str = ""
    # server: the run ends if a request has no answer in this time
    server_seconds: Above0[float] = 600.0
    server_max_loras: int = 0  # server: its --max-loras, which it does not tell; at least lag + 2
    # server: its --data-parallel-size, which it does not tell; must be 1
    server_data_parallel: From1[int] = 1
    # model: the address of a vLLM server of a teacher, which gives posttrain.teacher_top_k candidates for each token of
    # the answers
    teacher_server: str = ""
    # server: step s is trained on answers of the policy after step s - 1 - lag, or of the first one, so a step is
    # trained while the answers of later ones are made
    lag: int = 0
    # of the files STEP.jsonl, the first of which is 1.jsonl; with posttrain.replay_routing or a server,
    # STEP.parquet. Empty: WORKDIR/rollouts
    directory: str = ""
    # files: the run ends if a file does not appear in this time; 0: no limit
    wait_seconds: float = 0.0
    # model: files with the field prompt (text, a list of messages, or token ids), and others for
    # the reward.
    prompts: tuple[str, ...] = ()
    # as prompts, whose answers are rewarded every train.eval_every_steps for evaluation only. Empty: none
    eval_prompts: tuple[str, ...] = ()
    # model: each step uses other prompts, in an order that depends on data.seed
    prompts_per_step: From1[int] = 8
    answers_per_prompt: From1[int] = 8  # model: sampled at posttrain.temperature
    max_tokens: From1[int] = 256  # model: longer answers are truncated
    # model only: most groups without an advantage that other prompts replace in each step (dynamic sampling, DAPO)
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
    max_failed: From0Below1[float] = 0.0
    # files: traces with more training steps than this between policy_step and their use are left out. -1: no limit
    max_policy_age: FromMinus1[int] = -1
    # files: steps between exports of the weights, or of the adapters with LoRA, to WORKDIR/exported/STEP, for the
    # program that makes the rollouts; a multiple of train.checkpoint_every_steps. 0: none.
    export_every_steps: int = 0
    # called with the directory after each export; its failure ends the run
    export_command: str = ""
