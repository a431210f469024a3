import pytest

from jaxlc.config import defaults, load, read_config, shipped_configs, shrink_for_cpu
from jaxlc.core.errors import UserError


def test_shipped_configs_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"quickstart", "256k", "1m_1gpu"} <= shipped_configs().keys()
    assert load(read_config("256k:h100")).runtime.topology == "h100:8x8"


def test_read_config_of_path_takes_the_file(tmp_path):
    path = tmp_path / "quickstart.py"  # the name of a shipped config
    path.write_text(
        "from jaxlc.config import defaults\n\ndef get_config(variant):\n    return defaults()\n"
    )
    assert load(read_config(str(path))) == load(defaults())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("256k:h10", "256k: unknown variant 'h10': did you mean h100?"),
        ("quickstrat", "did you mean quickstart"),
        ("nothing/like/it.py", "not found: give the path"),
    ],
)
def test_read_config_of_unknown_name_or_variant_raises(name, message):
    with pytest.raises(UserError) as error:
        read_config(name)
    assert message in str(error.value)


def test_shrink_for_cpu_keeps_strategy_and_memory():
    config = read_config("32m_32gpu")
    full = load(config)
    shrink_for_cpu(config, simulated_devices=32)
    config.memory.tile_tokens = 8
    config.attention.ulysses_degree = 2
    small = load(config)
    assert (small.attention.strategy, small.attention.document_mask) == (
        "hybrid",
        full.attention.document_mask,
    )
    assert (small.memory.remat, small.memory.offload) == (full.memory.remat, full.memory.offload)
    assert (small.model.preset, small.runtime.simulated_devices, small.data.seq_len) == (
        "tiny",
        32,
        1024,
    )
