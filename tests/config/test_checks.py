import dataclasses
import math

import pytest
from ml_collections import ConfigDict

from jaxlc.cli.training import DataFlags
from jaxlc.config import MeshConfig, check_evaluation, check_num_devices, defaults, load
from jaxlc.config.checks.mesh_checks import mesh_overrides, working_mesh
from jaxlc.config.command_line import parse
from jaxlc.config.frozen import SECTIONS
from jaxlc.config.values import ranges_of
from jaxlc.core.errors import UserError
from tests.advice import changed, rejected

LLAMA3 = dict(rope_scaling="llama3", rope_scaling_factor=8.0, rope_scaling_original_tokens=8192)
YARN = dict(rope_scaling="yarn", rope_scaling_factor=4.0, rope_scaling_original_tokens=8192)
LONGROPE = dict(
    rope_scaling="longrope",
    rope_scaling_factor=4.0,
    rope_scaling_original_tokens=8192,
    rope_scaling_short_factors=(1.0,) * 16,
    rope_scaling_long_factors=(2.0,) * 16,
)
TILES = dict(tile_tokens=512)
NODES_OF_2 = dict(node_copy_devices=2)
REFERENCE = dict(loss="grpo", kl=0.1, reference="model", reference_model="x")
NUMBERS = [(section, name) for section, part in SECTIONS.items() for name in ranges_of(part)]


