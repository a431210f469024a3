"""`jaxlc plan --recommend`: formulas against compiled steps, the search, the config file, the command."""

import collections
import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxlc import plan
from jaxlc.config import Config, defaults, load, load_stages, read_config, with_settings
from jaxlc.config.base_config import base_config, set_model
from jaxlc.config.command_line import ConfigFlags, parse
from jaxlc.config.values import parse_length
from jaxlc.core.errors import UserError
from jaxlc.plan import __main__ as command
from jaxlc.plan.compile import plan_step
from jaxlc.search import aot, costly
from jaxlc.search.candidate_search import Search
from jaxlc.search.candidates import Candidate, Layout, layouts
from jaxlc.search.config_file import MARK, check_path, config_source
from jaxlc.search.goals import score, topologies
from jaxlc.search.memory_formula import MemoryEstimate, estimate_memory
from jaxlc.search.recommendation import MEMORY_MARGIN, Recommendation, recommend, variants_to_search
from jaxlc.search.recommendation_page import page
from jaxlc.search.time_formula import TimeEstimate, estimate_time
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import topology
from tests.plan.sample_plan import MEMORY, PREDICTED, plan_of

# Settings, and the memory of the step compiled with JAX 0.10.1.
POINTS = [json.loads(line) for line in (Path(__file__).parents[1] / "goldens/formula_points.jsonl").open()]
_NONE = ("device_arguments_bytes", "workspace_bytes", "symmetric_used_bytes", "nvshmem_heap_bytes", "nccl_bytes")
NO_MEMORY = dataclasses.replace(MEMORY, **dict.fromkeys(_NONE, 0))  # 95 GiB are usable
NO_FLAGS = dict(model=None, seq_len=None)


