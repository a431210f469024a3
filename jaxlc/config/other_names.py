"""Other names of settings and values. Imports no jax.

Old names of settings, which config files, flags and stored configs may have, are one table; to be
removed in 2027-12. Names in other programs are for error messages, which say what they are called
here. The programs are transformers, TRL, Axolotl, Megatron-LM, nanochat, torchtitan and MaxText.
"""

import functools
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from jaxlc.core import SettingError

# The end of an error message <- names of settings. A name with a dot counts only in a section of that name, because its
# last part has several meanings.
_SETTINGS = """
use config.optimizer.learning_rate <- lr peak_lr max_lr base_lr embedding_lr unembedding_lr matrix_lr
use config.optimizer.schedule <- lr_scheduler lr_scheduler_type lr_decay_style lr_schedule lr_schedule_type scheduler
    decay_type
use config.optimizer.warmup_steps, a number of steps <- num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_iters
    warmup
use config.optimizer.warmup_steps, computed as the share x config.train.steps <- warmup_ratio lr_warmup_fraction
    warmup_steps_fraction
use config.optimizer.warmup_steps, computed as the samples / config.train.global_batch_size <- lr_warmup_samples
use config.optimizer.decay_steps, with config.optimizer.schedule=wsd <- lr_wsd_decay_iters num_decay_steps
    cooldown_steps warmdown_iters
use config.optimizer.decay_steps, computed as the share x config.train.steps, with config.optimizer.schedule=wsd <-
    decay_ratio warmdown_ratio
use config.optimizer.schedule_steps <- lr_decay_iters lr_decay_steps learning_rate_schedule_steps
use config.optimizer.final_learning_rate_ratio <- min_lr_ratio min_lr_rate min_lr_factor final_lr_frac
    cosine_min_lr_ratio learning_rate_final_fraction
use config.optimizer.final_learning_rate_ratio, computed as this rate / config.optimizer.learning_rate <- min_lr
use config.optimizer.initial_learning_rate_ratio, computed as this rate / config.optimizer.learning_rate <-
    lr_warmup_init warmup_init_lr
use config.optimizer.beta1 <- adam_beta1 adam_b1 b1
use config.optimizer.beta2 <- adam_beta2 adam_b2 b2
use config.optimizer.beta1 and config.optimizer.beta2 <- betas adam_betas
use config.optimizer.epsilon <- adam_epsilon adam_eps eps
use config.optimizer.weight_decay <- adam_weight_decay wd
use config.optimizer.max_grad_norm <- clip_grad grad_clip gradient_clipping gradient_clipping_threshold max_norm
    grad_norm_clip
use config.train.steps <- steps max_steps train_iters num_iterations num_steps training_steps total_steps max_iters
    num_train_steps train_steps
use config.train.steps, computed as tokens / (config.train.global_batch_size x config.data.seq_len); tokens are the
    FLOPs / (6 x parameters), or the ratio x parameters <- target_flops target_param_data_ratio
use config.train.epochs instead of config.train.steps <- num_train_epochs num_epochs epochs epoch train_epochs
use config.train.tokens, computed as the samples x config.data.seq_len <- train_samples
use config.train.global_batch_size, the sequences of a step over all devices <- train_batch_size gbs
use config.train.global_batch_size, computed as the micro batch x config.train.gradient_accumulation_steps x
    config.mesh.data x config.mesh.fsdp <- batch_size per_device_train_batch_size per_device_batch_size
    micro_batch_size device_batch_size local_batch_size bs train_micro_batch_size_per_gpu mbs
use config.train.global_batch_size, computed as the tokens / config.data.seq_len <- total_batch_size
use config.train.gradient_accumulation_steps <- grad_accum gradient_accumulation grad_accum_steps
    accumulate_grad_batches ga
use config.train.eval_sequences <- max_eval_samples
use config.train.eval_sequences, computed as the batches x their sequences <- per_device_eval_batch_size eval_batch_size
    eval_iters eval_iter eval_max_batches
use config.train.eval_sequences, computed as the tokens / config.data.seq_len <- eval_tokens
use config.train.eval_every_steps <- eval_steps eval_strategy evaluation_strategy eval_interval eval_every do_eval
    val_check_interval
use config.train.eval_every_steps, computed as the steps of an epoch / this number <- evals_per_epoch
use config.train.checkpoint_every_steps <- save_steps save_interval save_every checkpoint_period save_strategy
    checkpoint.interval checkpoint_interval
use config.train.checkpoint_every_steps, computed as the steps of an epoch / this number <- saves_per_epoch
use config.train.keep_checkpoints <- save_total_limit keep_latest_k max_to_keep max_num_checkpoints_to_keep
use config.train.keep_best_checkpoints <- load_best_model_at_end metric_for_best_model greater_is_better
use config.train.log_every_steps <- logging_steps log_interval log_freq log_period log_every logging_strategy
use config.train.wandb_project <- report_to wandb use_wandb enable_wandb wandb_entity wandb_mode run
use config.train.trainable <- unfrozen_parameters modules_to_save lora_modules_to_save trainable_parameters
use config.train.frozen <- freeze freeze_layers frozen_parameters freeze_embeddings
use config.train.z_loss <- z_loss_multiplier z_loss_weight use_z_loss
use config.train.balance_loss <- router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff load_balance_loss_weight
    output_router_logits moe_router_load_balancing_type
use config.train.router_z_loss <- moe_z_loss_coeff router_z_loss_coef
use config.train.balance_bias_rate <- moe_router_bias_update_rate routed_bias_update_rate expert_bias_update_rate
use config.train.seed, and config.data.seed <- data_seed random_seed data_shuffle_seed init_weights_seed
use config.data.seq_len <- max_length max_seq_length max_seq_len sequence_len seq_length seq_len sequence_length
    block_size context_length max_target_length cutoff_len max_sequence_length model_max_length max_position_embeddings
    n_ctx context_len decoder_seq_length
use config.data.sources <- data dataset dataset_name dataset_path datasets data_path data_paths train_files train_file
    hf_path train_data_path dataset_dir dataset_names train_data corpus
use config.data.mixture.NAME.share <- dataset_weights mixing_ratio interleave_probs sampling_ratio data_blend
    source.weight source.ratio source.probability source.sampling_weight
use config.data.mixture.NAME.chat_format <- dataset_format prompt_template conversation_format type
use config.data.mixture.NAME.chat_field <- field_messages messages_field message_field messages_key
use config.data.text_field <- dataset_text_field text_column text_key field text_column_name
use config.data.tokenizer <- tokenizer_name tokenizer_name_or_path tokenizer_model tokenizer_path tokenizer_type
    processing_class tokenizer_config
use config.data.chat_template <- chat_template_path chat_template_jinja template
use config.data.end_token <- eos_token
use config.data.eval_fraction <- val_set_size test_size validation_split eval_split split
use config.data.eval_sources <- eval_dataset validation_files validation_file test_datasets eval_files valid_data_path
    hf_eval_files
use config.data.cache_dir <- dataset_prepared_path data_cache_path dataset_cache_dir
use config.data.tokenizing_processes <- dataset_num_proc preprocessing_num_workers dataset_processes num_proc
use config.data.prefetch_steps <- dataloader_num_workers num_workers dataloader_prefetch_factor prefetch_factor
use config.data.overlong_traces <- truncation_mode truncation_side excess_length_strategy
use config.model.init_from <- base_model model_name_or_path pretrained_model_name_or_path load_parameters_path
    load_from pretrained_checkpoint checkpoint_path finetune_from initial_load_path load
use config.model.preset, or config.model.init_from for pretrained weights <- model model_name model_type model.name
    model.flavor model.type model_config config_name architecture
use config.model.num_layers <- num_hidden_layers n_layer n_layers base_num_decoder_layers depth num_decoder_layers
use config.model.model_dim <- hidden_size n_embd d_model base_emb_dim emb_dim embed_dim hidden_dim dim
use config.model.model_dim, computed as the ratio x config.model.num_layers <- aspect_ratio
use config.model.ffn_dim <- intermediate_size ffn_hidden_size base_mlp_dim mlp_dim d_ff
use config.model.ffn_dim, computed as the factor x 8/3 x config.model.model_dim, rounded up <- ffn_dim_multiplier
use config.model.attention.num_heads <- num_attention_heads n_head n_heads base_num_query_heads num_query_heads
use config.model.attention.num_kv_heads <- num_key_value_heads n_kv_head n_kv_heads base_num_kv_heads num_query_groups
use config.model.attention.head_dim <- kv_channels d_head
use config.model.tie_embeddings <- tie_word_embeddings logits_via_embedding untie_embeddings_and_output_weights
    weight_tying
use config.model.norm_epsilon <- rms_norm_eps layernorm_epsilon norm_eps normalization_layer_epsilon
use config.model.attention.qkv_bias <- attention_bias add_qkv_bias add_bias_linear use_qkv_bias
use config.model.attention.qk_norm <- qk_layernorm use_qk_norm
use config.model.activation <- hidden_act hidden_activation mlp_activations swiglu act_fn
use config.model.rope.theta <- rope_base rotary_base rope_max_timescale rope_wavelength base_frequency
use config.model.rope.factor, with config.model.rope.scaling <- rope_factor rope_scaling_type scaling_factor
    rope_type yarn_factor
use config.model.attention.window <- sliding_window window_size sliding_window_size sliding_window_pattern
    window_pattern
use config.model.vocab_size <- padded_vocab_size n_vocab make_vocab_size_divisible_by
use config.model.experts.experts_per_token <- num_experts_per_tok moe_router_topk top_k_experts num_active_experts
    moe_top_k
use config.model.experts.num_experts <- num_local_experts n_routed_experts moe_num_experts
use config.model.experts.ffn_dim <- moe_intermediate_size moe_ffn_hidden_size base_moe_mlp_dim
use config.model.experts.shared_ffn_dim <- shared_expert_intermediate_size moe_shared_expert_intermediate_size
use config.model.experts.shared_ffn_dim, computed as their number x config.model.experts.ffn_dim <- n_shared_experts
use config.model.first_layer_kinds, with as many kinds as layers <- first_k_dense_replace moe_layer_freq
    first_num_dense_layers
use config.lora.rank <- lora lora_r lora_rank r adapter use_lora use_peft peft_config
use config.lora.alpha <- lora_alpha
use config.lora.projections <- target_modules lora_target_modules lora_target_linear lora_target lora_layers
use config.lora.rslora <- use_rslora peft_use_rslora
use config.lora.init_from <- lora_model_dir adapter_name_or_path peft_model_path lora_path
use config.mesh.tensor <- tp tp_size tensor_parallel tensor_model_parallel_size tensor_parallel_size
    tensor_parallel_degree ici_tensor_parallelism
use config.mesh.context <- cp cp_size context_parallel context_parallel_size context_parallel_degree sp sp_size
    sequence_parallel_size sequence_parallel_degree ici_context_parallelism ulysses_size
use config.mesh.data <- dp dp_size ddp data_parallel data_parallel_size data_parallel_replicate_degree
    dp_replicate_size dcn_data_parallelism ici_data_parallelism
use config.mesh.fsdp <- dp_shard dp_shard_size data_parallel_shard_degree ici_fsdp_parallelism dcn_fsdp_parallelism
    fsdp_size fsdp_config fsdp_version deepspeed zero zero_stage use_distributed_optimizer
use config.attention.kernel <- attention attn_implementation attention_backend flash_attention flash_attn
    use_flash_attn attn_impl sdp_attention use_flash_attention_2 xformers_attention attn_backend use_flash_attn_2
use config.attention.strategy <- cp_comm_type context_parallel_load_balance ring_attn_func cp_implementation
    context_parallel_strategy context_parallel_rotate_method heads_k_stride
use config.attention.document_mask <- reset_attention_mask cross_document_attention eod_mask_loss
use config.memory.remat <- gradient_checkpointing activation_checkpointing recompute_granularity recompute_activations
    remat_policy ac_mode activation_checkpoint.mode recompute_method selective_ac_option gradient_checkpointing_kwargs
    use_gradient_checkpointing activation_checkpoint recompute
use config.memory.layers_per_remat_group <- recompute_num_layers
use config.memory.offload <- activation_offloading cpu_offload_activations offload_activations
use config.memory.optimizer=host <- optimizer_offload optimizer_cpu_offload optimizer_memory_host_offload
    offload_optimizer
use config.memory.parameters=host <- cpu_offload parameter_memory_host_offload offload_params fsdp_offload_params
use config.memory.loss_chunk_tokens <- num_vocab_tiling loss_chunk_size chunked_cross_entropy cut_cross_entropy
use config.precision.compute <- precision bf16 fp16 fp8 tf32 dtype torch_dtype mixed_precision amp half
    mixed_precision_param weight_dtype quantization fp8_recipe fp8_format float8 bfloat16 precision_type
    mixed_precision_policy
use config.precision.reduce <- grad_reduce_in_fp32 mixed_precision_reduce accumulate_allreduce_grads_in_fp32 grad_dtype
    reduce_dtype
use config.precision.loss_scale <- initial_loss_scale init_scale
use config.profile.steps <- profiler profile_step_start profile_freq enable_profiling use_torch_profiler profiler_steps
    skip_first_n_steps_for_profiler
use config.runtime.num_processes <- world_size nnodes num_nodes nproc_per_node num_machines
use config.runtime.process_id <- node_rank local_rank machine_rank
use config.runtime.coordinator_address <- master_addr master_port rdzv_endpoint main_process_ip
use config.runtime.start_timeout_seconds <- ddp_timeout init_timeout_seconds
use config.runtime.start_timeout_seconds, computed as 60 x the minutes <- distributed_timeout_minutes
use config.runtime.topology <- compile_topology gpu_type
use config.runtime.deterministic <- full_determinism use_deterministic_algorithms deterministic_mode
use config.posttrain.loss <- loss_type rl rl_algorithm preference_loss adv_estimator policy_loss_type
use config.posttrain.beta <- dpo_beta rl_beta kl_beta kto_beta simpo_beta
use config.posttrain.target_margin <- simpo_gamma
use config.posttrain.desirable_weight <- kto_chosen_weight
use config.posttrain.undesirable_weight <- kto_rejected_weight
use config.posttrain.kl <- kl_coef kl_coeff kl_loss_coef init_kl_coef kl_penalty
use config.posttrain.clip_low <- posttrain.epsilon cliprange clip_ratio clip_ratio_low clip_eps cliprange_low
    epsilon_low
use config.posttrain.clip_high <- epsilon_high clip_ratio_high cliprange_high
use config.posttrain.reference <- ref_model_type reference_free use_ref_model precompute_ref_log_probs
use config.posttrain.reference_model <- ref_model ref_model_path ref_model_name reward_ref_model
use config.posttrain.ratio <- importance_sampling_level
use config.posttrain.scale_advantages <- scale_rewards norm_adv_by_std_in_grpo whiten_advantages
use config.posttrain.importance_weights <- vllm_importance_sampling_correction use_tis rollout_is
use config.posttrain.weight_mode <- vllm_importance_sampling_mode
use config.posttrain.weight_max <- vllm_importance_sampling_cap vllm_importance_sampling_clip_max tis_imp_ratio_cap
    truncated_importance_sampling_ratio rollout_is_threshold
use config.posttrain.weight_min <- vllm_importance_sampling_clip_min
use config.posttrain.no_advantage <- filter_groups
use config.rollouts.max_replacements <- dynamic_sampling use_dynamic_sampling max_num_gen_batches
use config.rollouts.max_policy_age <- max_staleness max_off_policy_steps max_trajectory_age_steps
use config.posttrain.mask_truncated <- mask_truncated_completions overlong_filtering
use config.rollouts.answers_per_prompt <- num_generations num_samples_per_prompt n_samples_per_prompt group_size
    num_generations_per_prompt rollout.n
use config.rollouts.prompts_per_step <- rollout_batch_size generation_batch_size num_prompts_per_step
use config.rollouts.max_tokens <- max_completion_length max_new_tokens response_length max_response_length
    max_output_length
use config.rollouts.reward <- reward_funcs reward_fn reward_function reward_model reward_model_path rm_type
use config.rollouts.prompts <- prompt_dataset prompt_data prompt_files
use config.rollouts.source; model samples in the run, and files takes the answers of another program <- use_vllm
    vllm_mode vllm_server_host rollout_backend
use config.evals.tasks <- eval_tasks lm_eval_tasks core_metric_every
always on: documents are packed into sequences <- packing sample_packing eval_packing eval_sample_packing pack
    packing_strategy neat_packing pad_to_sequence_len padding_free group_by_length multipack
always on: only the answers of chats and traces are trained on <- train_on_inputs assistant_only_loss
    completion_only_loss train_on_prompt mask_history roles_to_train response_only
always on: a run resumes from the latest checkpoint in --workdir <- resume resume_from_checkpoint
    auto_resume_from_checkpoints resume_from_step load_full_state_path overwrite_output_dir load_checkpoint
always on: the whole step is compiled <- torch_compile compile enable_compile cuda_graphs use_liger_kernel liger_kernel
    scan_layers enable_cuda_graph
always on: checkpoints are written in the background <- async_save async_checkpointing async_mode enable_checkpointing
    save_only_model
always on with config.mesh.tensor <- sequence_parallel sequence_parallelism
always on with config.attention.document_mask <- reset_position_ids pad_sequences intra_document_mask
use --workdir, which has checkpoints, metrics and plots <- output_dir base_output_directory run_name save save_dir
    checkpoint_dir dump_folder out_dir checkpoint.folder ckpt_dir experiment_name logging_dir model_tag wandb_name
    wandb_run_name wandb_run_id exp_name work_dir logdir tensorboard_dir output_path save_path
use config.optimizer.name, adamw or muon; jaxlc.train.run takes another one as its argument optimizer <- optimizer
    optim optimizer_type optimizer.type opt opt_type muon use_muon optim_args
unsupported: there is no dropout <- dropout lora_dropout hidden_dropout attention_dropout attn_dropout resid_pdrop
    embd_pdrop attn_pdrop hidden_dropout_prob dropout_rate embedding_dropout disable_dropout
unsupported: there is no pipeline parallelism <- pp pp_size pipeline_parallel pipeline_model_parallel_size
    pipeline_parallel_size pipeline_parallel_degree ici_pipeline_parallelism num_layers_per_virtual_pipeline_stage
unsupported: ranks gather the weights of experts, which config.mesh.fsdp splits; docs/experts.md <- ep ep_size
    expert_parallel expert_model_parallel_size expert_parallel_size expert_parallel_degree ici_expert_parallelism
unsupported: routers drop no tokens <- capacity_factor moe_expert_capacity_factor expert_capacity drop_tokens
    moe_token_drop_policy
use config.precision.frozen=nf4; other quantized weights are unsupported <- load_in_4bit load_in_8bit
    quantization_config bnb_4bit_quant_type quant_method qlora gptq bits quantization_bit use_qlora
unsupported: only LoRA adapters <- use_dora dora peft_use_dora pissa loraplus_lr_ratio loftq lora_bias prompt_tuning
    lora_init
use config.train.early_stop_evals <- early_stopping_patience
use config.train.sample_every_steps, with config.train.sample_prompts <- sample_every
unsupported <- neftune_noise_alpha noisy_embedding_alpha ema ema_decay use_ema layer_drop torch_empty_cache_steps
    trust_remote_code label_smoothing_factor multi_token_prediction mtp_num_layers
    auto_find_batch_size no_cuda final_logit_softcapping attn_logit_softcapping
unsupported: use --push_to_hub of `jaxlc export` after the run <- push_to_hub hub_model_id hub_strategy
    hub_token hub_private_repo
unsupported: a batch of rollouts has one update <- ppo_epochs num_ppo_epochs rollouts.num_iterations mini_batch_size
    posttrain.num_iterations steps_per_generation ppo_mini_batch_size
unsupported: rewards have no value model; use config.posttrain.loss=grpo <- value_model vf_coef gamma lam critic
    value_model_path critic_model
detected: JAX uses the GPUs of the machine, and without one the CPU <- device device_type use_cpu hardware accelerator
unsupported in rollouts, whose importance weights need the probabilities of the policy; jaxlc generate and jaxlc chat
    have it <- top_k min_p repetition_penalty
unsupported: sampling has temperature, top_p, top_k, min_p and repetition_penalty <- num_beams do_sample
    num_return_sequences best_of num_samples
use jaxlc train <- sft dpo grpo finetune fine_tune pretrain fit kto_train resume_training
use jaxlc generate <- infer inference sample
use jaxlc eval <- evaluate lm_eval benchmark
use jaxlc data show <- preprocess tokenize prepare inspect
use jaxlc export, whose directory other programs serve <- serve vllm merge merge_lora convert deploy upload
"""