@pytest.mark.parametrize(("section", "name"), NUMBERS)
def test_check_negative_number_names_its_range(section, name):
    # -1 is from the launcher, or no limit
    value = -2 if name in ("process_id", "max_policy_age") else -1
    message = rejected(changed(section, **{name: value}))
    assert message.startswith(f"invalid value {value}")
    assert f"for config.{section}.{name}: expected" in message


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_check_beta_of_1_raises(name):
    assert "less than 1" in rejected(changed("optimizer", **{name: 1.0}))


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("model", dict(num_heads=4, num_kv_heads=3), ["num_heads=4", "num_kv_heads=3"]),
        ("model", dict(head_dim=31), ["head_dim=31", "use 32"]),
        (
            "model",
            dict(LLAMA3, rope_scaling_low_freq_factor=4.0),
            ["rope.low_freq_factor=4.0 must be less than rope.high_freq_factor=4.0"],
        ),
        (
            "model",
            dict(YARN, rope_scaling_beta_slow=40.0),
            ["rope.beta_slow=40.0 must be less than rope.beta_fast=32.0"],
        ),
        (
            "model",
            dict(YARN, rope_scaling_original_tokens=0),
            ["'yarn' needs --config.model.rope.original_tokens"],
        ),
        (
            "model",
            dict(rope_scaling="longrope"),
            ["'longrope' needs --config.model.rope.original_tokens"],
        ),
        (
            "model",
            dict(rope_scaling="linear"),
            ["'linear' needs a rope.factor greater than 1"],
        ),
        ("model", dict(vocab_size=2**31), ["value 2147483648", "expected less than 2^31"]),
        ("model", dict(num_layers=2**31), ["value 2147483648", "expected from 1 to 10000"]),
        ("model", dict(rope_scaling_factor=0.5), ["invalid value 0.5", "expected at least 1"]),
        (
            "model",
            dict(rope_scaling_factor=4.0),
            ["factor=4.0 has no effect", "rope.scaling=linear or ntk or"],
        ),
        (
            "model",
            dict(LLAMA3, rope_scaling_beta_fast=9.0),
            ["beta_fast=9.0 has no effect", "rope.scaling=yarn with"],
        ),
        (
            "model",
            dict(LONGROPE, rope_scaling_long_factors=(1.0, 2.0)),
            ["long_factors has 2 numbers", "needs 16", "head_dim x rope.fraction / 2"],
        ),
        ("model", dict(LONGROPE, rope_fraction=0.5), ["short_factors has 16 numbers", "needs 8"]),
        (
            "model",
            dict(LONGROPE, rope_scaling_short_factors=(0.0,) * 16),
            ["short_factors contains 0.0"],
        ),
        (
            "model",
            dict(YARN, rope_scaling_query_beta=0.1, layer_kinds=("sliding", "full"), window=4),
            ["rope.query_beta=0.1 scales the queries of sliding", "or set it to 0"],
        ),
        (
            "model",
            dict(YARN, layer_kinds=("nope",)),
            ["rope.scaling='yarn' has no effect", "names no full or latent layers"],
        ),
        (
            "model",
            dict(rope_fraction=0.3),
            ["rope.fraction=0.3 of head_dim=32 gives 9.6", "at least 2"],
        ),
        ("model", dict(rope_fraction=1.5), ["invalid value 1.5", "at most 1"]),
        ("optimizer", dict(schedule="wsd"), ["needs config.optimizer.decay_steps"]),
        (
            "optimizer",
            dict(schedule="constant", final_learning_rate_ratio=0.0),
            ["final_learning_rate_ratio=0.0 has no effect", "schedule='constant'"],
        ),
        (
            "data",
            dict(eval_chat_format="messages"),
            ["eval_chat_format='messages' has no effect without config.data.eval_sources"],
        ),
        (
            "data",
            dict(stream_cache_gib=3.0),
            ["stream_cache_gib=3.0 has no effect", "stream=True"],
        ),
        (
            "optimizer",
            dict(schedule="wsd", decay_steps=91),
            ["warmup_steps=10 and decay_steps=91", "train.steps=100", "101 steps or more"],
        ),
        (
            "optimizer",
            dict(decay_steps=5),
            ["decay_steps=5 has no effect", "schedule='cosine'", "schedule=wsd"],
        ),
        (
            "optimizer",
            dict(initial_learning_rate_ratio=0.1, warmup_steps=0),
            ["initial_learning_rate_ratio=0.1 has no effect without a warm-up"],
        ),
        ("data", dict(sources=()), ["config.data.sources is empty"]),
        ("data", dict(sources=("a", "")), ["an empty name"]),
        ("data", dict(eval_fraction=0.0), ["invalid value 0.0", "expected greater than 0"]),
        ("data", dict(eval_fraction=1.0), ["invalid value 1.0", "less than 1"]),
        (
            "data",
            dict(seq_len=4097),
            ["4097", "2 x mesh.context x mesh.tensor = 2", "use 4096 or 4098"],
        ),
        ("data", dict(seq_len=1), ["use 2"]),
        (
            "train",
            dict(gradient_accumulation_steps=2),
            ["config.train.global_batch_size=1", "= 2; use 2"],
        ),
        (
            "train",
            dict(gradient_accumulation_steps=2, global_batch_size=5),
            ["config.train.global_batch_size=5", "use 4 or 6"],
        ),
        (
            "runtime",
            dict(num_processes=1, process_id=1),
            ["process_id=1 is too large for num_processes=1"],
        ),
        (
            "runtime",
            dict(simulated_devices=5, num_processes=2),
            ["simulated_devices=5", "use 4 or 6"],
        ),
        ("runtime", dict(num_processes=2, coordinator_address="here"), ["'here'", "host:port"]),
        (
            "runtime",
            dict(num_processes=2, transport="peer"),
            ["'peer'", "num_processes=2", "=symmetric"],
        ),
        (
            "runtime",
            dict(unified_memory_fraction=2.0),
            ["unified_memory_fraction=2.0", "unified_memory=True"],
        ),
        (
            "runtime",
            dict(unified_memory_fraction=0.9),
            ["invalid value 0.9", "expected 0 or greater than 1"],
        ),
    ],
)
def test_check_contradiction_names_both_values(section, values, words):
    message = rejected(changed(section, **values))
    for word in words:
        assert word in message


