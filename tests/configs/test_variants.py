"""Every variant of the shipped configs: their devices and sizes; the mini variants are trained."""

import dataclasses
import re

import jax
import pytest

from jaxlc import plan
from jaxlc.config import check_num_devices, load, read_config
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.tokenizers import tokenizer_of
from jaxlc.train import loop
from tests.train import runs

NAMES = ("64k", "128k", "256k", "1m")
TOKENS = {"64k": 65_536, "128k": 131_072, "256k": 262_144, "1m": 1_048_576}
VARIANTS = ("", "h100", "70b", "mini")
RECORDS = {"1m_1gpu": 1_048_576, "8m_8gpu": 8_388_608, "32m_32gpu": 33_554_432}  # variants: mini


def get_config(name: str, variant: str = ""):
    return read_config(f"{name}:{variant}")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_variant_mesh_matches_its_topology(name, variant):
    config = load(get_config(name, variant))
    # a transport by name is an error where it is unsupported
    assert config.runtime.transport == "auto"
    if variant == "mini":
        assert config.mesh.num_devices == config.runtime.simulated_devices == 8
    else:
        gpus, domains, size = re.fullmatch(r"(\w+):(\d+)x(\d+)", config.runtime.topology).groups()
        assert gpus == ("h100" if variant == "h100" else "gb200")
        assert config.mesh.num_devices == int(domains) * int(size)
        assert config.data.seq_len == TOKENS[name]
        assert config.data.seq_len * config.train.global_batch_size == 2**22
        assert config.model.preset == ("llama3.1-70b" if variant == "70b" else "llama3.1-8b")


@pytest.mark.heavy
@pytest.mark.jax_version
@pytest.mark.gpu_compiler
@pytest.mark.skipif(
    jax.__version__ == "0.10.1", reason="tests/plan/test_configs.py plans every config"
)
def test_plan_of_readme_on_newer_jax_uses_nccl():
    """`jaxlc plan --config=256k:h100 --topology=h100:8x8`; with the NVSHMEM heap of variant "",
    which has no effect.
    """
    config = get_config("256k", "h100")
    config.runtime.nvshmem_heap_bytes = get_config("256k").runtime.nvshmem_heap_bytes
    result = plan.plan(config, "h100:8x8")
    assert (
        result.memory.fits
        and result.memory.nvshmem_heap_bytes == 0 < config.runtime.nvshmem_heap_bytes
    )
    assert result.transport_choice.startswith("nccl (auto; not nvshmem: the XLA of JAX ")
    assert set(result.ring.by_backend) == {"NCCL"}


@pytest.mark.parametrize("name", RECORDS)
def test_longest_context_mini_keeps_memory_and_attention(name):
    config, mini = load(get_config(name)), load(get_config(name, "mini"))
    domains, size = re.fullmatch(r"h100:(\d+)x(\d+)", config.runtime.topology).groups()
    assert (
        config.mesh.num_devices
        == int(domains) * int(size)
        == int(name.partition("_")[2].removesuffix("gpu"))
    )
    assert config.data.seq_len == RECORDS[name]
    assert mini.mesh.num_devices == mini.runtime.simulated_devices
    assert dataclasses.replace(mini.memory, tile_tokens=config.memory.tile_tokens) == config.memory
    assert (mini.attention.strategy, mini.attention.ulysses_degree > 1) == (
        config.attention.strategy, config.attention.ulysses_degree > 1
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="unknown variant 'h100': expected one of (fast, lora, )?mini"
    ):
        get_config(name, "h100")


@pytest.mark.parametrize("name", NAMES)
def test_mini_variant_keeps_axes_and_features(name):
    """Only sizes differ."""
    config, mini = load(get_config(name)), load(get_config(name, "mini"))
    axes = ("data", "fsdp", "context", "tensor")
    assert [getattr(config.mesh, axis) > 1 for axis in axes] == [
        getattr(mini.mesh, axis) > 1 for axis in axes
    ]
    assert (config.train.gradient_accumulation_steps > 1) == (
        mini.train.gradient_accumulation_steps > 1
    )
    for section in ("attention", "memory", "precision"):
        assert getattr(config, section) == getattr(mini, section)


