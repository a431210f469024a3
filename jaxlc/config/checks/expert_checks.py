"""Checks of mixtures of experts. Imports no jax."""

from collections.abc import Iterator, Sequence

from jaxlc.config.frozen import Config
from jaxlc.config.models.model_schema import DEFAULTS, EXPERT_SETTINGS
from jaxlc.config.schema import EXPERT_PROJECTIONS, PrecisionConfig, RuntimeConfig, TrainConfig

_MLP_NAMES = ("mlp_gate", "mlp_up", "mlp_down")  # dense blocks and shared experts have them, in three settings
_TRAIN_SETTINGS = ("balance_loss", "balance_loss_over", "balance_bias_rate", "router_z_loss")
_MOSAIC_DIM_MULTIPLE = 64  # tiles of the kernels of models/kinds/experts.py
_OF_ATTENTION = "query,key,value,attention_projected"


def expert_problems(config: Config) -> Iterator[str]:
    """Problems of the settings of experts, and settings that do not support experts."""
    model, train = config.model, config.train
    if not model.num_experts:
        for section, values, defaults, names in (
            ("model", vars(model), DEFAULTS, EXPERT_SETTINGS),
            ("train", vars(train), vars(TrainConfig()), _TRAIN_SETTINGS),
            ("runtime", vars(config.runtime), vars(RuntimeConfig()), ("expert_kernel",)),
        ):
            for name in names:
                if values[name] != defaults[name]:
                    yield (
                        f"config.{section}.{name}={values[name]!r} has no effect in a model without experts; set"
                        " config.model.num_experts, or remove it"
                    )
        for kind in model.kinds:
            if kind.feed_forward:
                yield (
                    f"config.model.kinds.{kind.name}.feed_forward={kind.feed_forward!r} has no effect in a model"
                    " without experts; set config.model.num_experts, or remove it"
                )
        if model.activation == "clamped_swiglu":
            yield (
                "unsupported: config.model.activation='clamped_swiglu' in dense layers; use --config.model.activation="
                "silu, or experts"
            )
        return
    yield from _size_problems(config)
    yield from _unsupported(config)
    if config.runtime.expert_kernel == "mosaic":
        yield from _mosaic_problems(config)


def _size_problems(config: Config) -> Iterator[str]:
    model = config.model
    if not 1 <= model.experts_per_token <= model.num_experts:
        yield (
            f"config.model.experts_per_token={model.experts_per_token} is not between 1 and config.model.num_experts="
            f"{model.num_experts}: the number of experts that each token is routed to"
        )
    if model.expert_ffn_dim < 1:
        yield "config.model.num_experts needs --config.model.expert_ffn_dim=F, the width of each expert"
    if model.shared_expert_gate and not model.shared_ffn_dim:
        yield (
            "config.model.shared_expert_gate=True has no effect without a shared expert; set"
            " config.model.shared_ffn_dim, or remove it"
        )
    yield from _router_problems(config)
    if model.renormalize_router and model.router == "topk_softmax":
        yield (
            f"config.model.renormalize_router=True has no effect with config.model.router={model.router!r}, whose"
            " weights have the sum 1; remove it"
        )
    if all(model.of_kind(kind).feed_forward == "dense" for kind in model.used_kinds):
        yield (
            f"config.model.num_experts={model.num_experts} has no effect, since all kinds of layers are dense"
            " (config.model.kinds); use --config.model.num_experts=0"
        )
    if model.has_dense_layers and model.activation == "clamped_swiglu":
        yield "unsupported: config.model.activation='clamped_swiglu' with dense layers next to layers of experts"
    for kind in model.kinds:
        if kind.ffn_dim and not kind.feed_forward:
            yield (
                f"config.model.kinds.{kind.name}.ffn_dim={kind.ffn_dim} has no effect in layers of experts; use"
                f" --config.model.kinds.{kind.name}.feed_forward=dense with it, or remove it"
            )


