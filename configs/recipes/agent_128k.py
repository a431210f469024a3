r"""GRPO of an agent with tools and compaction, contexts of up to 131,072 tokens, on 8 H100s: Qwen3 8B. Variants: mini.

    jaxlc train --config=agent_128k:mini       # a calculator in miniature, on 2 simulated CPU devices
    jaxlc train --config=agent_128k --config.model.init_from=Qwen/Qwen3-8B --config.rollouts.prompts=PROMPTS.jsonl

The agent of this file adds numbers with a calculator that adds two of them at a time. When its history becomes long, a
summary replaces it, and a new context begins; all contexts of an answer share its reward (docs/post_training.md).
Replace `agent` and `reward` by your own. Losses and limits are as in configs/recipes/grpo_128k.py; the number of
prompts and answers, the learning rate and the length of a turn are our choice.
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, read_config, shrink_for_cpu

VARIANTS = ("mini",)
TOOLS = [
    dict(
        type="function",
        function=dict(
            name="add",
            description="Replaces the first two numbers by their sum.",
            parameters=dict(type="object", properties={}),
        ),
    )
]
_HERE = __file__.removesuffix("agent_128k.py")


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = read_config("grpo_128k")
    config.model.preset = "qwen3-8b"
    config.model.update(rope_scaling="yarn", rope_scaling_factor=4.0)
    config.model.rope_scaling_original_tokens = 32_768
    config.lora.rank = 0
    config.train.update(checkpoint_every_steps=10, checkpoint_frozen=True)
    config.attention.shared_prefixes = 2
    config.data.update(seq_len=131_072, overlong_traces="drop")
    config.rollouts.update(source="model", export_every_steps=0, prompts_per_step=16)
    config.rollouts.update(agent=f"{__file__}:agent", reward=f"{__file__}:reward", max_failed=0.1)
    config.rollouts.update(prompts=_HERE + "mini_sums.jsonl", max_tokens=8192)

    if variant == "mini":
        shrink_for_cpu(config, simulated_devices=2)
        config.mesh.context = 2
        config.model.update(vocab_size=24, num_layers=2, model_dim=64, ffn_dim=128)
        config.model.attention.update(num_heads=4, num_kv_heads=4, head_dim=16)
        config.data.update(chat_template="chatml")
        config.data.tokenizer = _HERE + "mini_sums_tokenizer.json"
        config.rollouts.update(prompts_per_step=8, max_tokens=2)
        config.optimizer.learning_rate = 1e-3
        config.train.update(steps=100, checkpoint_every_steps=20, eval_every_steps=0)
    return config


async def agent(client, record: dict):
    """Calls the calculator until the policy answers without a call."""
    trajectory, left = client.trajectory(), record["numbers"]
    messages = [dict(role="user", content=_sum_of(left))]
    for _ in record["numbers"]:
        turn = await trajectory.ask(messages, TOOLS)
        if "<tool_call>" not in turn.text or len(left) == 1:
            break
        left = [left[0] + left[1], *left[2:]]
        if len(messages) > 1:  # compaction: a summary replaces the history
            messages = [dict(role="user", content=_sum_of(left))]
        else:
            messages += [turn.message, dict(role="tool", content=_sum_of(left))]
    return trajectory


def _sum_of(numbers: list[int]) -> str:
    return " + ".join(map(str, numbers))


def reward(prompt: str, answer: str, record: dict, turns: list[str]) -> float:
    """0.3 for the calls that are needed, 0.3 for an answer without a call after them, 0.4 for the
    sum.
    """
    num_needed = len(record["numbers"]) - 1
    num_calls = sum("<tool_call>" in turn for turn in turns)
    score = 0.3 * min(num_calls, num_needed) / num_needed
    if num_calls == num_needed:
        score += 0.3 + 0.4 * (answer.split()[-1:] == [str(sum(record["numbers"]))])
    return score
