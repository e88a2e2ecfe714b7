"""Each rule reports its mistake with the value that was given, and nothing otherwise."""

import math
from pathlib import Path

import pytest
from config.minimal import PUBLISHED_RUNS, TRAINABLE, check_rules, config_with, published_arguments

from megatron.config.fields import ConfigWithOrigin, all_fields, build_config, flatten
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.rules.finding import IfGiven, PlanContext
from megatron.plan.rules.lists import CONFIG_RULES, PLAN_RULES
from megatron.plan.rules.numbers import check_ranges
from megatron.schedule.position import Progress

GUARDED = {"spike_guard": "rollback", "save": "run", "load": "run", "save_interval": 5}
"""A run whose spike guard may roll back."""

VARLEN = {
    "use_varlen_attention": True,
    "reset_attention_mask": True,
    "vocab_file": "v",
    "merge_file": "m",
    "bf16": True,
    "attention_dropout": 0.0,
}
"""A run that computes the attention of all documents in one call."""

COMPLETEP: dict[str, object] = {
    "parametrization": "completep",
    "base_width": 8,
    "base_depth": 1,
}
HYBRID: dict[str, object] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "2",
}
LATENT: dict[str, object] = {
    "multi_latent_attention": True,
    "position_embedding_type": "rotary",
    "add_bias_linear": False,
}
ON_A_STORE: dict[str, object] = {"save": "s3://bucket/run", "local_dir": "local"}
FAILURES: list[tuple[dict[str, object], str]] = [
    ({"save": "s3://bucket/run"}, "needs --local-dir, a folder of each host"),
    ({"load": "s3://bucket/run"}, "needs --local-dir, a folder of each host"),
    (
        {**ON_A_STORE, "save": "gs://bucket/run"},
        "--save gs://bucket/run is not on a store with the interface of S3",
    ),
    (
        {**ON_A_STORE, "load": "s3://key:secret@bucket/run"},
        "--load s3://***@bucket/run must have no user, password or query",
    ),
    ({**ON_A_STORE, "load": "s3://bucket//run"}, "--load s3://bucket//run must be s3://bucket/run"),
    ({**ON_A_STORE, "hf_export_interval": 5}, "--hf-export-interval 5 needs a folder for --save"),
    ({**ON_A_STORE, "load": "s3:/b/run"}, "--load s3:/b/run must be s3://bucket/run, with two"),
    ({**ON_A_STORE, "load": "s3:/key:1/secret@b/run"}, "--load s3:/***@b/run must be s3://bucket"),
    ({**ON_A_STORE, "save": "s3://my run/a"}, "has 'my run' as bucket, whose name may have"),
    ({"save": "run", "save_staging": "x"}, "--save-staging x needs --local-dir"),
    ({"spike_guard": "rollback"}, "needs the same folder for --save and --load"),
    ({"spike_guard": "rollback", "save": "run", "load": "run"}, "give --save-interval"),
    (
        {**GUARDED, "load_iteration": 5},
        "--load-iteration 5 cannot be combined with --spike-guard rollback",
    ),
    ({**GUARDED, "save_optim": False}, "needs the optimizer's state in the checkpoints"),
    (
        {**GUARDED, "spike_guard_patience": 20},
        "the run would end before the guard rolls back",
    ),
    (
        {"spike_guard_min_steps": 200},
        "--spike-guard-min-steps 200 and --spike-guard-window 128: the first must not be larger",
    ),
    (
        {"profile_iterations": "12", "profile_dir": "traces"},
        "--profile-iterations '12' is not FIRST-LAST",
    ),
    ({"profile_iterations": "3-4"}, "--profile-iterations 3-4 needs a folder: give --profile-dir"),
    ({"memory_snapshot": True}, "--memory-snapshot needs a folder: give --profile-dir"),
    (
        {"checkpoint_activations": True, "checkpoint_fraction": "1/0"},
        "--checkpoint-fraction 1/0 must be a fraction above 0 and at most 1",
    ),
    (
        {"checkpoint_activations": True, "checkpoint_fraction": "3"},
        "--checkpoint-fraction 3 must be a fraction above 0 and at most 1",
    ),
    ({"train_samples": 5}, "--train-iters 10 and --train-samples 5 both set the length"),
    ({"train_iters": None}, "use --train-iters or --train-samples"),
    (
        {"train_iters": None, "train_tokens": 10**6, "seq_length": 16},
        "--train-tokens 1000000 can only end it earlier. The same length is --train-samples 62500",
    ),
    ({"train_time": "3h"}, "--train-iters 10 and --train-time 3h both set the length"),
    ({"train_iters": None, "train_time": "3"}, "--train-time 3: '3' must be a time above 0"),
    ({"eval_interval_time": "0s"}, "--eval-interval-time 0s: '0s' must be a time above 0"),
    (
        {"train_iters": None, "train_time": "3h", "train_tokens": 5},
        "--train-tokens 5 cannot be combined with --train-time 3h; the time ends the run",
    ),
    (
        {"train_iters": None, "train_time": "3h", "lr_decay_samples": 5},
        "--lr-decay-samples 5 cannot be combined with --train-time 3h; the learning rate follows",
    ),
    (
        {"train_iters": None, "train_time": "3h", "lr_wsd_decay_iters": 5},
        "--lr-wsd-decay-iters 5 cannot be combined with --train-time 3h; give --lr-wsd-decay-fr",
    ),
    (
        {"train_iters": None, "train_time": "3h", "lr_warmup_iters": 5, "lr_warmup_samples": 5},
        "--lr-warmup-iters 5 and --lr-warmup-samples 5 both set the length of the warm-up",
    ),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5, "lr_wsd_decay_fraction": 0.1},
        "--lr-wsd-decay-fraction 0.1 and --lr-wsd-decay-iters 5 both set the length",
    ),
    (
        {"lr_decay_samples": 5},
        "--lr-decay-samples 5 cannot be combined with --train-iters 10; use --lr-decay-iters.",
    ),
    (
        {"lr_warmup_samples": 5},
        "--lr-warmup-samples 5 cannot be combined with --train-iters 10; use --lr-warmup-iters.",
    ),
    (
        {"train_iters": None, "train_samples": 9, "lr_wsd_decay_iters": 5},
        "--lr-wsd-decay-iters 5 cannot be combined with --train-samples 9; use --lr-wsd-decay-",
    ),
    (
        {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5},
        "--lr-warmup-fraction 0.1 and --lr-warmup-iters 5 both",
    ),
    ({"lr": None}, "--lr is required"),
    ({"save_at": (5,)}, "--save-at 5 needs --save"),
    ({"async_save": True}, "--async-save needs --save"),
    (
        {"pretrained_checkpoint": "base", "load": "a", "save": "b"},
        "--pretrained-checkpoint base needs --load to be the folder of --save",
    ),
    ({"keep_latest_checkpoints": 2}, "--keep-latest-checkpoints 2 needs --save"),
    ({"tracker": ("wandb",)}, "--tracker wandb needs --save"),
    (
        {"save": "ckpt", "keep_for_handover": 10},
        "--keep-for-handover 10 needs --keep-latest-checkpoints",
    ),
    (
        {"save": "ckpt", "keep_every": 10},
        "--keep-every 10 needs --keep-latest-checkpoints",
    ),
    ({"load_iteration": 5}, "--load-iteration 5 needs --load"),
    ({"save": ""}, "--save has an empty value; is a shell variable unset?"),
    ({"data_path": ("1", "", "1", "b")}, "--data-path has an empty value"),
    (
        {"rampup_batch_size": (1, 1, 5), "step_batch_size_schedule": ("0:1",)},
        "--rampup-batch-size 1 1 5 and --step-batch-size-schedule 0:1 exclude each other",
    ),
    (
        {"step_batch_size_schedule": ("0:1",), "gradient_accumulation_steps": 2},
        "--step-batch-size-schedule 0:1 and --gradient-accumulation-steps 2 exclude each other",
    ),
    (
        {"override_lr_scheduler": True, "use_checkpoint_lr_scheduler": True},
        "--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other",
    ),
    ({"fp16": True, "bf16": True}, "--fp16 and --bf16 exclude each other; give one of them."),
    (
        {"initial_loss_scale": 2.0, "min_loss_scale": 4.0},
        "--min-loss-scale 4.0 must not exceed --initial-loss-scale 2.0",
    ),
    ({"num_attention_heads": 5}, "--num-attention-heads 5 must divide --hidden-size 64"),
    (
        {"num_query_groups": 3},
        "--num-query-groups 3 must divide --num-attention-heads 4; use one of 1, 2, 4.",
    ),
    (
        {"position_embedding_type": "rotary", "rotary_percent": 0.2},
        "--rotary-percent 0.2 of a head's 16 channels are 3, but rotary positions",
    ),
    ({"position_embedding_type": "rotary", "kv_channels": 5}, "of a head's 5 channels are 5"),
    (
        {"rope_scaling": "llama3", "rope_low_freq_factor": 4.0},
        "--rope-low-freq-factor 4.0 must be below --rope-high-freq-factor 4.0",
    ),
    ({"rope_scaling_factor": 0.0}, "--rope-scaling-factor 0.0 must be above 0"),
    (
        {"rope_scaling": "yarn", "rope_beta_slow": 32.0},
        "--rope-beta-slow 32.0 must be below --rope-beta-fast 32.0",
    ),
    (
        {"rope_scaling": "yarn", "rotary_base": 1.0},
        "--rotary-base 1.0 must be above 1 with --rope-scaling yarn",
    ),
    ({"sliding_window": 0}, "--sliding-window 0 must be at least 1"),
    ({"no_rope_layers": "1,x"}, "--no-rope-layers 1,x: 'x' is neither a number nor START:STOP"),
    ({"no_rope_layers": "99"}, "'99' chooses none of the layers 0 to "),
    ({"no_rope_layers": "-1"}, "'-1' is neither a number"),
    ({"full_attention_layers": "::0"}, "'::0' has the step 0; use 1 or more"),
    (
        {"activation": "xielu", "glu_activation": "swiglu"},
        "--activation xielu and --glu-activation swiglu exclude each other",
    ),
    ({"parametrization": "mup"}, "--parametrization mup needs --base-width"),
    ({**COMPLETEP, "base_depth": None}, "--parametrization completep needs --base-depth"),
    ({**COMPLETEP, "output_init_method_std": 0.1}, "leave out --output-init-method-std 0.1"),
    (
        {**COMPLETEP, "parametrization": "mup"},
        "--parametrization mup has no rule for the depth; use --parametrization completep",
    ),
    ({**COMPLETEP, "init_method_std": "small"}, "and so does --init-method-std small"),
    ({**COMPLETEP, "deepspeed": True}, "leave out --deepspeed"),
    (
        {"replay_interval": 100, "deepspeed": True},
        "--deepspeed and --replay-interval 100 exclude each other",
    ),
    (
        {"softmax_type": "learnable", "attention_backend": ("fused", "efficient")},
        "--softmax-type learnable is computed by the kernels flash and unfused",
    ),
    (
        {**COMPLETEP, "softmax_type": "off-by-one"},
        "--softmax-type off-by-one has no rule in --param",
    ),
    (
        {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 1}
        | {"moe_router_group_score": "max", "moe_router_topk": 3},
        "--moe-router-topk 3 must be at most 2, the experts of the groups",
    ),
    ({**LATENT, "qk_pos_emb_head_dim": 7}, "--qk-pos-emb-head-dim 7 must be even"),
    ({**LATENT, "position_embedding_type": "alibi"}, "rotary, not alibi"),
    ({**LATENT, "add_bias_linear": True}, "--multi-latent-attention has no biases"),
    ({**LATENT, "num_query_groups": 1}, "leave out --num-query-groups 1"),
    ({**LATENT, "kv_channels": 8}, "leave out --kv-channels 8"),
    ({**LATENT, **COMPLETEP}, "it has no rule there; leave out --parametrization completep"),
    ({**LATENT, "attention_output_gate": True}, "has no gate; leave out --attention-output-gate"),
    ({**LATENT, **HYBRID}, "it was not compared with gated delta nets"),
    (
        {**LATENT, "fp8_format": "e4m3", "fp8_recipe": "rowwise", "bf16": True},
        "its products have no float8 form",
    ),
    (
        {**HYBRID, "linear_attention_freq": None},
        "--experimental-attention-variant gated_delta_net needs --linear-attention-freq, as",
    ),
    ({**HYBRID, "linear_attention_freq": "1"}, "--linear-attention-freq 1 leaves no layer with"),
    ({**HYBRID, "linear_attention_freq": "[1]*9"}, "'[1]*9' is not a list for"),
    (
        {**HYBRID, "linear_num_value_heads": 24},
        "--linear-num-value-heads 24 must be a multiple of --linear-num-key-heads 16; use 32.",
    ),
    ({**HYBRID, **COMPLETEP}, "and --parametrization completep exclude each other: they were not"),
    (
        {"attention_output_gate": True, "deepspeed": True},
        "--attention-output-gate and --deepspeed exclude each other: they were not compared",
    ),
    ({"base_width": 0}, "--base-width 0 must be at least 1"),
    ({"qk_norm": "full"}, "--qk-norm full needs --normalization RMSNorm, not LayerNorm"),
    ({"goldfish_k": 1, "goldfish_loss": True}, "--goldfish-k 1 must be at least 2"),
    ({"z_loss_coefficient": -1.0}, "--z-loss-coefficient -1.0 must be at least 0"),
    (
        {"max_position_embeddings": 8},
        "--max-position-embeddings 8 must be at least --seq-length 16",
    ),
    ({"split": "1,2,3,4"}, "--split 1,2,3,4 must be one to three numbers"),
    ({"split": "1,-2,3"}, "--split 1,-2,3 must be"),
    ({"split": "0,0,0"}, "--split 0,0,0 must be"),
    ({"split": "a"}, "--split a must be"),
    ({"split": "nan"}, "--split nan must be"),
    (
        {"data_path": ("1", "a", "b")},
        "--data-path 1 a b has 3 values, but a mixture consists of pairs",
    ),
    ({"data_path": ("1", "a", "b", "2")}, "'b' must be a weight"),
    ({"data_path": ("0", "a", "1", "b")}, "'0' must be a weight, a number above 0"),
    (
        {"data_path": ("a",), "train_weighted_split_paths": ("t: 1 0:1 a",)},
        "--data-path a is divided by --split, but --train-weighted-split-paths t: 1 0:1 a defines",
    ),
    (
        {"valid_weighted_split_paths": ("v",), "valid_weighted_split_paths_path": "f"},
        "--valid-weighted-split-paths v and --valid-weighted-split-paths-path f both name the data",
    ),
    (
        {"data_phases": "p.yaml", "data_path": ("a",)},
        "--data-phases p.yaml and --data-path a both name the training data",
    ),
    (
        {"data_phases": "p", "dataset_format": "arrow", "data_path": ("a",), "datasets": "b"},
        "--data-phases p and --datasets b both name the training data",
    ),
    ({"data_phases": "p", "dataset_format": "arrow"}, "needs one folder as --data-path"),
    ({"eos_token": 2, "data_path": ("a",)}, "--eos-token 2 needs --dataset-format"),
    ({"max_document_tokens": 9}, "--max-document-tokens 9 needs --dataset-format"),
    ({"max_ngram_repetition": 0.0}, "--max-ngram-repetition 0.0 needs --dataset-format"),
    ({"drop_duplicates": True}, "--drop-duplicates needs --dataset-format"),
    (
        {"dataset_format": "arrow", "data_path": ("1", "a", "1", "b")},
        "--dataset-format arrow needs one folder as --data-path, and it has 4 values",
    ),
    (
        {"dataset_format": "arrow", "data_path": ("a",), "weights": "1"},
        "--weights 1 needs --datasets",
    ),
    (
        {"dataset_format": "jsonl", "data_path": ("a",), "valid_weighted_split_paths_path": "f"},
        "cannot be used together. Name the folders with --datasets",
    ),
    (
        {"lr_warmup_tokens": 9, "lr_warmup_iters": 5},
        "--lr-warmup-tokens 9 and --lr-warmup-iters 5 both",
    ),
    ({"eval_only": True}, "--eval-only needs --load"),
    ({"require_load": True}, "--require-load needs --load"),
    ({"eval_tasks": ("piqa",)}, "--eval-tasks piqa needs --eval-tasks-interval"),
    ({"eval_tasks_interval": 5}, "--eval-tasks-interval 5 needs --eval-tasks, the names"),
    ({"eval_tasks_folder": "x"}, "--eval-tasks-folder x needs --eval-tasks, the names"),
    ({"eval_tasks_limit": 5}, "--eval-tasks-limit 5 needs --eval-tasks, the names"),
    ({"eval_tasks_num_fewshot": 5}, "--eval-tasks-num-fewshot 5 needs --eval-tasks, the names"),
    ({"finetune": True}, "--finetune needs --load"),
    (
        {"require_load": True, "allow_fresh_start": True, "load": "x"},
        "--require-load and --allow-fresh-start exclude each other",
    ),
    (
        {"pp_partition_method": "parameters", "num_layers_per_virtual_pipeline_stage": 2},
        "--pp-partition-method parameters and --num-layers-per-virtual-pipeline-stage 2 both",
    ),
    (
        {"pp_partition_method": "layers:4,2", "num_layers_per_virtual_pipeline_stage": 2},
        "--pp-partition-method layers:4,2 and --num-layers-per-virtual-pipeline-stage 2 both",
    ),
    ({"cpu_optimizer": True}, "--cpu-optimizer needs --deepspeed; without it, --zero-stage shards"),
    (
        {"exp_avg_sq_dtype": "bf16", "adam_beta2": 0.997},
        "--adam-beta2 0.997 with --exp-avg-sq-dtype bf16: a step would change",
    ),
    (
        {"use_bnb_optimizer": True},
        "--use-bnb-optimizer needs --deepspeed; without it, --zero-stage shards",
    ),
    (
        {"cpu_optimizer": True, "use_bnb_optimizer": True, "deepspeed": True},
        "--cpu-optimizer and --use-bnb-optimizer exclude each other",
    ),
    (
        {"sharding_strategy": "fsdp", "zero_stage": 1},
        "--sharding-strategy fsdp and --zero-stage 1 contradict: fsdp means --zero-stage 3",
    ),
    (
        {"sharding_strategy": "fsdp", "zero_stage": 3, "hsdp_shard_size": 4},
        "--hsdp-shard-size 4 and --sharding-strategy fsdp contradict: only hsdp has groups",
    ),
    (
        {"hsdp_shard_size": 4, "zero_stage": 0},
        "--hsdp-shard-size 4 and --zero-stage 0 contradict: stage 0 shards nothing",
    ),
    (
        {"checkpoint_activations": True, "checkpoint_keep_operators": ("matmul", "softmax")},
        "an operator must be one of matmul, attention",
    ),
    ({"checkpoint_keep_operators": ("matmul",)}, "matmul needs --checkpoint-activations"),
    (
        {
            "checkpoint_activations": True,
            "checkpoint_keep_operators": ("matmul",),
            "recompute_attention_core": True,
        },
        "is not possible with --recompute-attention-core",
    ),
    (
        {"gradient_accumulation_fusion": True},
        "--gradient-accumulation-fusion needs --bf16 or --fp16",
    ),
    (
        {"gradient_accumulation_fusion": True, "bf16": True, "deepspeed": True},
        "--gradient-accumulation-fusion cannot be combined with --deepspeed",
    ),
    ({"fp8_format": "hybrid", "bf16": True}, "add --fp8-recipe tensorwise"),
    (
        {"fp8_format": "hybrid", "fp8_recipe": "rowwise", "fp16": True, "fp8_emulate": True},
        "--fp8-format hybrid cannot be combined with --fp16",
    ),
    (
        {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"},
        "--fp8-format e4m3 needs --bf16: results of float8 products are in bf16",
    ),
    (
        {
            "fp8_format": "e4m3",
            "fp8_recipe": "tensorwise",
            "bf16": True,
            "num_layers": 3,
            "first_last_layers_bf16": True,
            "num_layers_at_end_in_bf16": 2,
        },
        "--num-layers-at-end-in-bf16 2 leave none of 3 layers for --fp8-format e4m3",
    ),
    ({"grad_reduce_in_bf16": True, "fp16": True}, "--grad-reduce-in-bf16 needs --bf16"),
    ({"attention_backend": ("flash", "flash")}, "--attention-backend flash flash names a kernel"),
    ({"attention_backend": ()}, "--attention-backend  needs at least one kernel, or auto"),
    ({"attention_backend": ("flash", "auto")}, "flash auto: auto is a choice of its own"),
    ({"attention_backend": ("by-gpu", "flash")}, "by-gpu flash: by-gpu is a choice of its own"),
    (
        {"attention_backend": ("fused", "flash"), "deterministic_mode": True},
        "--attention-backend fused flash cannot be combined with --deterministic-mode",
    ),
    ({"attention_backend": ("unfused", "flash")}, "the kernels after it would never be used"),
    (
        {"use_torch_compile": True, "attention_backend": ("unfused",)},
        "--attention-backend unfused cannot be combined with --use-torch-compile",
    ),
    (
        {**VARLEN, "attention_backend": ("flash",)},
        "--attention-backend flash cannot be combined with --use-varlen-attention",
    ),
    (
        {**VARLEN, "reset_attention_mask": False},
        "--use-varlen-attention needs --reset-attention-mask",
    ),
    ({**VARLEN, "bf16": False}, "--use-varlen-attention needs --bf16 or --fp16"),
    (
        {**VARLEN, "position_embedding_type": "alibi"},
        "--use-varlen-attention cannot be combined with --position-embedding-type alibi",
    ),
    (
        {**VARLEN, "attention_dropout": 0.1},
        "--use-varlen-attention cannot be combined with --attention-dropout 0.1",
    ),
    (
        {
            **VARLEN,
            "multi_latent_attention": True,
            "position_embedding_type": "rotary",
            "add_bias_linear": False,
            "v_head_dim": 200,
        },
        "the width of a head is 192, and that of its values 200, but its kernel needs",
    ),
    ({**VARLEN, "kv_channels": 20}, "the width of a head is 20, and that of its values 20, but"),
    ({**VARLEN, "kv_channels": 264}, "but its kernel needs a multiple of 8 that is at most 256"),
    (
        {"curriculum_total_step": 9},
        "--curriculum-total-step 9 needs --curriculum-schedule-type",
    ),
    (
        {"curriculum_max_steps": (3, 4)},
        "--curriculum-max-steps 3 4 needs --curriculum-schedule-type",
    ),
    (
        {"curriculum_schedule_type": "fixed_linear", "curriculum_min_difficulty": 8},
        "--curriculum-schedule-type fixed_linear needs --curriculum-total-step.",
    ),
    (
        {"curriculum_schedule_type": "fixed_discrete"},
        "fixed_discrete needs --curriculum-difficulties.",
    ),
    (
        {
            "curriculum_schedule_type": "fixed_linear",
            "curriculum_min_difficulty": 8,
            "curriculum_total_step": 9,
            "curriculum_root_degree": 2,
        },
        "--curriculum-root-degree 2 has no effect with --curriculum-schedule-type fixed_linear",
    ),
    ({"hidden_dropout": 1.0}, "--hidden-dropout 1.0 must be at least 0 and below 1."),
    ({"hidden_dropout": 1e-6}, "--hidden-dropout 1e-06 would be rounded to 0: "),
    ({"attention_dropout": 0.999999}, "--attention-dropout 0.999999 would be rounded to 1: "),
    ({"rotary_percent": 0.0}, "--rotary-percent 0.0 must be above 0 and at most 1."),
    ({"lr_warmup_fraction": 1.5}, "--lr-warmup-fraction 1.5 must be at least 0 and at most 1."),
    ({"lr_warmup_init": -1e-5}, "--lr-warmup-init -1e-05 must be at least 0."),
    ({"ademamix_beta3": 1.0}, "--ademamix-beta3 1.0 must be at least 0 and below 1."),
    ({"ademamix_alpha": -1.0}, "--ademamix-alpha -1.0 must be at least 0."),
    ({"ademamix_beta3_warmup": 0}, "--ademamix-beta3-warmup 0 must be at least 1."),
    ({"num_experts": 1}, "--num-experts 1 must be at least 2"),
    (
        {"num_experts": 4, "moe_router_topk": 1},
        "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over a single expert is 1",
    ),
    ({"num_experts": 4, "moe_router_topk": 5}, "--moe-router-topk 5 must be at most --num-experts"),
    (
        {"num_experts": 4, "moe_layer_freq": "[1]*9"},
        "--moe-layer-freq [1]*9: '[1]*9' is not a list",
    ),
    ({"num_experts": 4, "moe_layer_freq": "0*"}, "--moe-layer-freq 0*: '0*' is neither a number"),
    ({"num_experts": 4, "moe_layer_freq": "[0]*2"}, "leaves no layer with experts"),
    (
        {
            "num_experts": 4,
            "checkpoint_activations": True,
            "checkpoint_keep_operators": ("matmul",),
        },
        "--checkpoint-keep-operators matmul is not possible with --num-experts 4",
    ),
    ({"num_experts": 6, "expert_model_parallel_size": 4}, "use 1, 2, 3 or 6."),
    ({"num_experts": 4, "moe_router_num_groups": 2}, "needs --moe-router-group-topk"),
    (
        {"num_experts": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
        "--moe-router-num-groups 3 must divide --num-experts 4",
    ),
    (
        {"num_experts": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 4},
        "--moe-router-group-topk 4 must be at most 2",
    ),
    (
        {
            "num_experts": 4,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 1,
            "moe_router_topk": 3,
        },
        "and a group of 1 experts must have that many",
    ),
    (
        {"num_experts": 4, "moe_router_enable_expert_bias": True},
        "needs --moe-router-score-function",
    ),
    ({"num_experts": 4, "activation": "xielu"}, "xielu has weights of its own"),
    ({"num_experts": 4, "moe_shared_expert_gate": True}, "needs --moe-shared-expert-intermediate"),
    (
        {
            "num_experts": 4,
            "moe_shared_expert_intermediate_size": 5,
            "tensor_model_parallel_size": 2,
        },
        "must divide --moe-shared-expert-intermediate-size 5",
    ),
    ({"num_experts": 4, "fp8_format": "e4m3", "bf16": True}, "products of experts have no float8"),
    ({"muon_momentum": 1.0}, "--muon-momentum 1.0 must be at least 0 and below 1."),
    ({"muon_num_ns_steps": 100}, "--muon-num-ns-steps 100 must be at least 1 and at most 99."),
    ({"muon_extra_scale_factor": 0.0}, "--muon-extra-scale-factor 0.0 must be above 0"),
    ({"clip_grad": -1.0}, "--clip-grad -1.0 must be at least 0."),
    ({"lr": float("nan")}, "--lr nan must be above 0, and finite."),
    ({"lr": float("inf")}, "--lr inf must be above 0, and finite."),
    ({"num_layers": 0}, "--num-layers 0 must be at least 1 and at most 1000000."),
    ({"num_attention_heads": 0}, "--num-attention-heads 0 must be at least 1 and at most 1000000."),
    ({"exit_interval": 0}, "--exit-interval 0 must be at least 1."),
    ({"train_tokens": -5}, "--train-tokens -5 must be at least 1."),
    ({"seed": 2**32}, "--seed 4294967296 must be at least 0 and at most 4294967295."),
    ({"init_method_std": 0.0}, "--init-method-std 0.0 must be above 0"),
    ({"loss_scale": 0.0}, "--loss-scale 0.0 must be above 0, and finite."),
    ({"loss_scale_window": 0}, "--loss-scale-window 0 must be at least 1."),
    ({"hysteresis": 0}, "--hysteresis 0 must be at least 1."),
    (
        {"eod_mask_loss": True, "vocab_size": 500},
        "--eod-mask-loss must have the tokenizer of the data",
    ),
    (
        {"eod_mask_loss": True, "vocab_file": "v"},
        "--eod-mask-loss must have the tokenizer of the data",
    ),
    (
        {
            "reset_position_ids": True,
            "reset_attention_mask": True,
            "tokenizer_type": "PretrainedFromHF",
        },
        "--reset-position-ids and --reset-attention-mask must have the tokenizer",
    ),
]

UNUSUAL: list[tuple[dict[str, object], str]] = [
    ({"save": "ckpt", "rehearsal": "exact"}, "--rehearsal exact trains without a checkpoint"),
    (HYBRID, "without --reset-attention-mask the state runs over the whole sample"),
    (
        {"kv_lora_rank": 96},
        "--kv-lora-rank 96 has no effect without --multi-latent-attention.",
    ),
    ({**LATENT, "mscale": 0.7}, "--mscale 0.7 has no effect without --rope-scaling yarn."),
    (
        {"linear_key_head_dim": 96},
        "--linear-key-head-dim 96 has no effect without --experimental-attention-variant.",
    ),
    (
        {"rope_fusion": True},
        "--rope-fusion has no effect without --position-embedding-type rotary.",
    ),
    (
        {"residual_norm_fusion": True, "use_torch_compile": True},
        "--residual-norm-fusion has no effect in compiled layers",
    ),
    (
        {"residual_norm_fusion": True, "norm_placement": "output"},
        "--residual-norm-fusion has no effect without --norm-placement input.",
    ),
    (
        {"bias_swiglu_fusion": True},
        "--bias-swiglu-fusion has no effect with an activation that has no kernel: gelu",
    ),
    (
        {"adamw_fusion": True, "optimizer": "muon"},
        "--adamw-fusion has no effect without --optimizer adam.",
    ),
    (
        {"adamw_fusion": True, "deepspeed": True},
        "--adamw-fusion has no effect with --deepspeed",
    ),
    (
        {
            "gradient_accumulation_fusion": True,
            "bf16": True,
            "num_query_groups": 2,
            "tensor_model_parallel_size": 4,
        },
        "--gradient-accumulation-fusion leaves out the projection to queries, keys and values",
    ),
    ({"cp_comm_type": "a2a"}, "--cp-comm-type a2a has no effect without --context-parallel-size."),
    (
        {"special_tokens_in_text": True},
        "--special-tokens-in-text has no effect without --dataset-format: prepared data have ids",
    ),
    ({"fp8_recipe": "rowwise"}, "--fp8-recipe rowwise has no effect without --fp8-format."),
    (
        {"num_layers_at_start_in_bf16": 2},
        "--num-layers-at-start-in-bf16 2 has no effect without --first-last-layers-bf16.",
    ),
    (
        {
            "fp8_format": "e4m3",
            "fp8_recipe": "rowwise",
            "bf16": True,
            "train_iters": 9,
            "fp8_start_iteration": 10,
        },
        "--fp8-start-iteration 10 is after the last iteration (9), so no iteration is in float8.",
    ),
    (
        {"profile_ranks": (0, 3)},
        "--profile-ranks 0 3 has no effect without --profile-iterations or --memory-snapshot.",
    ),
    (
        {"replay_action": "stop"},
        "--replay-action stop has no effect without --replay-interval.",
    ),
    (
        {"memory_snapshot_iterations": (3,)},
        "--memory-snapshot-iterations 3 has no effect without --memory-snapshot.",
    ),
    (
        {"log_layer_stats_interval": 10},
        "--log-layer-stats-interval 10 computes statistics that are not written anywhere",
    ),
    ({"save_interval": 5}, "--save-interval 5 has no effect without --save: nothing is saved."),
    (
        {"mock_data": True, "data_path": ("a",)},
        "--data-path a has no effect with --mock-data, which trains on synthetic tokens.",
    ),
    (
        {
            "lr_warmup_tokens": 9,
            "curriculum_schedule_type": "fixed_linear",
            "curriculum_min_difficulty": 8,
            "curriculum_total_step": 9,
        },
        "--lr-warmup-tokens 9 is inexact with a curriculum",
    ),
    (
        {"checkpoint_fraction": "1/3"},
        "--checkpoint-fraction 1/3 has no effect without --checkpoint-activations.",
    ),
    (
        {"checkpoint_activations": True, "recompute_attention_core": True},
        "--recompute-attention-core has no effect with --checkpoint-activations",
    ),
    (
        {"rampup_batch_size": (1, 1, 5)},
        "--rampup-batch-size 1 1 5 with --train-iters 10: the learning rate's warm-up",
    ),
    (
        {"step_batch_size_schedule": ("0:1 5K:2",)},
        "--step-batch-size-schedule 0:1 5K:2 with --train-iters 10",
    ),
    (
        {"lr_decay_tokens": 99, "lr_decay_iters": 5},
        "--lr-decay-iters 5 has no effect with --lr-decay-tokens 99",
    ),
    (
        {"lr_wsd_decay_iters": 5},
        "--lr-wsd-decay-iters 5 has no effect without --lr-decay-style WSD.",
    ),
    (
        {"decoupled_min_lr": 1e-5},
        "--decoupled-min-lr 1e-05 has no effect without --decoupled-lr.",
    ),
    (
        {"lr_warmup_init": 1e-5},
        "--lr-warmup-init 1e-05 has no effect without a warm-up",
    ),
    (
        {"lr_warmup_style": "quadratic"},
        "--lr-warmup-style quadratic has no effect without a warm-up",
    ),
    (
        {"lr_decay_from_start": True},
        "--lr-decay-from-start has no effect without a warm-up",
    ),
    (
        {"lr_decay_style": "inverse-square-root"},
        "--lr-decay-style inverse-square-root without a warm-up",
    ),
    (
        {"ademamix_alpha": 8.0},
        "--ademamix-alpha 8.0 has no effect without --optimizer ademamix.",
    ),
    ({"moe_router_topk": 1}, "--moe-router-topk 1 has no effect without --num-experts."),
    ({"num_experts": 4}, "nothing balances the experts of --num-experts 4"),
    (
        {"num_experts": 4, "moe_router_topk": 1, "load": "run", "moe_aux_loss_coeff": 0.01},
        "--moe-router-topk 1 needs --moe-router-pre-softmax",
    ),
    (
        {
            "num_experts": 4,
            "moe_aux_loss_coeff": 0.1,
            "moe_router_load_balancing_type": "global_aux_loss",
        },
        "counts the microbatches of the step so far",
    ),
    ({"muon_nesterov": True}, "--muon-nesterov has no effect without --optimizer muon."),
    ({"loss_scale": 12.0}, "--loss-scale 12.0 has no effect without --fp16."),
    ({"goldfish_k": 4}, "--goldfish-k 4 has no effect without --goldfish-loss."),
    (
        {"position_embedding_type": "alibi", "max_position_embeddings": 8},
        "--max-position-embeddings 8 has no effect with --position-embedding-type alibi",
    ),
    (
        {"tensorboard_dir": "x", "log_loss_scale_to_tensorboard": False},
        "--no-log-loss-scale-to-tensorboard has no effect without --fp16",
    ),
    ({"no_rope_layers": "0"}, "--no-rope-layers 0 has no effect without --position-embedding-type"),
    (
        {"position_embedding_type": "rotary", "rope_scaling": "yarn", "rope_low_freq_factor": 2.0},
        "--rope-low-freq-factor 2.0 has no effect without --rope-scaling llama3.",
    ),
    (
        {"position_embedding_type": "rotary", "rope_scaling": "llama3", "rope_beta_slow": 2.0},
        "--rope-beta-slow 2.0 has no effect without --rope-scaling yarn.",
    ),
    (
        {"position_embedding_type": "rotary", "rope_scaling": "linear", "rope_original_length": 9},
        "--rope-original-length 9 has no effect without --rope-scaling llama3 or yarn.",
    ),
    ({"add_qkv_bias": True}, "--add-qkv-bias has no effect without --no-add-bias-linear"),
    ({"add_mlp_bias": True}, "--add-mlp-bias has no effect without --no-add-bias-linear"),
    ({"add_attention_bias": True}, "--add-attention-bias has no effect without --no-add-bias"),
    ({"norm_bias": False, "normalization": "RMSNorm"}, "--no-norm-bias has no effect with --norm"),
    (
        {"full_attention_layers": "0"},
        "--full-attention-layers 0 has no effect without --sliding-window",
    ),
    ({"hysteresis": 3}, "--hysteresis 3 has no effect without --fp16."),
    (
        {"partition_activations": True},
        "--partition-activations has no effect without --checkpoint-activations.",
    ),
    (
        {"checkpoint_in_cpu": True},
        "--checkpoint-in-cpu has no effect without --checkpoint-activations.",
    ),
    (
        {"partition_activations": True, "checkpoint_activations": True, "sequence_parallel": True},
        "--partition-activations has no effect with --sequence-parallel",
    ),
    (
        {"deepspeed_config": "ds.json"},
        "--deepspeed-config ds.json has no effect without --deepspeed.",
    ),
    ({"save": "x"}, "--save x without --save-interval saves only when training ends"),
    (
        {"log_timers_to_tensorboard": True},
        "--log-timers-to-tensorboard has no effect without --tensorboard-dir.",
    ),
    (
        {"log_loss_scale_to_tensorboard": False},
        "--no-log-loss-scale-to-tensorboard has no effect without",
    ),
    (
        {"rotary_base": 5.0},
        "--rotary-base 5.0 has no effect without --position-embedding-type rotary.",
    ),
    (
        {"fp16": True, "loss_scale": 16.0, "hysteresis": 3},
        "--hysteresis 3 has no effect with --loss-scale 16.0",
    ),
    (
        {"fp16": True, "loss_scale": 12.0},
        "--loss-scale 12.0 is not a power of two, so scaling rounds the gradients; use 8 or 16",
    ),
    (
        {"fp16": True, "initial_loss_scale": 5000.0},
        "--initial-loss-scale 5000.0 is not a power of two, so scaling rounds the gradients; "
        "use 4096 or 8192",
    ),
    (
        {"fp16": True, "min_loss_scale": 0.3},
        "--min-loss-scale 0.3 is not a power of two, so scaling rounds the gradients; "
        "use 0.25 or 0.5",
    ),
    (
        {"fp32_residual_connection": True},
        "--fp32-residual-connection has no effect without --fp16 or --bf16",
    ),
    (
        {
            "reset_position_ids": True,
            "position_embedding_type": "alibi",
            "vocab_file": "v",
            "merge_file": "m",
        },
        "--reset-position-ids has no effect with --position-embedding-type alibi",
    ),
]


@pytest.mark.parametrize(("changes", "message"), FAILURES, ids=lambda case: str(case)[:50])
def test_mistakes_are_errors(changes: dict[str, object], message: str):
    errors, _ = check_rules(config_with(**changes), {})
    assert sum(message in error for error in errors) == 1, errors


@pytest.mark.parametrize(("changes", "message"), UNUSUAL, ids=lambda case: str(case)[:50])
def test_settings_without_effect_are_warnings(changes: dict[str, object], message: str):
    errors, warnings = check_rules(config_with(**changes), {})
    assert errors == []
    assert sum(message in warning for warning in warnings) == 1, warnings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eval_only": True, "train_iters": None, "lr": None, "load": "x"},
        {"train_iters": None, "train_samples": 9, "lr_decay_samples": 5, "lr_warmup_samples": 1},
        {"train_iters": None, "train_time": "2h30m", "lr_warmup_samples": 5},
        {"num_attention_heads": 5, "kv_channels": 16},
        {"position_embedding_type": "rotary", "rotary_percent": 0.25},
        {"data_path": ("a",)},
        {"data_path": ("0.3", "a", "1e1", "b")},
        {"split": "1"},
        {"split": "99,1"},
        {"split": "99,1,0"},
        {"init_method_std": "small"},
        {"zero_stage": 0},
        {"zero_stage": 2, "hsdp_shard_size": 4},
        {"sharding_strategy": "hsdp", "zero_stage": 3},
        {"grad_reduce_in_bf16": True, "bf16": True},
        {"eval_iters": 0, "num_workers": 0, "hidden_dropout": 0.0, "clip_grad": 0.0},
        {"local_rank": -1},
        {"fp16": True},
        {"fp16": True, "fp32_residual_connection": True, "loss_scale": 0.5},
        {
            "fp16": True,
            "initial_loss_scale": 4096.0,
            "min_loss_scale": 1.0,
            "loss_scale_window": 500,
            "hysteresis": 3,
        },
        {"bf16": True, "fp32_residual_connection": True},
        {"reset_position_ids": True, "vocab_file": "v", "merge_file": "m"},
        {
            "eod_mask_loss": True,
            "tokenizer_type": "PretrainedFromHF",
            "tokenizer_name_or_path": "folder",
        },
        {
            "curriculum_schedule_type": "fixed_linear",
            "curriculum_min_difficulty": 8,
            "curriculum_total_step": 9,
        },
        {
            "curriculum_schedule_type": "fixed_discrete",
            "curriculum_difficulties": (8, 16),
            "curriculum_max_steps": (4,),
        },
    ],
    ids=str,
)
def test_valid_configurations_break_no_rule(changes: dict[str, object]):
    assert check_rules(config_with(**changes), {}) == ([], [])