def _router_problems(config: Config) -> Iterator[str]:
    """Problems of the settings of the sigmoid router."""
    model = config.model
    for name in ("router_choice_bias", "router_groups"):
        if model.router != "sigmoid" and vars(model)[name] != DEFAULTS[name]:
            yield (
                f"config.model.{name}={vars(model)[name]} has no effect with config.model.router={model.router!r};"
                " remove it, or use --config.model.router=sigmoid"
            )
    groups, chosen = model.router_groups, model.router_groups_per_token
    if model.num_experts % groups or (groups > 1 and model.num_experts < 2 * groups):
        yield (
            f"config.model.router_groups={groups} does not divide config.model.num_experts={model.num_experts} into"
            " groups of at least 2"
        )
    elif not chosen <= groups or model.experts_per_token > chosen * (model.num_experts // groups):
        yield (
            f"config.model.router_groups_per_token={chosen} is more than config.model.router_groups={groups}, or these"
            f" groups have fewer than config.model.experts_per_token={model.experts_per_token} experts"
        )
    if config.train.balance_bias_rate and not model.router_choice_bias:
        yield (
            f"config.train.balance_bias_rate={config.train.balance_bias_rate} has no effect without biases; set"
            " config.model.router_choice_bias, or remove it"
        )


def _unsupported(config: Config) -> Iterator[str]:
    memory, precision, lora = config.memory, config.precision, config.lora
    if memory.parameters == "host":
        yield (
            "unsupported: config.memory.parameters='host' with experts, of which each layer copies all to the GPU; use"
            " --config.memory.parameters=device"
        )
    named = [name for name in (*memory.save, *memory.offload) if name in _MLP_NAMES]
    if named and not config.model.has_dense_layers and not config.model.shared_ffn_dim:
        yield f"config.memory names {named[0]!r}, which layers of experts do not have; remove it"
    if precision.compute == "fp8":
        yield from _names_of_no_layer(config, "precision.fp8_matmuls", precision.fp8_matmuls)
        for name, value in (("fp8_scaling", precision.fp8_scaling), ("bf16_layers", precision.bf16_layers)):
            if value != vars(PrecisionConfig())[name] and set(precision.fp8_matmuls) & set(EXPERT_PROJECTIONS):
                yield (
                    f"unsupported: FP8 products of experts with config.precision.{name}={value!r}; remove it, or use"
                    f" --config.precision.fp8_matmuls={_OF_ATTENTION}"
                )
    if lora.rank:
        yield from _names_of_no_layer(config, "lora.projections", lora.projections)


def _mosaic_problems(config: Config) -> Iterator[str]:
    """What the Mosaic kernels do not support. `models.kinds.experts.check_devices` checks the GPUs."""
    precision, mosaic = config.precision, "config.runtime.expert_kernel='mosaic'"
    of_experts = [name for name in precision.fp8_matmuls if name in EXPERT_PROJECTIONS]
    if precision.compute in ("fp32", "fp16"):
        yield f"unsupported: {mosaic} with config.precision.compute={precision.compute!r}; use compute=bf16"
    if precision.compute == "fp8" and of_experts:
        yield (
            f"unsupported: {mosaic} with FP8 products of experts; use --config.precision.fp8_matmuls={_OF_ATTENTION},"
            " or --config.runtime.expert_kernel=blocks"
        )
    if precision.reduce == "fp32":
        yield (
            f"unsupported: {mosaic}, whose gradients of weights are bf16, with config.precision.reduce='fp32'; use"
            " --config.precision.reduce=compute, or --config.runtime.expert_kernel=blocks"
        )
    model, tensor = config.model, config.mesh.tensor
    for name, dim, factor in (("model_dim", model.model_dim, 1), ("expert_ffn_dim", model.expert_ffn_dim, tensor)):
        if dim % (_MOSAIC_DIM_MULTIPLE * factor):
            split = f" x config.mesh.tensor={tensor}" if factor > 1 else ""
            yield (
                f"unsupported: {mosaic} with config.model.{name}={dim} (supported: multiples of"
                f" {_MOSAIC_DIM_MULTIPLE}{split}); use --config.runtime.expert_kernel=blocks"
            )


def _names_of_no_layer(config: Config, setting: str, names: Sequence[str]) -> Iterator[str]:
    """Names of projections of dense layers and shared experts, if the model has none."""
    named = [name for name in names if name in _MLP_NAMES]
    if named and not config.model.has_dense_layers and not config.model.shared_ffn_dim:
        yield (
            f"config.{setting} names {named[0]!r}, which only dense layers and shared experts have, and the model has"
            f" none; use --config.{setting}={_OF_ATTENTION},{','.join(EXPERT_PROJECTIONS)}, or some of them"
        )