FP8 = dict(compute="fp8")
DELTA_NET = dict(
    layer_kinds=("gated_delta_net", "full"), delta_key_heads=2, delta_value_heads=4, delta_key_dim=8
)
DELTA_NET |= dict(delta_value_dim=8, delta_conv_taps=4)
LATENT = dict(layer_kinds=("latent",), num_heads=4, num_kv_heads=4, head_dim=12)
LATENT |= dict(latent=dict(rank=8, value_dim=8), rope_fraction=1 / 3)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            dict(memory=TILES, attention=dict(strategy="all_gather")),
            "incompatible with config.attention.strategy=",
        ),
        (dict(memory=TILES | dict(remat="none")), "incompatible with config.memory.remat='none'"),
        (dict(memory=TILES | dict(save=("mlp_up",))), "computes 'mlp_up' for one tile at a time"),
        (dict(memory=dict(tile_tokens=1000)), "does not divide the 4096 tokens of a device"),
        (
            dict(memory=TILES, attention=dict(strategy="ulysses"), mesh=dict(context=4)),
            "over 4 Ulysses ranks",
        ),
        (dict(memory=dict(save=("query",), offload=("query",))), "both name 'query'"),
        (
            dict(memory=NODES_OF_2, mesh=dict(context=2)),
            "has no effect, since the mesh is one node",
        ),
        (
            dict(memory=dict(node_copy_devices=3), mesh=dict(context=4)),
            "is not a node of the mesh data=1 x fsdp=1 x",
        ),
        (
            dict(memory=NODES_OF_2, mesh=dict(context=4, tensor=4)),
            "it must be mesh.tensor times a divisor of",
        ),
        (
            dict(memory=dict(NODES_OF_2, parameters="host"), mesh=dict(context=4)),
            "copied to the device layer by",
        ),
        (
            dict(memory=NODES_OF_2, mesh=dict(context=4), precision=FP8),
            "whose products are scaled over all ranks",
        ),
        (dict(train=dict(keep_every_steps=5)), "use --config.train.checkpoint_every_steps=5"),
        (dict(train=dict(local_checkpoints="/dev/shm/jaxlc")), "set both or none"),
        (dict(train=dict(local_checkpoint_every_steps=2)), "set both or none"),
        (
            dict(train=dict(keep_best_checkpoints=1, checkpoint_every_steps=4)),
            "use --config.train.eval_every_steps=4",
        ),
        (dict(memory=dict(remat="none", save=("query",))), "remat='none' saves all activations"),
        (
            dict(memory=dict(remat="none", parameters="host", optimizer="host")),
            "would keep the copied weights",
        ),
        (
            dict(memory=dict(remat="matmuls", offload=("residual",))),
            "remat='matmuls' with memory.offload",
        ),
        (dict(precision=dict(fp8_scaling="delayed")), "is for compute='fp8'"),
        (dict(precision=FP8 | dict(fp8_amax_history_len=8)), "is for delayed scaling"),
        (dict(precision=FP8 | dict(reduce="fp32")), "return gradients in bf16"),
        (dict(precision=FP8 | dict(fp8_matmuls=())), "with no fp8_matmuls is bf16"),
        (dict(precision=FP8 | dict(bf16_layers=(0, 0))), "names a layer twice"),
        (dict(precision=FP8 | dict(bf16_layers=(0, 1, 2, 3))), "are all layers"),
        (
            dict(precision=FP8 | dict(fp8_scaling="delayed"), memory=TILES),
            "computes it tile by tile",
        ),
        (dict(lora=dict(alpha=3.0)), "has no effect without --config.lora.rank=RANK"),
        (dict(train=dict(checkpoint_frozen=False)), "since no parameter is frozen"),
        (dict(precision=dict(frozen="fp32")), "since no parameter is frozen"),
        (dict(attention=dict(ulysses_degree=2)), "is for strategy 'hybrid'"),
        (
            dict(model=dict(layer_kinds=("gated_delta_net",))),
            "--config.model.delta_net.key_heads=16",
        ),
        (
            dict(attention=dict(ring_payload="keys_values")),
            "the model has no latent layers; remove",
        ),
        (dict(model=dict(kda=dict(head_dim=128))), "the model has no kimi_delta layers; remove"),
        (dict(model=dict(rope=dict(query_mscale=1.0))), "query_mscale=1.0 has no effect"),
        (dict(model=LATENT | dict(num_kv_heads=1)), "num_kv_heads=1 differs from num_heads=4"),
        (dict(model=LATENT | dict(qk_norm="head")), "qk_norm='head' with latent layers"),
        (
            dict(model=LATENT | dict(attention=dict(interleaved=True))),
            "attention.interleaved=True with latent layers",
        ),
        (
            dict(model=LATENT | dict(latent=LATENT["latent"] | dict(value_dim=16))),
            "value_dim=16 is more than config.model.attention.head_dim=12",
        ),
        (
            dict(model=LATENT | dict(latent=LATENT["latent"] | dict(query_rank=-1))),
            "invalid value -1 for config.model.latent.query_rank",
        ),
        (
            dict(model=LATENT, memory=dict(save=("key",)), mesh=dict(context=2)),
            "do not compute where a ring sends latents; name 'latent'",
        ),
        (dict(model=DELTA_NET | dict(delta_value_heads=3)), "is not a multiple of key_heads=2"),
        (dict(model=DELTA_NET | dict(delta_conv_taps=4000)), "the parts of a sequence have 2048"),
        (
            dict(model=DELTA_NET | dict(kinds=dict(gated_delta_net=dict(num_heads=2)))),
            "has no effect in gated_delta_net",
        ),
        (
            dict(model=DELTA_NET, mesh=dict(tensor=8)),
            "delta_net.key_heads=2 is not divisible by config.mesh.tensor=8",
        ),
        (
            dict(model=DELTA_NET | dict(delta_conv_taps=300), memory=TILES),
            "is shorter than 598, which the convo",
        ),
        (
            dict(model=DELTA_NET, memory=dict(parameters="host")),
            "memory.parameters='host' with gated_delta_net",
        ),
        (
            dict(posttrain=dict(loss="grpo", kl=0.1, reference="model")),
            "set config.posttrain.reference_model or",
        ),
        (
            dict(posttrain=dict(loss="grpo", reference="model", reference_model="x")),
            "reference_model='x' has no effect",
        ),
        (
            dict(model=DELTA_NET, posttrain=REFERENCE),
            "reference='model' with gated_delta_net layers",
        ),
        (dict(profile=dict(tool="nsys")), "tool='nsys' has no effect without config.profile.steps"),
    ],
)
def test_check_contradiction_between_sections_raises(sections, words):
    config = defaults().to_dict()
    for section, values in sections.items():
        config[section].update(values)
    assert words in rejected(ConfigDict(config))


