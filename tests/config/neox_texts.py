"""A configuration of GPT-NeoX with its kinds of keys, in two files."""

MODEL = """
# Comments and commas after the last entry are YAML.
{
  "pipe-parallel-size": 1,
  "model_parallel_size": 2,
  "num-layers": 4,
  "hidden_size": 64,
  "num-attention-heads": 4,
  "seq-length": 32,
  "max-position-embeddings": 32,
  "norm": "layernorm",
  "pos-emb": "rotary",
  "rotary-pct": 0.25,
  "no-weight-tying": true,
  "gpt-j-residual": true,
  "output-layer-parallelism": "column",
  "attention-config": [[["flash"], 4]],
  "scaled-upper-triang-masked-softmax-fusion": true,
  "bias-gelu-fusion": True,
  "rope_fusion": false,
  "init_method": "small_init",
  "output_layer_init_method": "wang_init",
  "optimizer": {"type": "adam", "params": {"lr": 0.97e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
  "min_lr": 0.97e-4,
  "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 500000000},
  "train_micro_batch_size_per_gpu": 2,
  "gas": 3,
  "checkpoint-activations": true,
  "checkpoint-num-layers": 1,
  "partition-activations": true,
  "synchronize-each-layer": true,
  "gradient_clipping": 0.5,
  "weight-decay": 0.2,
  "fp16": {"fp16": true, "enabled": true, "loss_scale": 0, "loss_scale_window": 900,
           "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 2},
  "train-iters": 1000,
  "lr-decay-iters": 900,
  "lr-decay-style": "cosine",
  "warmup": 0.02,
  "checkpoint-factor": 100,
  "extra-save-iters": [0, 1, 2, 4],
  "keep-last-n-checkpoints": 5,
  "eval-interval": 200,
  "eval-iters": 7,
  "log-interval": 10,
  "steps_per_print": 10,
  "wall_clock_breakdown": true,
  "launcher": "slurm",
  "deepspeed_slurm": true,
}
"""
SETUP = """
train-data-paths: [data/a_text, data/b_text]
train-data-weights: [2.0, 1.0]
valid-data-paths: [data/v_text]
test-data-paths: [data/t_text]
tokenizer-type: HFTokenizer
vocab-file: data/tokenizer.json
save: runs/neox
load: runs/neox
hostfile: /job/hostfile
log_dir: null
"""
