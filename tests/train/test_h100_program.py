"""The real program: Llama 3 8B at 262,144 tokens, compiled for 64 H100s that are not here."""

import importlib.util

import pytest

from jaxlc.config import defaults, load
from tests.train.h100 import compile_step, ring_hops

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins") is None, reason="make test-heavy installs what it needs"
    ),
]


@pytest.fixture(scope="module")
def program():
    config = defaults()
    config.model.preset = "llama3-8b"
    config.mesh.update(context=8, tensor=8)
    config.attention.update(query_block_tokens=1024, key_block_tokens=1024)
    config.data.sequence_tokens = 262_144
    return compile_step(load(config), num_nodes=8, gpus_per_node=8)


def test_it_fits_with_room_to_spare(program):
    """1.4 GiB of state, and 5.3 of temporaries where nothing of size tokens x tokens or tokens x vocabulary is kept."""
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes < 1.5 * 2**30
    assert memory.temp_size_in_bytes < 6 * 2**30


def test_every_hop_but_the_last_one_home_hides_behind_attention(program):
    hops = ring_hops(program.as_text())
    assert any(not hop.is_backward for hop in hops)
    exposed = [hop for hop in hops if hop.num_loops_meanwhile == 0]
    assert len(exposed) == 1 and exposed[0].is_backward, hops