def config_of_point(point: dict) -> Config:
    config = defaults()
    config.model.preset = point["settings"].get("model.preset", "llama3.1-8b")
    settings = {path: value for path, value in point["settings"].items() if path != "model.preset"}
    return with_settings(load(config), {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def kernel_of_point(config: Config) -> str:
    if config.attention.strategy == "all_gather":
        return "pallas"
    return "cudnn_packed" if config.attention.document_mask else "cudnn"


def test_memory_formula_compiled_points_within_margin():
    errors = []
    for point in POINTS:
        config, gpus = config_of_point(point), topology(point["topology"])
        memory = estimate_memory(config, gpus, kernel_of_point(config))
        errors.append(memory.device_bytes / point["device_peak_bytes"] - 1)
        if memory.host_bytes_per_node:
            assert memory.host_bytes_per_node / point["host_bytes_per_node"] == pytest.approx(1, abs=0.22)
    assert statistics.median(map(abs, errors)) < 0.04
    # A step is compiled if MEMORY_MARGIN of the formula fits, so overestimates up to that prune nothing that fits.
    assert max(errors) < 1 / MEMORY_MARGIN - 1 + 0.005 and min(errors) > -0.12


def test_time_formula_counts_reductions_over_data_and_host_gradients():
    """Compiled: 2.93 s with data=16, 3.23 s with fsdp=128, and 708 s with parameters on the host."""
    config = with_settings(load(model("llama3.1-8b")), {"data.seq_len": 32_768, "train.global_batch_size": 128})
    for seconds, settings in ((2.93, {"mesh.data": 16, "mesh.fsdp": 8}), (3.23, {"mesh.fsdp": 128})):
        settings |= {"mesh.context": 2, "attention.strategy": "ulysses"}
        estimate = estimate_time(with_settings(config, settings), topology("h100:32x8"), Roofline(), {"full": "cudnn"})
        assert estimate.step_seconds == pytest.approx(seconds, rel=0.06)
    on_host = {"memory.optimizer": "host", "memory.parameters": "host", "train.gradient_accumulation_steps": 64}
    estimate = estimate_time(with_settings(config, on_host), topology("h100:1x1"), Roofline(), {"full": "cudnn"})
    assert estimate.step_seconds == pytest.approx(708, rel=0.1)


def test_time_formula_saved_matmuls_are_not_recomputed():
    """Compiled: 139.2 s, of which 39.9 s are matrix products."""
    settings = {"memory.remat": "matmuls", "memory.optimizer": "host", "train.gradient_accumulation_steps": 64}
    settings |= {"data.seq_len": 32_768, "train.global_batch_size": 128, "memory.loss_chunk_tokens": 0}
    config = with_settings(load(model("llama3.2-1b")), settings)
    estimate = estimate_time(config, topology("h100:1x1"), Roofline(), {"full": "cudnn"})
    assert estimate.products == pytest.approx(39.9, rel=0.02)
    assert estimate.step_seconds == pytest.approx(139.2, rel=0.03)


@pytest.mark.gpu_compiler
@pytest.mark.full
@pytest.mark.parametrize("index", [0, 8, 12, 28])
def test_time_formula_compiled_step_within_5_percent(index):
    config, gpus = config_of_point(POINTS[index]), topology(POINTS[index]["topology"])
    plan = plan_step(config, gpus, lambda: None)
    estimate = estimate_time(config, gpus, Roofline(), {"full": kernel_of_point(config)})
    assert estimate.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=0.05)
    assert plan.memory.device_peak_bytes == pytest.approx(POINTS[index]["device_peak_bytes"], rel=0.02)


def small() -> Config:
    config = defaults()
    config.model.update(num_layers=2)
    config.data.seq_len = 512
    config.train.update(global_batch_size=4)
    return load(config)


def candidate(seconds: float, gib: float, **settings) -> Candidate:
    gpus = topology("h100:1x2")
    settings = {"mesh.context": 2, "runtime.topology": str(gpus)} | settings
    return Candidate(
        settings=settings,
        config=with_settings(small(), settings),
        gpus=gpus,
        time=TimeEstimate(seconds, 0, 0, 0, 0),
        memory=MemoryEstimate(gib * 2**30, 0, 60 * 2**30, 2**40),
    )


def layout(*candidates: Candidate) -> Layout:
    return Layout(candidates=candidates, num_too_large=0)


class StubCompiler:
    """Compiled steps by `train.gradient_accumulation_steps`: (seconds, GiB)."""

    def __init__(self, results):
        self.results, self.compiled = results, []

    def __call__(self, configs):
        plans = []
        for config in configs:
            key = config.train.gradient_accumulation_steps
            self.compiled.append(key)
            if isinstance(self.results[key], str):
                plans.append(self.results[key])
                continue
            seconds, gib = self.results[key]
            memory = dataclasses.replace(NO_MEMORY, device_temp_bytes=int(gib * 2**30))
            predicted = dataclasses.replace(PREDICTED, step_seconds=seconds)
            sizes = dict(num_devices=2, tokens_per_step=config.tokens_per_step, sequence_tokens=config.data.seq_len)
            plans.append(dataclasses.replace(plan_of(memory), predicted=predicted, **sizes))
        return plans


def searched(results, *pool: Layout, limit_seconds: float = 1e9, batch_size: int = 1) -> tuple[Search, StubCompiler]:
    compiler, search = StubCompiler(results), Search(base=small(), goal="fastest")
    search.run(pool, compiler, batch_size=batch_size, limit_seconds=limit_seconds, log=lambda line: None)
    return search, compiler


def steps(number: int) -> dict[str, int]:
    return {"train.gradient_accumulation_steps": number, "train.global_batch_size": 840}


def test_search_ends_when_no_other_can_be_among_best():
    pool = [layout(candidate(seconds, 10, **steps(key))) for key, seconds in ((1, 10), (2, 11), (3, 12), (4, 20))]
    search, compiler = searched({1: (10.5, 10), 2: (10.0, 10), 3: (12.0, 10)}, *pool)
    assert compiler.compiled == [1, 2, 3]
    assert [trial.plan.predicted.step_seconds for trial in search.best] == [10.0, 10.5, 12.0]
    assert search.num_left == 0


def test_search_candidate_within_error_is_compiled():
    pool = [layout(candidate(seconds, 10, **steps(key))) for key, seconds in ((1, 9), (2, 9.01), (3, 9.02), (4, 9.05))]
    results = {1: (18.0, 10), 2: (18.02, 10), 3: (18.04, 10), 4: (17.5, 10)}  # the formula is too fast for all
    search, compiler = searched(results, *pool)
    assert compiler.compiled == [1, 2, 3, 4]
    assert [trial.plan.predicted.step_seconds for trial in search.best] == [17.5, 18.0, 18.02]


def test_search_step_does_not_fit_tries_next_settings_that_do():
    tight, similar, less = candidate(10, 50, **steps(1)), candidate(11, 49, **steps(2)), candidate(12, 30, **steps(3))
    search, compiler = searched({1: (10.0, 100), 3: (12.0, 60)}, layout(tight, similar, less))
    # Twice the memory of the formula: 49 GiB would not fit the 60 GiB of these estimates, 30 GiB does.
    assert compiler.compiled == [1, 3]
    assert [trial.plan.predicted.step_seconds for trial in search.best] == [12.0]


def test_search_refused_candidate_is_counted_and_replaced():
    pool = layout(candidate(10, 10, **steps(1)), candidate(11, 9, **steps(2)))
    search, compiler = searched({1: "refused: unsupported", 2: (11.0, 9)}, pool)
    assert compiler.compiled == [1, 2] and search.num_refused == 1 and len(search.best) == 1


def test_search_limit_ends_it_after_first_fit():
    pool = [layout(candidate(10 + key, 10, **steps(key))) for key in (1, 2, 3)]
    search, compiler = searched({1: (11.0, 10), 2: (12.0, 10)}, *pool, limit_seconds=0)
    assert compiler.compiled == [1] and search.num_left == 2


def test_page_close_configurations_depend_on_measured_spread():
    pool = [layout(candidate(seconds, 10, **steps(key))) for key, seconds in ((1, 10), (2, 11.5))]
    search, _ = searched({1: (10.0, 10), 2: (11.5, 10)}, *pool)
    result = Recommendation(base=small(), gpus=topology("h100:1x2"), search=search)
    assert "1 and 2 are within the 80% interval" in page(result, None, ())
    assert "within" not in page(result, None, (), pair_spread=0.05)


def test_score_goals_order_by_their_measure():
    slow = dict(step_seconds=8.0, num_gpus=2, tokens_per_step=8, seq_len=8)
    fast = dict(step_seconds=3.0, num_gpus=8, tokens_per_step=8, seq_len=4)
    better = {"fastest": fast, "cheapest": slow, "fewest_gpus": slow, "longest": slow}
    for goal, first in better.items():
        assert min((slow, fast), key=lambda values: score(goal, **values)) is first, goal


def test_plan_of_part_has_fewer_devices_per_process(monkeypatch):
    monkeypatch.setattr(plan, "plan", lambda config, topology, **options: (topology, options["devices_per_process"]))
    for name, expected in (("h100:2x8", 8), ("h100:1x4", 4), ("h100:1x6", 2)):
        assert aot.plan_of(small(), topology=name, devices_per_process=8)["plan"] == (name, expected)


def test_topologies_of_cheapest_are_parts():
    names = [str(gpus) for gpus in topologies("cheapest", topology("h100:4x8"))]
    assert names == ["h100:4x8", "h100:2x8", "h100:1x8", "h100:1x4", "h100:1x2", "h100:1x1"]
    assert [str(gpus) for gpus in topologies("fastest", topology("h100:4x8"))] == ["h100:4x8"]
    names = [str(gpus) for gpus in topologies("fewest_gpus", topology("h100:3x6"))]
    assert names == ["h100:3x6", "h100:2x6", "h100:1x6", "h100:1x4", "h100:1x3", "h100:1x2", "h100:1x1"]


@pytest.mark.gpu_compiler
def test_layouts_divide_batch_and_keep_settings():
    config = with_settings(small(), {"lora.rank": 8, "data.seq_len": 2048})
    pool = list(layouts(config, topology("h100:1x4"), Roofline(), MEMORY_MARGIN))
    for one in pool:
        for one_candidate in one.candidates:
            checked = with_settings(config, one_candidate.settings)  # raises UserError if they contradict each other
            assert checked.lora.rank == 8 and checked.data.seq_len == 2048 and checked.tokens_per_step == 4 * 2048
            assert checked.mesh.num_devices == 4
            break
        seconds = [one_candidate.time.step_seconds for one_candidate in one.candidates]
        assert all(later >= 0.99 * earlier for earlier, later in zip(seconds, seconds[1:]))
    meshes = {tuple(vars(one_candidate.config.mesh).values()) for one in pool for one_candidate in one.candidates}
    assert {(1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (1, 2, 2, 1), (4, 1, 1, 1)} <= meshes


@pytest.mark.gpu_compiler
def test_layouts_of_longest_sequence_of_memory_table_may_fit():
    """docs/memory.md: 12,582,912 tokens of an 8B model on 8 GPUs."""
    config = load(base_config(None, dict(model="llama3.1-8b", seq_len="12M")))
    config = with_settings(config, {"train.global_batch_size": 1})
    assert any(layout.candidates for layout in layouts(config, topology("h100:1x8"), Roofline(), MEMORY_MARGIN))


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("name", ["h100:1x6", "h100:1x7"])
def test_recommend_longest_of_odd_number_of_gpus(name):
    """More GPUs than 4 fit longer sequences than 4 of them, also where a power of two is not divisible by them."""
    longest = {}
    for gpus in (topology("h100:1x4"), topology(name)):
        variants = variants_to_search(load(model("llama3.2-1b")), gpus, "longest", Roofline())
        longest[str(gpus)] = variants[0].data.seq_len
    assert longest[name] > longest["h100:1x4"] > 2**20


def test_recommend_longest_compiles_longer_sequences():
    config = with_settings(load(model("llama3.2-1b")), {"attention.document_mask": False})
    compiled = []

    def compile_steps(configs):
        compiled.extend(configs)
        return StubCompiler({config.train.gradient_accumulation_steps: (1.0, 10) for config in configs})(configs)

    gpus = topology("h100:1x1")
    result = recommend(config, gpus, compile_steps, goal="longest", roofline=Roofline(), limit_seconds=0)
    assert result.search.best[0].plan.sequence_tokens == compiled[0].data.seq_len > 2**20
    assert result.search.best[0].config == compiled[0]
    assert compiled[0].train.global_batch_size == 1  # the given step of 4,194,304 tokens, rounded up to one sequence


@pytest.mark.gpu_compiler
def test_recommend_nothing_fits_names_alternatives():
    config = with_settings(load(model("llama3.1-70b")), {"data.seq_len": 2**20, "train.global_batch_size": 1})
    result = recommend(config, topology("h100:1x1"), StubCompiler({}), roofline=Roofline(), limit_seconds=1)
    assert not result.search.trials and result.alternatives.gpus.num_gpus > 1
    assert result.alternatives.gpus.num_domains > 1 and result.alternatives.seq_len is None
    text = page(result, None, ())
    assert "nothing fits" in text and f"--topology={result.alternatives.gpus}" in text


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [("llama3.1-8b", "h100:1x1", "h100:1x2"), ("llama3.1-70b", "gb200:1x4", "gb200:1x8")],
)
def test_recommend_nothing_fits_names_fewest_gpus(name, gpus, expected):
    config = with_settings(load(model(name)), {"data.seq_len": 2**20, "train.global_batch_size": 4})
    too_large = StubCompiler(collections.defaultdict(lambda: (1.0, 200)))
    result = recommend(config, topology(gpus), too_large, roofline=Roofline(), limit_seconds=1)
    assert str(result.alternatives.gpus) == expected


@pytest.mark.gpu_compiler
def test_recommend_no_mesh_names_batch_that_works():
    config = load(base_config(None, dict(model="llama3.2-1b", seq_len="128K")))
    with pytest.raises(UserError, match="global_batch_size=30 or 36, or --config.data.seq_len=130560 or 132096"):
        recommend(config, topology("h100:1x6"), StubCompiler({}), roofline=Roofline(), limit_seconds=1)
    for changed in ({"train.global_batch_size": 36}, {"data.seq_len": 132_096}):
        assert list(layouts(with_settings(config, changed), topology("h100:1x6"), Roofline(), MEMORY_MARGIN))


def model(name: str):
    return base_config(None, dict(model=name, seq_len=None))


@pytest.mark.parametrize(("text", "tokens"), [("1M", 2**20), ("32k", 32_768), ("131_072", 131_072)])
def test_parse_length_units(text, tokens):
    assert parse_length(text, "seq_len") == tokens


@pytest.mark.parametrize("text", ["1X", "0", "1.5M", "-8", ""])
def test_parse_length_invalid_is_error(text):
    with pytest.raises(UserError, match="--seq_len"):
        parse_length(text, "seq_len")


def test_base_config_model_and_length():
    config = load(base_config(None, dict(model="llama3.1-8b", seq_len="512K")))
    assert config.model.num_layers == 32 and config.data.seq_len == 524_288 and config.tokens_per_step == 4_194_304
    changed = load(base_config(read_config("1m_1gpu:lora"), dict(model="llama3.2-1b", seq_len="64K")))
    assert changed.lora.rank == 32 and changed.model.num_layers == 16 and changed.data.seq_len == 65_536
    assert base_config(None, NO_FLAGS) is None
    assert load(base_config(None, dict(model="llama3.1-8b", seq_len="1000"))).train.global_batch_size == 4096


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ConfigFlags):
    model: str | None = None
    seq_len: str | None = None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=llama3.1-8"], "did you mean llama3.1-8b"),
        (["--seq_len=1M"], "no model is given"),
        (["--config=extend_512k", "--seq_len=1M"], "config with stages"),
    ],
)
def test_base_config_errors(flags, message):
    with pytest.raises(UserError, match=message):
        parse(["recommend", *flags], flags=ModelFlags, base=base_config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=llama3.1-8b"], "use jaxlc recommend --model"),
        (["--config=64k:h100", "--recommend", "--goal=cheapest"], "use jaxlc recommend"),
        (["--config=64k:h100", "--json=/"], "--json=/ is a directory"),
        (["--config=64k:h100", "--timeline=plan.xyz"], "ends with .png"),
    ],
)
def test_command_invalid_flag_is_error(flags, message, capsys):
    assert command.run(["plan", "--topology=h100:1x8", *flags]) == 2
    assert message in capsys.readouterr().err


