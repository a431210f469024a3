import importlib.metadata
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

import jaxlc
from jaxlc.config import load_stages, read_config
from jaxlc.train.reports import manifest
from jaxlc.train.reports.manifest import (
    differing_kernel,
    keep_config,
    keep_plan,
    make_manifest,
    read_manifest,
)
from tests.step.synthetic import small_config, small_step


def test_different_settings_of_an_earlier_start_are_kept(tmp_path):
    config = read_config("quickstart")
    path = tmp_path / "resolved_config.py"
    assert keep_config(tmp_path, load_stages(config)) is None
    first = path.read_text()
    assert keep_config(tmp_path, load_stages(config)) is None and list(tmp_path.iterdir()) == [path]
    for number, steps in enumerate((300, 400), start=1):
        config.train.steps = steps
        line = keep_config(tmp_path, load_stages(config))
        expected = f"train.steps; the earlier ones are in resolved_config-{number}.py"
        assert line == f"settings changed since the last start: {expected}"
    assert (tmp_path / "resolved_config-1.py").read_text() == first
    assert read_config(str(tmp_path / "resolved_config-2.py")).train.steps == 300
    assert read_config(str(path)).train.steps == 400
    path.write_text(path.read_text().replace('"train.steps": 400', '"train.steps": 4e2'))
    assert keep_config(tmp_path, load_stages(config)) is None and len(list(tmp_path.iterdir())) == 3
    keep_plan(tmp_path, "", dict(seq_len=1024))
    keep_plan(tmp_path, "long", dict(seq_len=2048))
    assert read_manifest(tmp_path)["plan"] == {"": dict(seq_len=1024), "long": dict(seq_len=2048)}
    assert read_config(str(path)).train.steps == 400  # the settings are as before
    path.write_text("damaged(")
    assert "resolved_config-3.py" in keep_config(tmp_path, load_stages(config))


def test_run_reports_a_kernel_that_differs_from_the_plan_in_its_workdir(tmp_path):
    step, path = small_step(small_config()), tmp_path / "plan.json"
    assert step.kernel_names == "blockwise"
    assert differing_kernel(tmp_path, "", step) is None  # no plan
    path.write_text(json.dumps(dict(kernel_names="blockwise")))
    assert differing_kernel(tmp_path, "", step) is None
    path.write_text(json.dumps(dict(kernel_names="fa3")))
    line = differing_kernel(tmp_path, "", step)
    assert f"{path} is a plan with attention kernel fa3, and this run has blockwise (" in line
    plans = [dict(name=name, plan=dict(kernel_names=name)) for name in ("fa3", "blockwise")]
    path.write_text(json.dumps(dict(stages=plans)))
    lines = [differing_kernel(tmp_path, plan["name"], step) for plan in plans]
    assert "attention kernel fa3" in lines[0] and lines[1] is None
    for text in ("{", "[]", "1", "{}", '{"stages": []}'):
        path.write_text(text)
        assert f"plan again with --json={path}" in differing_kernel(tmp_path, "", step)


def test_manifest_keeps_the_identifier_of_the_run(tmp_path, monkeypatch):
    config = read_config("quickstart")
    keep_config(tmp_path, load_stages(config))
    before, config.train.steps = read_manifest(tmp_path), 300
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(manifest, "_write", Mock(side_effect=KeyboardInterrupt))
        keep_config(tmp_path, load_stages(config))
    keep_config(tmp_path, load_stages(config))
    after = read_manifest(tmp_path)
    assert (
        after["run_id"] == before["run_id"]
        and after["packages"]["jax"] == before["packages"]["jax"]
    )
    assert len(after["commit"].rstrip("+")) in (0, 40) and after["num_processes"] == 1


def test_copy_of_a_workdir_is_another_run_and_a_moved_one_is_not(tmp_path):
    """Local checkpoints and the run of Weights & Biases have the name of the identifier."""
    stages = load_stages(read_config("quickstart"))
    workdir, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    workdir.mkdir()
    keep_config(workdir, stages)
    shutil.copytree(workdir, copy)
    first = read_manifest(workdir)["run_id"]
    keep_config(copy, stages)
    keep_config(workdir, stages)
    keep_config(workdir.rename(moved), stages)
    assert read_manifest(moved)["run_id"] == first != read_manifest(copy)["run_id"]


def test_manifest_of_a_source_tree_that_is_not_installed(monkeypatch):
    def version_of_installed(name: str) -> str:
        if name == "jaxlc":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version_of_installed)
    assert make_manifest({}, Path())["packages"]["jaxlc"] == jaxlc.__version__


@pytest.mark.parametrize("text", ["", "garbage", "MANIFEST = {"])
def test_manifest_that_cannot_be_read_is_empty(tmp_path, text):
    (tmp_path / "resolved_config.py").write_text(text)
    assert read_manifest(tmp_path) == {}
