"""Names that scripts, configs and stored files of users contain. New ones may be added; none of
these may go.
"""

import dataclasses
import importlib.util
import inspect
import json
import types
import typing
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxlc
from jaxlc.cli import VERBS
from jaxlc.plan import Plan
from jaxlc.plan.result import StagePlan, StagesPlan
from jaxlc.simulate import roofline
from jaxlc.train.reports.metrics import METRICS_FILE

ROOT = Path(__file__).parents[1]
FUNCTIONS = {  # name -> parameters
    "jaxlc.attend": "q_BTNH k_BSKH v_BSKH mesh strategy kernel causal window segment_ids ulysses_ranks scale"
    " context_axis batch_axes head_axis token_order return_lse",
    "jaxlc.attention.dot_product_attention": "query key value bias mask scale is_causal query_seq_lengths"
    " key_value_seq_lengths local_window_size implementation return_residual mesh context_axis batch_axes head_axis"
    " strategy",
    "jaxlc.attention.gated_delta_rule": "q_BTGK k_BTGK v_BTHV g_BTH beta_BTH mesh segment_ids scale context_axis"
    " batch_axes head_axis token_order",
    "jaxlc.attention.natural_order": "layout_order",
    "jaxlc.attention.short_convolution": "x_BTW weights_PW mesh segment_ids context_axis batch_axes head_axis"
    " token_order",
    "jaxlc.attention.zigzag_order": "num_tokens context",
    "jaxlc.config.check_variant": "variant variants",
    "jaxlc.config.defaults": "",
    "jaxlc.config.load": "config",
    "jaxlc.config.read_config": "name",
    "jaxlc.config.shrink_for_cpu": "config simulated_devices",
    "jaxlc.data.show": "config num",
    "jaxlc.evaluate": "source out step mesh report settings",
    "jaxlc.export": "workdir out step dtype max_shard_gb adapters",
    "jaxlc.generate": "source prompts max_tokens temperature top_p stop seed step mesh chunk_tokens stream chat",
    "jaxlc.load": "workdir step mesh model loss",
    "jaxlc.make_mesh": "data fsdp context tensor devices",
    "jaxlc.plan.plan": "config topology devices_per_process host_memory_gib advise constants evaluation"
    " document_lengths starting",
    "jaxlc.profile.compare": "trace plan topology constants num_steps",
    "jaxlc.start": "simulated_devices num_processes process_id coordinator_address",
    "jaxlc.sweep.load": "path",
    "jaxlc.train.build_step": "config mesh model loss optimizer",
    "jaxlc.train.run": "config workdir model loss optimizer batches eval_batches callbacks",
}
CLASSES = {  # name -> attributes
    "jaxlc.plan.Plan": "config from_json links_figure memory_figure save timeline_figure title to_json",
    "jaxlc.train.Callback": "on_checkpoint on_end on_evaluation on_log on_start on_step",
    "jaxlc.train.History": "",
    "jaxlc.train.LanguageModel": "loss",
    "jaxlc.train.Model": "",
    "jaxlc.train.Result": "config evaluate evaluation exit_status history loss_by_position_figure loss_figure"
    " mesh model params paths reward_figure step tokenizer workdir",
    "jaxlc.train.RunInfo": "",
    "jaxlc.train.StopTraining": "",
    "jaxlc.train.TrainStep": "",
    "jaxlc.train.TrainingStopped": "",
}
MODULES = [
    "data",
    "evals",
    "exporting",
    "generation",
    "plan",
    "preflight",
    "profile",
    "recommend",
    "sweep",
    "train",
]  # `python -m jaxlc.X`
COMMANDS = [
    "data",
    "eval",
    "export",
    "generate",
    "plan",
    "preflight",
    "profile",
    "recommend",
    "sweep",
    "train",
]
CONFIGS = [
    *("quickstart", "64k", "128k", "256k", "1m", "1m_1gpu", "8m_8gpu", "32m_32gpu", "retrieval"),
    *("extend_512k", "extend_1m", "lora_1m_1gpu", "olmo3_64k", "sft_128k"),
]
METRICS = [
    *(
        "step",
        "loss",
        "tokens_per_second",
        "step_seconds",
        "grad_norm",
        "learning_rate",
        "eval_loss",
    ),
    *("loss_scale", "skipped_steps"),
]
PLAN = {
    "advice": ["cost", "device_peak_bytes", "fits", "host_bytes_per_node", "overrides"],
    "collectives": ["axes", "backend", "bytes", "count", "crosses_domains", "kind", "mode"],
    "layer_timeline": ["end_seconds", "kind", "lane", "pass_name", "start_seconds"],
    "memory": [
        *(
            "batch_bytes",
            "device_arguments_bytes",
            "device_capacity_bytes",
            "device_temp_bytes",
            "host_bytes_per_device",
        ),
        *("host_bytes_per_node", "host_capacity_per_node_bytes", "host_optimizer_bytes"),
        *("host_parameters_bytes",),
        *(
            "host_pool_bytes",
            "host_pools_per_node_bytes",
            "is_unified_over_pcie",
            "largest",
            "memory_fraction",
        ),
        *(
            "nccl_bytes",
            "nvshmem_heap_bytes",
            "optimizer_bytes",
            "parameters_bytes",
            "scheduler_limit_bytes",
        ),
        *(
            "staging_bytes_per_node",
            "symmetric_used_bytes",
            "unified_host_bytes",
            "workspace_bytes",
        ),
    ],
    "predicted": [
        *(
            "bound_by",
            "communication_seconds",
            "exposed_communication_seconds",
            "exposed_host_copies",
        ),
        *(
            "exposed_host_copy_seconds",
            "host_copies",
            "host_copy_seconds",
            "mfu_causal",
            "overhead_seconds",
        ),
        *(
            "recomputed_share",
            "recurrence_seconds",
            "expansion_seconds",
            "experts_overhead_seconds",
            "seconds_by_kind",
            "seconds_by_resource",
            "step_seconds",
            "step_seconds_interval",
        ),
        *("step_seconds_interval", "tokens_per_second_per_device", "transfer_seconds_by_resource"),
    ],
    "ring": ["by_backend", "exposed", "exposed_forward", "hidden", "hops", "token_bytes"],
    "": [
        *(
            "compile_seconds",
            "config",
            "evaluation_peak_bytes",
            "hints",
            "kernel_choice",
            "kernel_names",
            "kernels",
            "mesh",
        ),
        *("num_devices", "sequence_tokens", "tokens_per_step", "topology", "transport_choice"),
    ],
}
PLAN_DERIVED = ["device_peak_bytes", "fits", "pool_share", "symmetric_bytes"]  # keys of "memory"
LARGEST = ["bytes", "made_by", "shape"]  # keys of each of memory.largest
PACKING = ["num_sequences", "order", "source"]
PACKING_ESTIMATES = [
    *(
        "attention_seconds",
        "longest_document",
        "mfu_documents",
        "name",
        "num_documents",
        "padding_share",
    ),
    *("pairs_share", "replica_cost", "ring_cost", "step_seconds", "tokens_per_second_per_device"),
]
OTHER_PLANS = {
    StagesPlan: ["price_per_gpu_hour", "stages"],
    StagePlan: ["name", "num_steps", "plan"],
}
CONSTANTS = [
    *(
        "attention_half_keys_masked",
        "attention_half_keys_unmasked",
        "expert_kernel_share",
        "f8_matmul_share",
    ),
    *(
        "host_latency_seconds",
        "host_share",
        "kernel_gap_seconds",
        "link_share",
        "matmul_ramp_seconds",
    ),
    *("matmul_share", "matmul_wave_weight"),
    *("memory_share", "nccl_multiprocessors", "network_latency_seconds", "network_step_seconds"),
    *("nvlink_latency_seconds", "nvlink_step_seconds", "pair_spread", "time_scale", "time_spread"),
]


