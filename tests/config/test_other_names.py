import re
import typing
from collections import Counter

import pytest

from jaxlc.cli import VERBS as VERB_NAMES
from jaxlc.config import defaults, load, other_names, to_dict
from jaxlc.config.command_line import ConfigFlags, _values, parse
from jaxlc.config.frozen import SECTIONS
from jaxlc.config.kinds import projection_paths, tensor_names
from jaxlc.config.settings import converted, hint_at, is_part
from jaxlc.config.values import as_argument, flattened
from jaxlc.core.errors import UserError

# Typed by users of transformers, TRL, Axolotl, Megatron-LM, nanochat, torchtitan and MaxText ->
# what it is here.
MEANINGS = """
optimizer.lr optimizer.learning_rate
train.learning_rate optimizer.learning_rate
lr_scheduler_type optimizer.schedule
train.warmup_ratio optimizer.warmup_steps
nanochat.total_batch_size train.global_batch_size
lr_decay_iters optimizer.schedule_steps
optimizer.min_lr optimizer.final_learning_rate_ratio
train.adam_beta2 optimizer.beta2
optimizer.eps optimizer.epsilon
optim optimizer.name
train.use_muon optimizer.name
clip-grad optimizer.max_grad_norm
train.max_steps train.steps
train_iters train.steps
train.num_train_epochs train.epochs
train.batch_size train.global_batch_size
train.per_device_train_batch_size train.global_batch_size
micro_batch_size train.global_batch_size
device_batch_size train.global_batch_size
gradient_accumulation_steps train.gradient_accumulation_steps
train.eval_steps train.eval_every_steps
train.save_steps train.checkpoint_every_steps
save_total_limit train.keep_checkpoints
load_best_model_at_end train.keep_best_checkpoints
logging_steps train.log_every_steps
report_to train.wandb_project
train.gradient_checkpointing memory.remat
recompute_granularity memory.remat
model.remat_policy memory.remat
train.bf16 precision.compute
torch_dtype precision.compute
train.mixed_precision precision.compute
optimizer_offload memory.optimizer
mesh.tp mesh.tensor
tensor_model_parallel_size mesh.tensor
mesh.cp mesh.context
sequence_parallel_size mesh.context
context_parallel_degree mesh.context
mesh.dp mesh.data
data_parallel_shard_degree mesh.fsdp
deepspeed mesh.fsdp
attn_implementation attention.kernel
flash_attention attention.kernel
cp_comm_type attention.strategy
data.max_seq_length data.seq_len
data.sequence_len data.seq_len
max_target_length data.seq_len
data.dataset_name data.sources
data.dataset_text_field data.text_field
data.val_set_size data.eval_fraction
tokenizer_name_or_path data.tokenizer
base_model model.init_from
model_name_or_path model.init_from
model.hidden_size model.model_dim
model.num_hidden_layers model.num_layers
n_layer model.num_layers
model.num_key_value_heads model.attention.num_kv_heads
model.intermediate_size model.ffn_dim
model.tie_word_embeddings model.tie_embeddings
model.rope_factor model.rope.factor
model.sliding_window model.attention.window
model.num_experts_per_tok model.experts.experts_per_token
router_aux_loss_coef train.balance_loss
lora.r lora.rank
lora_alpha lora.alpha
lora.target_modules lora.projections
posttrain.epsilon posttrain.clip_low
posttrain.loss_type posttrain.loss
num_generations rollouts.answers_per_prompt
max_completion_length rollouts.max_tokens
reward_funcs rollouts.reward
posttrain.importance_sampling_level posttrain.ratio
stages.long.lr stages.long.optimizer.learning_rate
stages.long.train.batch_size stages.long.train.global_batch_size
data.mixture.books.weight data.mixture.NAME.share
trian.stps train.steps
optimzer.learning_rte optimizer.learning_rate
"""
# Typed -> words of the reason why there is no such setting.
REASONS = """
lora.dropout unsupported
model.attention_dropout unsupported
pipeline_model_parallel_size pipeline
expert_parallel_degree experts
load_in_4bit quantized
neftune_noise_alpha unsupported
data.packing always
sample_packing always
torch_compile always
train_on_inputs always
resume_from_checkpoint --workdir
train.output_dir --workdir
run_name --workdir
push_to_hub export
"""


def error_of(path: str) -> str:
    with pytest.raises(UserError) as caught:
        hint_at(path)
    return str(caught.value).partition(f"unknown setting config.{path}: ")[2]


@pytest.mark.parametrize("row", MEANINGS.strip().splitlines())
def test_name_of_another_program_leads_to_its_setting(row):
    typed, setting = row.split()
    assert re.match(rf"(use|did you mean) config\.{re.escape(setting)}\b(?!\.)", error_of(typed))


@pytest.mark.parametrize("row", REASONS.strip().splitlines())
def test_name_without_setting_leads_to_the_reason(row):
    typed, word = row.split()
    assert word in error_of(typed) and "did you mean" not in error_of(typed)


def test_every_row_names_settings_that_exist_and_no_name_twice():
    names = other_names._by_name(other_names._SETTINGS)
    assert len(names) > 500
    for text in names.values():
        for path, value in re.findall(r"config\.(\w+\.[\w.]*\w)(?:=(\w+))?", text):
            assert not is_part(hint_at(path)), text
            assert not value or converted(path, value)
    for table in (other_names._SETTINGS, other_names._VALUES):
        words = [name for _, names in other_names._rows(table) for name in names]
        assert [name for name, count in Counter(words).items() if count > 1] == []


