"""Settings of post-training. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from jaxlc.config.ranges import Above0, Above0UpTo1, From0Below1, From1


@dataclass(frozen=True, kw_only=True)
class PosttrainConfig:
    """Preference and policy losses on traces: prompts with several answers; docs/post_training.md."""

    # Empty: cross entropy of the answers. dpo: direct preference optimization, on pairs of answers. grpo: the clipped
    # policy gradient; the mean over answers of the mean over their tokens. dapo: the mean over all tokens of the step.
    # dr_grpo: the sum over tokens, divided by max_answer_tokens and the number of answers.
    loss: Literal["", "dpo", "grpo", "dapo", "dr_grpo"] = ""
    clip_low: From0Below1[float] = 0.2  # policy losses: ratios of probabilities are clipped at 1 - clip_low
    clip_high: float = 0.28  # policy losses: and at 1 + clip_high (clip-higher, DAPO)
    # policy losses: the ratio of each token, or the geometric mean over the answer (GSPO).
    ratio: Literal["token", "sequence"] = "token"
    kl: float = 0.0  # policy losses: weight of the KL divergence to the reference (k3 estimator); 0: none
    # the reference model of dpo and kl. record: its log-probabilities are in the field reference_log_probs of the
    # records. base: the model without the adapters of LoRA, which takes one more forward pass, but no other weights.
    # model: that of reference_model, whose weights are in pinned host memory; one more forward pass.
    reference: Literal["record", "base", "model"] = "record"
    # reference=model: workdir of a run, Hugging Face directory or hub id ORGANIZATION/NAME, of a model with the same
    # settings. Empty: model.init_from.
    reference_model: str = ""
    # policy losses: the old log-probabilities. policy: from the training forward, so that all ratios are 1. record:
    # from the field old_log_probs of the records.
    old_log_probs: Literal["policy", "record"] = "policy"
    # policy losses: advantages of rewards are divided by their standard deviation in the group; False: only centered.
    scale_advantages: bool = True
    mask_truncated: bool = False  # policy losses: answers with truncated=true have no loss
    max_answer_tokens: int = 0  # dr_grpo: the constant length
    beta: Above0[float] = 0.1  # dpo: inverse temperature of the implicit reward
    label_smoothing: From0Below1[float] = 0.0  # dpo: probability that a pair is labeled the wrong way round
    temperature: Above0[float] = 1.0  # logits are divided by it before log-probabilities are computed, as in sampling

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of a reference model."""
        return self.loss == "dpo" or bool(self.loss and self.kl)

    @property
    def uses_reference_model(self) -> bool:
        """Whether the loss needs the weights of a reference model of its own."""
        return self.uses_reference and self.reference == "model"


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    """Traces that are made while training: a file for each step; docs/post_training.md."""

    # model: the policy answers prompts before each step, on the mesh of the run. files: another program writes files in
    # the format of data.traces, for which training waits. Empty: no rollouts.
    source: Literal["", "model", "files"] = ""
    directory: str = ""  # of the files STEP.jsonl, the first of which is 1.jsonl. Empty: WORKDIR/rollouts
    wait_seconds: float = 0.0  # files: the run ends if a file does not appear in this time; 0: no limit
    # model: files with the field prompt (text, a list of messages, or token ids), and others for the reward.
    prompts: tuple[str, ...] = ()
    prompts_per_step: From1[int] = 8  # model: each step uses other prompts, in an order that depends on data.seed
    answers_per_prompt: From1[int] = 8  # model: sampled at posttrain.temperature
    max_tokens: From1[int] = 256  # model: longer answers are truncated
    top_p: Above0UpTo1[float] = 1.0  # model: sample from the smallest set of tokens with at least this probability
    # model: FILE.py:FUNCTION or MODULE:FUNCTION, called as FUNCTION(prompt, answer, record) with two texts and the
    # record of the prompt; it returns a number.
    reward: str = ""
    reward_seconds: float = 60.0  # model: the run ends if a call of the reward takes longer; 0: no limit
    # files: steps between exports of the weights, or of the adapters with LoRA, to WORKDIR/exported/STEP, for the
    # program that makes the rollouts; a multiple of train.checkpoint_every_steps. 0: none.
    export_every_steps: int = 0
    export_command: str = ""  # called with the directory after each export; its failure ends the run