# A valid value, or several <- names of it, for settings that have it.
_VALUES = """
bf16 <- bfloat16 torch.bfloat16 bf16-mixed mixed_bf16
fp32 <- float32 torch.float32 float no 32 full_precision
fp16 <- float16 torch.float16 half 16
fp8 <- float8 e4m3 e4m3fn fp8_e4m3
auto <- flash flash_attention flash_attention_2 flash_attn fa2 flash2 sdpa default
fa3 <- flash_attention_3 flash_attn_3 flash3
cudnn <- cudnn_flash_te fused cudnn_flash cudnn_attention
reference <- eager math dot_product naive unfused
cosine <- cosine_with_min_lr cosine_with_warmup
constant <- constant_with_warmup
wsd <- warmup_stable_decay trapezoidal
linear <- linear_with_warmup
ring <- p2p zigzag ring_attention zigzag_ring varlen_llama3 alltoall_free batch_ring batch_zigzag ring_attn
ulysses <- a2a all_to_all alltoall deepspeed_ulysses
hybrid <- a2a+p2p usp
all_gather <- allgather all-gather llama3
full <- true uniform block
attention <- save_attention
matmuls <- minimal minimal_flash minimal_with_context
none <- false off
silu <- swish swiglu
gelu_tanh <- gelu_pytorch_tanh gelu_new gelu_fast
dr_grpo <- dr-grpo drgrpo
messages <- openai chatml chat_template chat
query <- q_proj wq linear_q
key <- k_proj wk linear_k
value <- v_proj wv linear_v
attention_projected <- o_proj wo out_proj linear_proj
mlp_gate <- gate_proj w1
mlp_up <- up_proj w3
mlp_down <- down_proj w2 linear_fc2
query, key, value <- qkv_proj linear_qkv
mlp_gate, mlp_up <- linear_fc1 gate_up_proj
query, key, value, attention_projected, mlp_gate, mlp_up, mlp_down, the default <- all-linear all_linear all
grpo with config.posttrain.ratio=sequence <- gspo
simpo or dpo, since ORPO is unsupported <- orpo
"""
# Values that are none of the valid ones, although some are spelled alike.
_WITHOUT_EQUIVALENT = """
ipo cpo ppo rloo bco gkd cosine_with_restarts polynomial inverse_sqrt relu relu2 gelu int8
"""