def public(name: str):
    """The object of a dotted name, as `import jaxlc` reaches it."""
    value = jaxlc
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_keeps_its_parameters(name):
    assert not set(FUNCTIONS[name].split()) - set(inspect.signature(public(name)).parameters)


@pytest.mark.parametrize("name", CLASSES)
def test_class_keeps_its_attributes(name):
    cls = public(name)
    fields = (
        [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    )
    assert not set(CLASSES[name].split()) - set(dir(cls)) - set(fields)


@pytest.mark.parametrize("name", MODULES)
def test_module_runs_as_a_program(name):
    spec = importlib.util.find_spec(f"jaxlc.{name}")
    path = Path(spec.origin)
    program = path.with_name("__main__.py") if path.name == "__init__.py" else path
    assert 'if __name__ == "__main__":' in program.read_text()


def test_commands_and_configs_stay():
    assert not set(COMMANDS) - set(VERBS)
    assert not set(CONFIGS) - set(jaxlc.config.shipped_configs())
    assert (ROOT / "scripts" / "sweep_meshes.py").is_file()


def test_keys_of_plan_json_are_read_and_written():
    values = {part: dict.fromkeys(keys, 0) for part, keys in PLAN.items()}
    values = values.pop("") | values
    for part in ("advice", "collectives", "layer_timeline"):
        values[part] = [values[part]]
    values["hints"], values["collectives"][0]["axes"] = ["x"], ["context"]
    values["memory"]["largest"] = [dict.fromkeys(LARGEST, 0)]
    values["memory"]["device_capacity_bytes"] = 1
    values["predicted"]["step_seconds_interval"] = [1, 2]
    values["packing"] = dict.fromkeys(PACKING, 0) | {
        "estimates": [dict.fromkeys(PACKING_ESTIMATES, 0)]
    }
    written = json.loads(json.dumps(Plan.from_json(typed(Plan, values)).to_json()))
    assert missing(values, written) == []
    assert not set(PLAN_DERIVED) - set(written["memory"])
    assert missing({"memory": {"renamed": 0}}, written) == ["memory.renamed"]


def typed(hint, value):
    """`value` with numbers as the types of the fields that they are for."""
    hint = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        return [typed(typing.get_args(hint)[0], item) for item in value]
    if (
        isinstance(value, dict)
        and isinstance(hint, type)
        and (hints := typing.get_type_hints(hint))
    ):
        return {name: typed(hints.get(name), item) for name, item in value.items()}
    if typing.get_origin(hint) is dict and not isinstance(value, dict):
        return {}
    return hint(value) if hint in (str, bool) else value


def missing(expected, found, path: str = "") -> list[str]:
    """The paths of keys of nested dictionaries and lists in `expected` that are not in `found`."""
    if isinstance(expected, list):
        return [
            key
            for one, other in zip(expected, found, strict=True)
            for key in missing(one, other, path)
        ]
    if not isinstance(expected, dict):
        return []
    absent = [f"{path}{key}" for key in expected if key not in found]
    return absent + [
        key
        for name in expected
        if name in found
        for key in missing(expected[name], found[name], f"{path}{name}.")
    ]


@pytest.mark.parametrize("plan", OTHER_PLANS)
def test_keys_of_other_plans_stay(plan):
    fields = (
        {field.name for field in dataclasses.fields(plan)}
        if dataclasses.is_dataclass(plan)
        else set(plan._fields)
    )
    assert not set(OTHER_PLANS[plan]) - fields


def test_keys_of_constants_are_read():
    for key in CONSTANTS:
        assert roofline.read(json.dumps({key: 0.5})) != roofline.Roofline()
    assert roofline.read('{"attention_share": {"cudnn": [0.6, 0.5]}}') != roofline.Roofline()


class Bigram:
    """A model that compiles fast: predicts each token from the token before it."""

    def init(self, key):
        return {"table": jax.random.normal(key, (64, 64))}

    def apply(self, params, batch, mesh):
        return params["table"][batch.tokens]


def test_metrics_keys_are_written(tmp_path):
    config = jaxlc.config.defaults()
    config.model.vocab_size = config.data.seq_len = 64
    config.mesh.data, config.precision.compute = 8, "fp16"
    config.train.update(steps=1, global_batch_size=8, eval_sequences=8, checkpoint_every_steps=0)
    batches = [{"tokens": np.zeros((8, 64), np.int32)}]
    jaxlc.train.run(config, tmp_path, model=Bigram(), batches=batches, eval_batches=batches)
    rows = map(json.loads, (tmp_path / METRICS_FILE).read_text().splitlines())
    assert not set(METRICS) - {key for row in rows for key in row}