def test_check_wsd_schedule_of_exact_length_passes():
    load(changed("optimizer", schedule="wsd", decay_steps=90))


@pytest.mark.parametrize(
    ("model", "tensor", "words"),
    [
        (dict(), 8, ["num_heads=4", "tensor=8", "--config.mesh.tensor=4"]),
        (
            dict(num_heads=6, num_kv_heads=2),
            3,
            ["num_kv_heads=2", "tensor=3", "--config.mesh.context=3"],
        ),
        (dict(ffn_dim=385), 2, ["ffn_dim=385", "tensor=2", "--config.mesh.tensor=1"]),
    ],
)
def test_check_indivisible_tensor_suggests_a_mesh_that_works(model, tensor, words):
    config = changed("model", **model)
    config.mesh.tensor = tensor
    config.data.seq_len = 4608
    message = rejected(config)
    for word in words:
        assert word in message
    for override in message.split("use ")[1].split():
        axis, size = override.removeprefix("--config.mesh.").split("=")
        config.mesh[axis] = int(size)
    assert load(config).mesh.num_devices == tensor


def test_check_tensor_above_num_kv_heads_passes():
    config = changed("model", num_heads=8, num_kv_heads=2)
    config.mesh.tensor = 8
    load(config)


def test_check_evaluation_with_indivisible_sequences_raises():
    """Not an error of `load`: a plan has no evaluation."""
    config = changed("mesh", data=2, fsdp=3)
    config.train.global_batch_size = 6
    message = "config.train.eval_sequences=4 is not divisible by mesh.data x mesh.fsdp = 6; use 6"
    with pytest.raises(UserError, match=message):
        check_evaluation(load(config))
    config.train.eval_sequences = 6
    check_evaluation(load(config))