def test_every_rule_has_a_case_above():
    cases = [ConfigWithOrigin(config_with(**changes), {}) for changes, _ in [*FAILURES, *UNUSUAL]]
    for rule in CONFIG_RULES:
        assert any(list(rule(case)) for case in cases), rule


def test_a_rule_finds_nothing_while_its_fields_have_their_defaults():
    """Otherwise `IfGiven` would leave out a finding."""
    cases = [flatten(config_with(**changes)) for changes, _ in [*FAILURES, *UNUSUAL]]
    for rule in CONFIG_RULES:
        if not isinstance(rule, IfGiven):
            continue
        defaults = {dotted: all_fields()[dotted].default for dotted in rule.fields}
        for values in cases:
            settings = ConfigWithOrigin(build_config(values | defaults), {})
            assert list(rule.rule(settings)) == [], rule


UNUSUAL_PLANS: dict[str, dict[str, object]] = {
    "curriculum": {
        "cuda_graph": "on",
        "curriculum_schedule_type": "fixed_discrete",
        "curriculum_difficulties": (8, 16),
        "curriculum_max_steps": (4,),
        "sequence_parallel": True,
        "context_parallel_size": 3,
        "optimizer": "muon",
        "num_query_groups": 1,
        "train_tokens": 5000,
    },
    "layout": {
        "tensor_model_parallel_size": 3,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "partition_activations": True,
        "profile_iterations": "900-901",
        "profile_ranks": (700,),
        "fp16": True,
        "skip_train_iteration_range": ("1-100000",),
    },
}
"""Configurations in which the rules of the plan have something to find."""