@pytest.mark.heavy
def test_mini_variant_on_one_device_trains(tmp_path):
    """In a process of its own with a single device."""
    corpus = runs.write_config(tmp_path).with_name("corpus")
    data = dict(data__sources=corpus, data__cache_dir=tmp_path / "cache", data__eval_fraction=0.3)
    steps = dict(train__steps=2, train__eval_every_steps=0)
    output = runs.train_elsewhere("1m_1gpu:mini", tmp_path / "run", **data, **steps)
    assert "parameters and optimizer" in output and "held-out" in output


@pytest.mark.parametrize("name", NAMES)
def test_unknown_variant_lists_or_suggests(name):
    with pytest.raises(ValueError, match="unknown variant 'b200': .* h100"):
        get_config(name, "b200")


def test_check_num_devices_names_commands_that_work():
    with pytest.raises(UserError) as error:
        check_num_devices(
            load(get_config("256k", "h100")),
            1,
            "the number of available devices is",
            "configs/256k.py:h100",
        )
    for words in [
        "fsdp=8 x context=8 x tensor=1 needs 64 devices but the number of available devices is 1",
        "made for h100:8x8",
        "`jaxlc plan --config=configs/256k.py:h100 --topology=h100:8x8`",
        "`jaxlc train --config=configs/256k.py:mini`",
    ]:
        assert words in str(error.value)


# a config may ignore its variant
@pytest.mark.parametrize("check", ["check_variant(variant, ())", "0"])
def test_check_num_devices_of_a_config_without_a_small_variant_does_not_name_one(tmp_path, check):
    path = tmp_path / "recommended.py"
    path.write_text(
        "from jaxlc.config import check_variant, defaults\n"
        "def get_config(variant):\n"
        f"    {check}\n"
        "    config = defaults()\n"
        "    config.runtime.topology, config.mesh.context = 'h100:1x8', 8\n"
        "    return config\n"
    )
    with pytest.raises(UserError, match=r"`jaxlc plan --config=\S+ --topology=h100:1x8`$"):
        check_num_devices(
            load(read_config(str(path))), 1, "the number of available devices is", str(path)
        )


def test_train_on_other_devices_names_commands_that_work(tmp_path):
    output = runs.train_elsewhere("64k", tmp_path, status=2)
    assert "needs 8 devices but the number of available devices is 1" in output
    assert "`jaxlc train --config=64k:mini`" in output


_IN_EVERY_RUN = ("256k",)


@pytest.mark.parametrize("name", [
    *_IN_EVERY_RUN,
    *(pytest.param(x, marks=pytest.mark.full) for x in ("64k", "128k", "1m", "8m_8gpu", "32m_32gpu")),
])  # fmt: skip
def test_mini_variant_trains(name, tmp_path):
    """Two steps, on the simulated devices of this process."""
    corpus = runs.write_config(tmp_path).with_name("corpus")
    config = get_config(name, "mini")
    config.data.update(sources=(str(corpus),), cache_dir=str(tmp_path / "cache"), eval_fraction=0.3)
    config.train.update(steps=2, eval_every_steps=0)
    result = loop.run(config, tmp_path / "run")
    assert result.step == 2 and result.evaluation.loss > 0


def test_quickstart_code_has_a_tokenizer_of_its_vocabulary_and_prints_samples():
    config = load(read_config("quickstart:code"))
    tokenizer = tokenizer_of(config.data)
    assert tokenizer.vocab_size <= config.model.vocab_size == 4096
    text = "class Reader:\n    def __init__(self, name):\n        self.name = name\n"
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text and 3 * len(ids) < len(text)
    assert config.train.steps % config.train.sample_every_steps == 0 and config.train.sample_prompts