def test_check_mesh_of_other_size_than_simulated_devices_raises():
    config = changed("mesh", context=3, tensor=2)
    config.runtime.simulated_devices = 8
    message = rejected(config)
    assert (
        "context=3 x tensor=2 needs 6 devices but config.runtime.simulated_devices is 8" in message
    )
    assert message.endswith("use --config.mesh.context=4")  # 6 devices would not split 4,096 tokens
    config.mesh.context = 1
    assert (
        "use --config.mesh.context=4, or --config.runtime.simulated_devices=2, on CPU"
        in rejected(config)
    )
    config.mesh.context = 4
    load(config)


def test_check_num_devices_gives_only_advice_that_works():
    config = changed("data", seq_len=4)
    config.runtime.simulated_devices = 8
    assert "--config.mesh" not in rejected(config)
    config.runtime.simulated_devices = 0
    with pytest.raises(
        ValueError, match="available devices is 8; use --config.runtime.simulated_devices=1, on CPU"
    ):
        check_num_devices(load(config), 8, "the number of available devices is")


@pytest.mark.parametrize("num_devices", [1, 2, 3, 6, 8, 64])
def test_working_mesh_loads(num_devices):
    config = load(changed("data", seq_len=4096 * 3))
    mesh = working_mesh(config, num_devices)
    assert math.prod(dataclasses.astuple(mesh)) == num_devices
    load(dataclasses.replace(config, mesh=mesh))


def test_mesh_overrides_name_the_axes_that_differ():
    assert (
        mesh_overrides(MeshConfig(context=4, tensor=2), MeshConfig(context=2, tensor=2))
        == "--config.mesh.context=2"
    )


def test_check_lists_all_problems_in_one_error():
    config = changed("train", steps=0, log_every_steps=0)
    config.mesh.context = 0
    with pytest.raises(
        UserError, match=r"mesh\.context.*; also: .*train\.steps.*; also: .*log_every_steps"
    ) as caught:
        load(config)
    assert str(caught.value).count("; also: ") == 2
    config = changed("posttrain", loss="dpo", reference="base")
    config.optimizer.update(schedule="wsd")
    config.train.update(z_loss=1e-4, global_batch_size=3, gradient_accumulation_steps=2)
    with pytest.raises(UserError) as caught:
        load(config)
    for name in (
        "attention.shared_prefixes=1",
        "lora.rank",
        "optimizer.decay_steps",
        "train.z_loss=0",
        "=3 is not",
    ):
        assert name in str(caught.value)
    assert str(caught.value).count("; also: ") == 4 and "\n" not in str(caught.value)


def test_check_without_devices_accepts_a_mesh_that_does_not_divide_the_model():
    config = changed("mesh", tensor=3, context=5)
    config.runtime.simulated_devices = 8
    assert "needs 15 devices" in rejected(config)
    assert load(config, on_devices=False).mesh.tensor == 3
    assert (
        parse(
            ["data", "report", "--config=quickstart", "--config.mesh.tensor=3"], flags=DataFlags
        ).config.mesh.tensor
        == 3
    )


def test_activations_of_a_shared_expert_can_be_saved():
    config = defaults()
    config.model.update(num_experts=4, experts_per_token=2, expert_ffn_dim=16, shared_ffn_dim=16)
    config.memory.update(remat="full", save=("mlp_gate",))
    assert load(config).memory.save == ("mlp_gate",)
    config.model.shared_ffn_dim = 0
    with pytest.raises(UserError, match="names mlp_gate"):
        load(config)