def stages_of(source: str, model: str = ""):
    config = read_config(source) if source else defaults()
    if model:
        config.model.preset = model
    return load_stages(config)


@pytest.mark.parametrize(
    ("source", "model"), [("", "llama3.1-8b"), ("sft_128k", ""), ("extend_512k", ""), ("1m_1gpu:lora", "llama3.2-1b")]
)
def test_config_file_loads_as_recommended(source, model, tmp_path):
    base = stages_of(source, model)
    settings = {"memory.remat": "full", "memory.offload": ("residual",), "runtime.memory_fraction": 0.88}
    configs = [with_settings(stage.config, settings | {"attention.strategy": "ring"}) for stage in base]
    path = tmp_path / "recommended.py"
    path.write_text(config_source(source, model, "Recommended.", base, configs))
    written = load_stages(read_config(str(path)))
    assert [stage.config for stage in written] == configs
    assert [(stage.name, stage.num_steps) for stage in written] == [(stage.name, stage.num_steps) for stage in base]
    assert MARK in path.read_text() and len(path.read_text().splitlines()) < 40


def test_config_file_of_hugging_face_directory_loads(tmp_path):
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=320)
    values = dict(model_type="llama", num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=1e4, **shape)
    (tmp_path / "config.json").write_text(json.dumps(values))
    given = base_config(None, dict(model=str(tmp_path), seq_len="4K"))
    assert load(given).model.model_dim == 64
    base = defaults()
    set_model(base, str(tmp_path))
    recommended = with_settings(load(given), {"memory.remat": "full"})
    path = tmp_path / "recommended.py"
    path.write_text(config_source("", str(tmp_path), "Recommended.", load_stages(base), [recommended]))
    assert load(read_config(str(path))) == recommended


def test_check_path_keeps_other_files(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("print()")
    with pytest.raises(UserError, match="another name"):
        check_path(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="another name"):
        check_path(path)
    path.write_text(f'"""{MARK}."""')
    check_path(path)
    (tmp_path / "directory.py").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        check_path(tmp_path / "directory.py")


@pytest.mark.gpu_compiler
def test_costly_settings_name_mask_and_tile():
    config = load(base_config(None, dict(model="llama3.1-8b", seq_len="256K")))
    mesh = {"mesh.context": 8, "attention.strategy": "ulysses", "train.gradient_accumulation_steps": 16}
    recommended = with_settings(config, mesh | {"memory.remat": "attention"})
    given = with_settings(config, mesh | {"memory.remat": "attention", "memory.tile_tokens": 4096})
    text = "\n".join(costly.costly_settings(given, recommended, topology("h100:1x8"), Roofline()))
    assert "attention.document_mask=True costs" in text and "cudnn_packed" in text
    assert "memory.tile_tokens=4096 costs" in text and "(recommended: memory.tile_tokens=0)" in text
    unmasked = with_settings(recommended, {"attention.document_mask": False})
    assert costly.costly_settings(unmasked, unmasked, topology("h100:1x8"), Roofline()) == []