@pytest.mark.parametrize("changes", UNUSUAL_PLANS)
def test_a_rule_of_the_plan_finds_nothing_while_its_fields_have_their_defaults(changes: str):
    """The fields are reset, and what follows from them is planned again."""
    config = config_with(**UNUSUAL_PLANS[changes])
    for rule in PLAN_RULES:
        if isinstance(rule, IfGiven):
            defaults = {dotted: all_fields()[dotted].default for dotted in rule.fields}
            reset = build_config(flatten(config) | defaults)
            plan = resolve(reset, 6, consumed_samples=None, vocab_size=50000)
            context = PlanContext(reset, {}, plan, Progress(5, 40, 400), may_read_files=False)
            assert list(rule.rule(context)) == [], rule


RANGED = [dotted for dotted, field in all_fields().items() if field.declared_range is not None]


@pytest.mark.parametrize("dotted", RANGED)
def test_each_declared_range_is_enforced(dotted: str):
    """The bounds themselves are valid if they belong to the range, and nothing beyond them is."""
    field = all_fields()[dotted]
    kind = int if field.annotation is int else float
    tuples = field.arity == "*"

    def is_refused(number: float) -> bool:
        value = (kind(number),) if tuples else kind(number)
        settings = ConfigWithOrigin(config_with(**{field.name: value}), {})
        return any(field.flag in finding.text for finding in check_ranges(settings))

    low, high = field.range.parse_bounds()
    if math.isfinite(low):
        assert is_refused(low - 1)
        assert is_refused(low) == field.range.interval.startswith("(")
    if math.isfinite(high):
        assert is_refused(high + 1)
        assert is_refused(high) == field.range.interval.endswith(")")
    if kind is float:
        assert is_refused(math.nan)


def test_all_errors_are_reported_together_with_their_origin(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  num_query_groups: 3\nprecision: {bf16: true}\n")
    loaded = load_config([*TRAINABLE, "--config", str(file), "--fp16", "--split", "x"])
    errors, _ = check_rules(loaded.config, loaded.origin)
    precision, groups, split = errors
    assert precision.startswith(f"--fp16 and --bf16 ({file}:3) exclude each other")
    assert groups.startswith(f"--num-query-groups 3 ({file}:2) must divide --num-attention-heads 4")
    assert split.startswith("--split x must be one to three numbers")


@pytest.mark.parametrize("run", PUBLISHED_RUNS)
def test_published_runs_break_no_rule(run: str, tmp_path: Path):
    loaded = load_config(published_arguments(run, tmp_path))
    errors, warnings = check_rules(loaded.config, loaded.origin)
    assert errors == []
    # This model has ALiBi and no table of positions.
    if run == "tr11-176B-ml":
        assert "--max-position-embeddings 2048 has no effect" in warnings.pop()
    assert warnings == []