def meaning_of(path: str) -> str:
    """What to use instead of a setting of another program, as the end of a sentence; "" for an
    unknown name.

    Args:
      path: as typed, with or without sections: "optimizer.lr", "num-train-epochs".
    """
    *sections, name = path.lower().replace("-", "_").split(".")
    section = sections[-1] if sections else ""
    by_name = _by_name(_SETTINGS)
    return (
        by_name.get(f"{section}.{name}")
        or by_name.get(name)
        or by_name.get(f"{section}_{name}", "")
    )


def value_of(value: str, valid: Container[str]) -> str:
    """What to use instead of a value of another program: one of the `valid` ones, or several; ""
    for an unknown one.
    """
    text = _by_name(_VALUES).get(value.lower(), "")
    return text if re.split(",? ", text)[0] in valid else ""


def has_no_equivalent(value: str) -> bool:
    """Whether a value of another program is none of the valid ones, although it may be spelled like
    one.
    """
    return value.lower() in _WITHOUT_EQUIVALENT.split()


@functools.cache
def _by_name(table: str) -> dict[str, str]:
    """The left side of the row of each name."""
    return {name: text for text, names in _rows(table) for name in names}


def _rows(table: str) -> list[tuple[str, list[str]]]:
    """The left side of each row, and its names. The lines of a row after the first are indented."""
    rows = (row.partition("<-") for row in re.split(r"\n(?=\S)", table.strip()))
    return [(" ".join(text.split()), names.split()) for text, _, names in rows]


