"""`config.loading`: parsing, overrides, and the configs and schedules that stages resolve to."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from jaxlc.config import defaults, load, load_stages, read_config
from jaxlc.config.command_line import StageFlags, parse
from jaxlc.core.errors import UserError
from jaxlc.step.update import learning_rate_schedule
from tests.advice import flags, followed

_SOURCE = """
from jaxlc.config import defaults

def get_config(variant):
    config = defaults()
    config.stages = [dict(name="a", steps=4), dict(name="b", tokens=10_000, data=dict(seq_len=8192))]
    return config
"""


def staged(*stages: dict):
    config = defaults()
    config.data.seq_len = 128
    config.stages = stages
    return config


def test_config_without_stages_is_one_stage():
    (stage,) = load_stages(defaults())
    assert (stage.name, stage.config, stage.first_step, stage.num_steps) == (
        "",
        load(defaults()),
        0,
        100,
    )


def test_stages_resolve_to_complete_configs():
    first, second, third = load_stages(
        staged(
            dict(
                name="a",
                steps=5,
                max_eval_loss=3,
                data=dict(seq_len=64),
                model=dict(rope_theta="8e6"),
            ),
            dict(name="b", tokens=1100, optimizer_state="reset", train=dict(global_batch_size=4)),
            dict(name="c", steps=2, data=dict(seed=7), attention=dict(document_mask=False)),
        )
    )
    assert [(stage.first_step, stage.num_steps) for stage in (first, second, third)] == [
        (0, 5),
        (5, 3),
        (8, 2),
    ]
    assert [stage.config.train.steps for stage in (first, second, third)] == [5, 8, 10]
    assert (first.config.data.seq_len, first.config.model.rope.theta, first.max_eval_loss) == (
        64,
        8e6,
        3.0,
    )
    assert second.config.data.seq_len == 128 and second.num_tokens == 3 * 4 * 128
    assert second.config.model == load(defaults()).model and second.optimizer_state == "reset"
    assert [stage.config.data.seed for stage in (first, second, third)] == [0, 1, 7]
    # Schedules count from the last reset of the optimizer state.
    assert [stage.config.optimizer.schedule_start for stage in (first, second, third)] == [0, 0, 3]
    assert not third.config.attention.document_mask and first.config.attention.document_mask
    without = dataclasses.replace(first.config, optimizer=load(defaults()).optimizer)
    assert load(without) == without


def test_rope_scaling_of_stage_replaces_that_of_the_preset():
    config = staged(
        dict(name="a", steps=1, model=dict(rope_scaling="yarn", rope_scaling_factor=4.0))
    )
    config.model.preset = "llama3.1-8b"
    (stage,) = load_stages(config)
    assert (stage.config.model.rope.scaling, stage.config.model.rope.factor) == (
        "yarn",
        4.0,
    )
    assert stage.config.model.rope.original_tokens == 8192


def _rates(stage) -> np.ndarray:
    """Learning rates of the steps of a stage, if no optimizer state was reset."""
    schedule = learning_rate_schedule(stage.config.optimizer, stage.config.train.steps)
    return np.array([schedule(step) for step in range(stage.first_step, stage.end_step)])


def test_schedule_of_each_stage_starts_new_or_continues():
    """A continued schedule is that of one stage with the steps of both; a new one that of a run of
    its own.
    """
    optimizer = dict(learning_rate=1.0, warmup_steps=3)
    new = dict(
        learning_rate=0.5, warmup_steps=2, initial_learning_rate_ratio=0.5, schedule="linear"
    )
    config = staged(
        dict(name="a", steps=6),
        dict(name="b", steps=4, schedule="continue", data=dict(seq_len=256)),
        dict(name="c", steps=5, optimizer=new),
    )
    config.optimizer.update(optimizer)
    a, b, c = load_stages(config)
    single = defaults()
    single.optimizer.update(optimizer)
    single.train.steps = 10
    (whole,) = load_stages(single)
    np.testing.assert_array_equal(np.concatenate([_rates(a), _rates(b)]), _rates(whole))
    np.testing.assert_allclose(_rates(c), [0.375, 0.5, 0.5, 0.35, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
    "stages, message",
    [
        ([dict(steps=1)], "invalid stage 0 of config.stages: expected a dictionary with a name"),
        (
            [dict(name="a b", steps=1)],
            "invalid name 'a b' of a stage in config.stages: use letters",
        ),
        ([dict(name="a", steps=1), dict(name="a", steps=1)], "two stages of the same name: a, a"),
        (
            [dict(name="a", step=1)],
            "unknown setting config.stages.a.step: did you mean config.stages.a.steps?",
        ),
        (
            [dict(name="a", xyz=1)],
            "unknown setting config.stages.a.xyz: expected one of config.stages.a.attention",
        ),
        ([dict(name="a")], "config.stages.a has neither steps nor tokens: set one of them"),
        ([dict(name="a", steps=1, tokens=5)], "config.stages.a has both steps and tokens"),
        (
            [dict(name="a", steps=-1)],
            "invalid value -1 for config.stages.a.steps: expected at least 0",
        ),
        (
            [dict(name="a", steps=1, data=dict(seqlen=3))],
            "did you mean config.stages.a.data.seq_len?",
        ),
        (
            [dict(name="a", steps=1, data=dict(seq_len="x"))],
            "for config.stages.a.data.seq_len: expected tokens",
        ),
        ([dict(name="a", steps=1, train=dict(steps=3))], "set config.stages.a.steps"),
        (
            [dict(name="a", steps=1, model=dict(num_layers=3))],
            "stages change only RoPE settings of the model",
        ),
        (
            [dict(name="a", steps=1, runtime=dict(transport="nccl"))],
            "all stages share it, so set config.runtime",
        ),
        (
            [dict(name="a", steps=1, data=dict(seq_len=63))],
            "stage a: config.stages.a.data.seq_len=63 is not divisible",
        ),
        ([dict(name="a", steps=1, optimizer_state="reset")], "expected 'carry' in stage one"),
        ([dict(name="a", steps=1, max_eval_loss=2.0)], "has no effect: no stage follows"),
        (
            [
                dict(name="a", steps=1),
                dict(name="b", steps=1, schedule="continue", optimizer_state="reset"),
            ],
            "moments of zero need a warm-up; use --config.stages.b.schedule=new",
        ),
        (
            [dict(name="a", steps=1), dict(name="b", steps=1, mesh=dict(context=2))],
            "stage b has a mesh of 2 devices and stage a one of 1",
        ),
        (
            [
                dict(name="a", steps=1),
                dict(name="b", steps=1, schedule="continue", optimizer=dict(warmup_steps=1)),
            ],
            "config.stages.b.optimizer.warmup_steps has no effect with its schedule='continue'",
        ),
    ],
)
def test_invalid_stages_raise(stages, message):
    def read(settings):
        config = staged(*stages)
        config.update_from_flattened_dict(settings)
        load_stages(config)

    assert message in followed(read)


@pytest.mark.parametrize("steps, accepted", [("10:13", True), ("11:13", False)])
def test_profile_steps_after_the_run_raise(steps, accepted):
    for config in (staged(dict(name="a", steps=4), dict(name="b", steps=6)), staged()):
        config.train.steps = 10
        config.profile.steps = steps
        if accepted:
            load_stages(config)
        else:
            with pytest.raises(
                UserError, match="has no effect: the last step of the run is 10; use .*=10:11, or"
            ):
                load_stages(config)


def test_load_of_config_with_stages_names_them():
    with pytest.raises(UserError, match="has the stages a, b: use jaxlc.config.load_stages"):
        load(staged(dict(name="a", steps=1), dict(name="b", steps=1)))


def test_command_line_overrides_settings_of_one_stage(tmp_path):
    path = tmp_path / "staged.py"
    path.write_text(_SOURCE)
    arguments = [
        "--config.stages.b.data.seq_len=4096",
        "--config.stages.a.steps=2",
        "--config.train.z_loss=0.1",
    ]
    a, b = parse(["jaxlc", f"--config={path}", *arguments]).stages
    assert (a.num_steps, b.config.data.seq_len, b.num_steps, b.config.train.z_loss) == (
        2,
        4096,
        3,
        0.1,
    )
    command = parse(["jaxlc", f"--config={path}", "--stage=b"], flags=StageFlags)
    assert command.config.data.seq_len == 8192 and command.flags.stage == "b"
    for argument, message in [
        ("--config.stages.c.steps=1", "unknown stage config.stages.c: expected one of a, b"),
        ("--config.stages.a.stepz=1", "unknown setting config.stages.a.stepz"),
        (
            "--config.stages=1",
            "a dictionary of stages by name; to set one value, use --config.stages.NAME.steps=",
        ),
        ("--config.stages.a.mesh=8", "config.stages.a.mesh is a section: set one of its settings"),
        (
            "--config.train.steps=3",
            "stages set it themselves; use --config.stages.a.steps, --config.stages.b.steps",
        ),
        ("--stage=c", "unknown --stage=c: expected one of a, b"),
        ("--config.evals.every_steps=2", "every_steps=2 has no effect without config.evals.tasks"),
        (
            "--config.evals.num_examples=9",
            "num_examples=9 has no effect without config.evals.tasks",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            parse(["jaxlc", f"--config={path}", argument], flags=StageFlags)
    with pytest.raises(UserError, match="choose one with --stage=NAME"):
        _ = parse(["jaxlc", f"--config={path}"]).config


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.mixture.x.paths=docs", ""),
        ("data.mixture.y.paths=docs", ""),
        ("data.mixture.x.share=1", ""),
        ("optimizer.warmup_steps=1", ""),
        ("data.mixture.x.chunk_tokens=8", "use --config.stages.a.data.mixture.x.chunk_tokens"),
        ("data.mixture.xx.paths=docs", "no stage has this source in its mixture; did you mean x?"),
        (
            "data.mixture.books.paths=docs",
            "no stage has this source in its mixture; their sources are x, y",
        ),
        (
            "data.sources=docs",
            "the stages have mixtures; set --config.data.mixture.NAME.paths of x, y",
        ),
        (
            "data.seq_len=64",
            "the stages set it themselves; use --config.stages.a.data.seq_len, --config.stages.b.data",
        ),
    ],
)
def test_override_that_all_stages_replace_raises(tmp_path, override, message):
    path = tmp_path / "staged.py"
    path.write_text(
        """