VERBS = r"^(use jaxlc (?P<verb>\w+)|always on\b|detected\b|unsupported\b|use --workdir\b)"


def test_setting_of_every_row_can_be_set_or_its_reason_is_given():
    num_settings = 0
    values = flattened(to_dict(load(defaults())))
    for text, _ in other_names.rows():
        if text.startswith("the value ") or text == "unsupported as a value":
            continue
        if found := re.match(VERBS, text):
            assert not found["verb"] or found["verb"] in VERB_NAMES
            continue
        assert re.match(r"use config\.\w", text), text
        for path, value in re.findall(r"config\.([\w.]+\w)(?:=(\w+))?", text):
            given = value or as_argument(values.get(path, ""))
            if "NAME" not in path and given:
                _, overrides = _values([f"--config.{path}={given}"], ConfigFlags)
                assert overrides.keys() == {path}
                num_settings += 1
    assert num_settings > 100


def test_every_other_value_leads_to_a_valid_one():
    """The value is one of those of some setting with choices, or of a list of names."""
    valid = set(tensor_names()) | {*projection_paths()} | {"messages"}
    for section in SECTIONS.values():
        for hint in typing.get_type_hints(section).values():
            valid |= {*map(str, typing.get_args(hint))}
    for text, _ in other_names.rows():
        if text.startswith("the value "):
            value = re.split(",? ", text.removeprefix("the value "))[0]
            assert value in valid, text


def test_name_that_is_not_known_gets_no_guess():
    assert [
        path
        for path in ("data.zzz", "mesh.qq", "model.foo", "train.output")
        if "did you mean" in error_of(path)
    ] == []


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("precision.compute", "bfloat16", "bf16"),
        ("precision.compute", "torch.float16", "fp16"),
        ("attention.kernel", "flash_attention_2", "auto"),
        ("attention.kernel", "eager", "reference"),
        ("attention.strategy", "a2a", "ulysses"),
        ("optimizer.schedule", "warmup_stable_decay", "wsd"),
        ("optimizer.schedule", "cosine_with_restarts", None),
        ("optimizer.schedule", "cosin", "cosine"),
        ("memory.remat", "true", "full"),
        ("model.activation", "gelu_pytorch_tanh", "gelu_tanh"),
        ("model.activation", "relu", None),
        ("posttrain.loss", "gspo", "grpo with config.posttrain.ratio=sequence"),
        ("posttrain.loss", "orpo", "simpo or dpo, since ORPO is unsupported"),
        ("posttrain.loss", "grop", "grpo"),
    ],
)
def test_value_of_another_program_leads_to_its_value(path, value, hint):
    with pytest.raises(UserError) as caught:
        converted(path, value)
    assert re.findall(r"did you mean (.*)\?", str(caught.value)) == ([hint] if hint else [])


def test_lora_projection_of_transformers_leads_to_its_name():
    with pytest.raises(
        UserError, match=r"'q_proj' for config.lora.projections: .*did you mean query\?"
    ):
        parse(
            [
                "program",
                "--config=quickstart",
                "--config.lora.rank=8",
                "--config.lora.projections=q_proj,v_proj",
            ]
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lr", "1e-4"], "unknown flag --lr: use --config.optimizer.learning_rate"),
        (["--bf16"], "unknown flag --bf16: use --config.precision.compute"),
        (["--output-dir=x"], "use --workdir"),
        (["--optimizer.lr=1"], "use --config.optimizer.learning_rate"),
        (["--optimizer.beta1=0.9"], "did you mean --config.optimizer.beta1?"),
        (["--mesh.tp=2"], "use --config.mesh.tensor"),
        (["--push_to_hub"], "unknown flag --push_to_hub: unsupported: "),
        (
            ["--top_k=5"],
            "unknown flag --top_k: unsupported in rollouts, whose importance weights need the probabilities",
        ),
        (
            ["--config=quickstart", "--config.optimizer=adamw"],
            "config.optimizer is a section: use config.optimizer.name",
        ),
        (
            ["--config=quickstart", "--config.attention=flash"],
            "is a section: use config.attention.kernel",
        ),
        (["--config.special_tokens.pad_token=x"], "expected one of"),
        (["--zzz=1"], "expected one of --config, --workdir, or --config.SECTION.NAME"),
        (["quickstart"], "did you mean --config=quickstart?"),
        (["256k:h100"], "did you mean --config=256k:h100?"),
        (["learning_rate=3e-4"], "did you mean --config.optimizer.learning_rate?"),
        (["run_name=a"], "use --workdir"),
        (["--config=qwen3-8b"], "--config.model.preset=qwen3-8b"),
        (["--config=meta-llama/Llama-3.1-8B"], "--config.model.init_from=meta-llama/Llama-3.1-8B"),
    ],
)
def test_command_line_of_another_program_leads_to_the_setting(arguments, words):
    with pytest.raises(UserError) as caught:
        parse(["program", *arguments])
    assert words in str(caught.value)


def test_directory_of_a_model_as_a_config_names_its_setting(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"a model, .* --config.model.init_from={tmp_path}$"):
        parse(["program", f"--config={tmp_path}"])
