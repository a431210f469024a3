"""Runs on a stream: killed, resumed, and by another number of processes."""

import json
import random
import re
from pathlib import Path

import pytest

from jaxlc.checkpoints.files import read_meta
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config with a stream of three files in more than ten chunks, each of a few sequences."""
    directory = tmp_path_factory.mktemp("stream")
    path = runs.write_config(directory)
    rng = random.Random(0)
    (directory / "files").mkdir()
    for name in "abc":
        texts = [f"{name} {i} " + "word " * rng.randint(1, 40) for i in range(30)]
        content = "".join(json.dumps(dict(text=text)) + "\n" for text in texts)
        (directory / f"files/{name}.jsonl").write_text(content)
    stream = f"""
    config.data.update(sources={str(directory / "files")!r}, stream=True, stream_cache_gib=2e-5)
    config.mesh.update(fsdp=8, context=1, tensor=1)
    config.model.num_layers, config.train.global_batch_size, config.train.eval_sequences = 1, 8, 0
    return config
"""
    path.write_text(path.read_text().replace("    return config\n", stream.lstrip("\n")))
    return path


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    output = runs.train(config, workdir)
    assert re.search(r"data       stream of 3 files, 0.00 GiB, in \d\d chunks", output)
    assert "warning: the chunks of config.data.stream_cache_gib=2e-05 have few sequences" in output
    return workdir


def test_run_killed_between_checkpoints_resumes_bitwise(config, uninterrupted, tmp_path):
    run = runs.start(runs.write_slow_config(config), tmp_path)
    runs.wait_until(lambda: (tmp_path / "checkpoints" / "8").exists(), run)
    run.kill()
    run.communicate()
    output = runs.train(config, tmp_path)
    assert re.search(r"resuming from step (8|12) ", output), output
    assert "different sequences" not in output
    assert runs.rows(tmp_path) == runs.rows(uninterrupted)
    meta = read_meta(tmp_path / "checkpoints", 12)["stream"]
    assert meta == read_meta(uninterrupted / "checkpoints", 12)["stream"]
    assert len(meta["counts"]) == 10  # chunks