from jaxlc.config import defaults

def get_config(variant):
    config = defaults()
    config.data.mixture = dict(x=dict(paths="a"), y=dict(paths="b"))
    a, b = dict(x=dict(chunk_tokens=4)), dict(x=dict(chunk_tokens=2, share=2), y=dict())
    config.stages = [
        dict(name="a", steps=4, data=dict(seq_len=64, mixture=a), optimizer=dict(warmup_steps=1)),
        dict(name="b", steps=4, data=dict(seq_len=32, mixture=b)),
    ]
    return config
"""
    )
    if not message:
        parse(["jaxlc", f"--config={path}", f"--config.{override}"])
        return
    error = followed(
        lambda settings: parse(
            ["jaxlc", f"--config={path}", f"--config.{override}", *flags(settings)]
        )
    )
    assert f"config.{override.partition('=')[0]} has no effect: " in error and message in error


def test_sources_of_config_whose_stages_have_mixtures_raise():
    config = staged(dict(name="a", steps=1, data=dict(mixture=dict(x=dict(paths="a")))))
    config.data.sources = "docs"
    with pytest.raises(
        UserError, match=r"config.data.sources has no effect: the stages have mixtures; .* of x"
    ):
        load_stages(config)


def test_error_names_setting_that_the_stage_changes():
    config = staged(dict(name="a", steps=1, mesh=dict(context=3)))
    config.runtime.simulated_devices = 2
    with pytest.raises(
        UserError, match=r"stage a: the mesh .*; use --config.stages.a.mesh.context=2$"
    ):
        load_stages(config)


def test_settings_with_stages_are_copied_and_printed(tmp_path):
    path = tmp_path / "staged.py"
    path.write_text(_SOURCE)
    config = read_config(str(path))
    assert load_stages(copy.deepcopy(config)) == load_stages(config)
    assert "stages:\n  a:\n    steps: 4\n  b:\n" in str(config) and config._repr_html_()
    assert defaults().stages == ()


def test_settings_of_stages_are_read_and_set_as_others():
    config = staged(
        dict(name="a", steps=4, data=dict(mixture=dict(x=dict(paths="p"))), mesh=dict(context=2))
    )
    (stage,) = config.stages
    assert (stage.name, stage.steps, stage.schedule, stage.mesh.context) == ("a", 4, "new", 2)
    config.stages.a.data.seq_len = "256"
    config.update_from_flattened_dict(
        {"stages.a.data.mixture.x.share": "2", "stages.a.mesh.context": 1}
    )
    changed = config.stages[0].changed(steps=5, data=dict(mixture=dict(y=dict(paths="q"))))
    config.stages = [*config.stages, changed.changed(name="b")]
    a, b = load_stages(config)
    assert (a.config.data.seq_len, a.config.data.mixture[0].share, b.num_steps) == (256, 2.0, 5)
    assert [source.name for source in b.config.data.mixture] == [
        "y"
    ] and b.config.data.seq_len == 256
    for change, message in [
        (
            lambda: setattr(config.stages.a.data, "seqlen", 1),
            "did you mean config.stages.a.data.seq_len",
        ),
        (
            lambda: config.stages.a.data.seed,
            "config.stages.a.data.seed is not set: .* of config.data.seed",
        ),
        (lambda: config.stages.c, "unknown stage config.stages.c: expected one of a, b"),
        (
            lambda: setattr(config.stages.a.model, "num_layers", 1),
            "stages change only RoPE settings of the model",
        ),
        (
            lambda: config.update_from_flattened_dict({"stages.a": 1}),
            "config.stages.a is a section",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            change()
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_mixture_of_stage_names_its_sources(tmp_path):
    """Their other fields come from the sources of the config; a stage with data.sources has no
    mixture.
    """
    books = dict(paths=("books.jsonl",), share=0.6)
    config = staged(
        dict(
            name="a",
            steps=1,
            data=dict(mixture=dict(books=dict(share=0.2), code=dict(paths="*.py"))),
        ),
        dict(name="b", steps=1),
        dict(name="c", steps=1, data=dict(sources="chat.jsonl")),
    )
    config.data.mixture = dict(books=books, web=dict(paths=("web.jsonl",)))
    a, b, c = (stage.config.data for stage in load_stages(config))
    assert [(source.name, source.paths, source.share) for source in a.mixture] == [
        ("books", ("books.jsonl",), 0.2), ("code", ("*.py",), 1.0)
    ]  # fmt: skip
    assert [source.name for source in b.mixture] == ["books", "web"]
    assert c.mixture == () and c.sources == ("chat.jsonl",)
    path = tmp_path / "staged.py"
    path.write_text(_SOURCE)
    argument = "--config.stages.b.data.mixture.books.paths=x.txt"
    first, second = parse(["jaxlc", f"--config={path}", argument]).stages
    assert second.config.data.mixture[0].paths == ("x.txt",) and first.config.data.mixture == ()
