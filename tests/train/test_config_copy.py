from jaxlc.config import load_stages, read_config
from jaxlc.train.reports.config_copy import keep_config, keep_plan, read_manifest


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