def rows() -> Iterator[tuple[str, list[str]]]:
    """What to use here, and the names in other programs: of settings, then of values."""
    yield from _rows(_SETTINGS)
    for text, names in _rows(_VALUES):
        yield (f"the value {text}", names)
    yield "unsupported as a value", [*_WITHOUT_EQUIVALENT.split()]


# Path in the section model <- its old name there.
_OLD_NAMES = """
delta_net.key_heads <- delta_key_heads
delta_net.value_heads <- delta_value_heads
delta_net.key_dim <- delta_key_dim
delta_net.value_dim <- delta_value_dim
delta_net.conv_taps <- delta_conv_taps
delta_net.norm_placement <- delta_norm_placement
delta_net.norm_epsilon <- delta_norm_epsilon
delta_net.negative_eigenvalues <- delta_negative_eigenvalues
rope.sliding_theta <- sliding_rope_theta
rope.sliding_scaling <- sliding_rope_scaling
rope.theta <- rope_theta
rope.scaling <- rope_scaling
rope.fraction <- rope_fraction
rope.factor <- rope_scaling_factor
rope.original_tokens <- rope_scaling_original_tokens
rope.low_freq_factor <- rope_scaling_low_freq_factor
rope.high_freq_factor <- rope_scaling_high_freq_factor
rope.beta_fast <- rope_scaling_beta_fast
rope.beta_slow <- rope_scaling_beta_slow
rope.attention_factor <- rope_scaling_attention_factor
rope.truncate <- rope_scaling_truncate
rope.query_beta <- rope_scaling_query_beta
rope.query_mscale <- rope_scaling_query_mscale
rope.short_factors <- rope_scaling_short_factors
rope.long_factors <- rope_scaling_long_factors
attention.num_heads <- num_heads
attention.num_kv_heads <- num_kv_heads
attention.head_dim <- head_dim
attention.qk_norm <- qk_norm
attention.qkv_bias <- qkv_bias
attention.out_bias <- attention_out_bias
attention.sinks <- attention_sinks
attention.gate <- attention_gate
attention.query_scale_dim <- query_scale_dim
attention.output_multiplier <- attention_output_multiplier
attention.window <- window
experts.num_experts <- num_experts
experts.experts_per_token <- experts_per_token
experts.ffn_dim <- expert_ffn_dim
experts.router <- router
experts.renormalize <- renormalize_router
experts.choice_bias <- router_choice_bias
experts.groups <- router_groups
experts.groups_per_token <- router_groups_per_token
experts.scale <- router_scale
experts.bias <- expert_bias
experts.shared_ffn_dim <- shared_ffn_dim
experts.shared_gate <- shared_expert_gate
"""
RENAMED = _by_name(_OLD_NAMES)
_PREFIX = re.compile(r"(stages\.[^.]+\.)?model\.")


def new_path(path: str) -> str:
    """The path of a setting, where `path` has an old name of it; otherwise `path`."""
    prefix = _PREFIX.match(path)
    return prefix[0] + RENAMED.get(path[prefix.end() :], path[prefix.end() :]) if prefix else path


def renamed(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the part at the path `part`, with new names in place of old ones.

    Raises:
      SettingError: an old and a new name of one setting have different values.
    """
    result = dict(values)
    for name, value in values.items():
        section, _, setting = new_path(f"{part}.{name}").removeprefix(f"{part}.").rpartition(".")
        if not section:
            continue
        own = dict(result.get(section) or {})
        if value is not None:
            check_same(f"{part}.{name}", value, f"{part}.{section}.{setting}", own.get(setting))
            own[setting] = value
        del result[name]
        result[section] = own
    return result


def check_same(old: str, old_value: Any, new: str, new_value: Any) -> None:
    """Checks the values of an old and a new name of a setting, or None.

    Raises:
      SettingError: they differ.
    """
    if None not in (old_value, new_value) and old_value != new_value:
        raise SettingError(
            f"config.{old}={old_value} contradicts config.{new}={new_value}: {old} is the old name of {new}; remove it"
        )
