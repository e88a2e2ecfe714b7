#!/usr/bin/env bash
# Train a small GPT with DeepSpeed: its pipeline, its ZeRO and its mixed precision around our model.
#
#     bash examples/pretrain_gpt_deepspeed.sh
#     PROCESSES=8 bash examples/pretrain_gpt_deepspeed.sh --bf16
#
# It needs the extra `deepspeed`: pip install -e ".[deepspeed]"
set -euo pipefail
EXAMPLE_DIR="${EXAMPLE_DIR:-runs/pretrain_gpt_deepspeed}"
source "$(dirname "${BASH_SOURCE[0]}")/tiny_data.sh"

PROCESSES="${PROCESSES:-2}"
# Several processes on one CPU would otherwise compete for its cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

mkdir -p "$EXAMPLE_DIR"
CONFIG_JSON="$EXAMPLE_DIR/ds_config.json"
# "auto" takes the values of the flags.
cat >"$CONFIG_JSON" <<JSON
{
  "train_micro_batch_size_per_gpu": "auto",
  "train_batch_size": "auto",
  "gradient_clipping": "auto",
  "zero_optimization": {"stage": 1}
}
JSON

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
)
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 16
    --train-iters 100
    --lr 1e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --clip-grad 1.0
)
OUTPUT_ARGS=(
    --log-interval 10
    --eval-interval 50
    --eval-iters 2
    --save "$EXAMPLE_DIR/checkpoints"
    --load "$EXAMPLE_DIR/checkpoints"
    --save-interval 50
)

torchrun --standalone --nproc-per-node "$PROCESSES" -m megatron.commands.pretrain \
    --deepspeed --deepspeed_config "$CONFIG_JSON" --pipeline-model-parallel-size 2 \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
