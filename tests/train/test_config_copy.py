import importlib.metadata

import pytest

import jaxlc
from jaxlc.config import load_stages, read_config
from jaxlc.train.reports.manifest import keep_config, keep_plan, make_manifest, read_manifest


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


def test_manifest_keeps_the_identifier_of_the_run(tmp_path):
    config = read_config("quickstart")
    keep_config(tmp_path, load_stages(config))
    before, config.train.steps = read_manifest(tmp_path), 300
    keep_config(tmp_path, load_stages(config))
    after = read_manifest(tmp_path)
    assert (
        after["run_id"] == before["run_id"]
        and after["packages"]["jax"] == before["packages"]["jax"]
    )
    assert len(after["commit"].rstrip("+")) in (0, 40) and after["num_processes"] == 1


def test_manifest_of_a_source_tree_that_is_not_installed(monkeypatch):
    def version_of_installed(name: str) -> str:
        if name == "jaxlc":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version_of_installed)
    assert make_manifest({})["packages"]["jaxlc"] == jaxlc.__version__


@pytest.mark.parametrize("text", ["", "garbage", "MANIFEST = {"])
def test_manifest_that_cannot_be_read_is_empty(tmp_path, text):
    (tmp_path / "resolved_config.py").write_text(text)
    assert read_manifest(tmp_path) == {}
