r"""ProLong: extends Llama 3 8B Instruct to 524,288 tokens in two stages, then fine-tunes it.
Variants: mini.

    jaxlc train --config=extend_512k:mini     # the same stages in miniature, on 8 simulated CPU devices
    jaxlc plan --config=extend_512k --topology=h100:8x8 --price_per_gpu_hour=2.5

Lengths, steps, batch sizes, learning rates, RoPE bases and shares of the data are those of Gao et
al. 2024 (arXiv:2410.02660) and of their training scripts train_64K.sh, train_512K.sh and
train_sft.sh (github.com/princeton-nlp/ProLong); docs/recipes.md has them. To train on 64 H100s,
start one process per GPU (docs/clusters.md), with the texts of each source in prolong/NAME, or in
--config.data.mixture.NAME.paths:

    jaxlc train --config=extend_512k --config.model.init_from=meta-llama/Meta-Llama-3-8B-Instruct
"""

from ml_collections import ConfigDict

from jaxlc.config import check_variant, defaults, shrink_for_cpu

VARIANTS = ("mini",)
_SHORT = dict(fineweb_edu=0.1, fineweb=0.1, stackexchange=0.04, wikipedia=0.04)
_SHORT |= dict(tulu=0.03, arxiv=0.03, openwebmath=0.03, textbooks=0.03)
_SHARES_64K = dict(code=0.3, books=0.3, **_SHORT)
# Documents of the full length, and the same sources in chunks of 64K tokens.
_SHARES_512K = dict(code_512k=0.15, code=0.15, books_512k=0.05, books=0.25, **_SHORT)
# Ours: the stages that extend the context end with a question for pass keys at five depths.
_PASSKEY = dict(tasks=("passkey",), num_examples=8, batch_size=8)


def get_config(variant: str = "") -> ConfigDict:
    check_variant(variant, VARIANTS)
    config = defaults()
    # Llama 3 has the same shape and no RoPE scaling
    config.model.preset = "llama3.1-8b"
    config.model.rope.scaling = "none"
    config.mesh.update(fsdp=8, context=8)  # 8 nodes of 8
    # context ranks of one node; the plan finds it faster than the ring
    config.attention.strategy = "ulysses"
    config.runtime.topology = "h100:8x8"
    config.data.mixture = _sources()
    config.optimizer.update(beta1=0.9, beta2=0.95, weight_decay=0.1, max_grad_norm=1.0)
    config.optimizer.update(schedule="cosine", final_learning_rate_ratio=0.1)
    config.train.update(eval_sequences=8, eval_every_steps=250, checkpoint_every_steps=125)
    saved = dict(save=("mlp_gate", "mlp_up"))  # 14 GiB at 64K, and too much at 512K
    config.stages = [
        dict(
            name="64k",
            steps=5000,  # 21 billion tokens
            data=dict(seq_len=65_536, mixture=_shares(_SHARES_64K)),
            model=dict(rope=dict(theta=8e6)),
            optimizer=dict(learning_rate=1e-5, warmup_steps=500),
            train=dict(global_batch_size=64, gradient_accumulation_steps=8),
            memory=saved,
            evals=_PASSKEY | dict(lengths=(65_536,)),
            min_scores=("passkey@65536=80",),
        ),
        dict(
            name="512k",
            steps=2500,  # 21 billion tokens
            optimizer_state="carry",
            data=dict(seq_len=524_288, mixture=_shares(_SHARES_512K, chunk_tokens=65_536)),
            model=dict(rope=dict(theta=1.28e8)),
            optimizer=dict(learning_rate=5e-6, warmup_steps=250),
            train=dict(global_batch_size=16, gradient_accumulation_steps=2),
            evals=_PASSKEY | dict(lengths=(65_536, 524_288)),
            min_scores=("passkey@524288=80",),
        ),
        dict(
            name="sft",
            steps=250,  # 1 billion tokens
            optimizer_state="reset",
            data=dict(seq_len=65_536, mixture=_shares(dict(ultrachat=1.0)), chat_template="llama3"),
            model=dict(rope=dict(theta=1.28e8)),
            optimizer=dict(learning_rate=2e-5, warmup_steps=13),
            train=dict(global_batch_size=64, gradient_accumulation_steps=8),
            memory=saved,
        ),
    ]
    if variant == "mini":
        _shrink(config)
    return config


def _sources() -> dict[str, dict]:
    sources = {name: dict(paths=f"prolong/{name}") for name in _SHARES_64K}
    sources["ultrachat"] = dict(paths="prolong/ultrachat", chat_field="messages")
    for name in ("code", "books"):
        sources[f"{name}_512k"] = dict(paths=f"prolong/{name}", pool="full_length")
    return sources


def _shares(shares: dict[str, float], chunk_tokens: int = 0) -> dict[str, dict]:
    """The mixture of a stage; code and books are cut into chunks."""
    mixture: dict[str, dict] = {name: dict(share=share) for name, share in shares.items()}
    for name in {"code", "books"} & shares.keys():
        mixture[name]["chunk_tokens"] = chunk_tokens
    return mixture


def _shrink(config: ConfigDict) -> None:
    """Sequences of 256 and 2,048 tokens of Python code, 512 of synthetic chats; 28 steps in all."""
    shrink_for_cpu(config)
    config.mesh.update(fsdp=2, context=4)
    config.train.update(eval_sequences=2, eval_every_steps=0, checkpoint_every_steps=4)
    config.data.mixture = {
        name: fields | dict(paths="python-stdlib") for name, fields in _sources().items()
    }
    config.data.mixture.ultrachat.paths = (
        __file__.removesuffix("extend_512k.py") + "mini_chats.jsonl"
    )
    mixtures = {
        "64k": _shares(dict(code=1.0)),
        "512k": _shares(dict(code_512k=0.5, code=0.5), chunk_tokens=256),
        "sft": _shares(dict(ultrachat=1.0)),
    }
    # steps, seq_len, global batch size
    sizes = {"64k": (12, 256, 8), "512k": (10, 2048, 2), "sft": (6, 512, 4)}
    stages = []
    for stage in config.stages:
        num_steps, seq_len, batch_size = sizes[stage.name]
        data = dict(seq_len=seq_len, mixture=mixtures[stage.name], chat_template="chatml")
        optimizer = dict(learning_rate=3e-3, warmup_steps=2)
        train = dict(global_batch_size=batch_size, gradient_accumulation_steps=1)
        evals, min_scores = dict[str, object](), ()
        if stage.min_scores:
            evals = dict(lengths=(512,), num_examples=2, depths=(0.5,), batch_size=2)
            min_scores = ("passkey@512=0",)
        stages.append(
            stage.changed(
                steps=num_steps,
                data=data,
                optimizer=optimizer,
                train=train,
                evals=evals,
                min_scores=min_scores,
            )
        )
    config.stages = stages
