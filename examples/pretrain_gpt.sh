#!/usr/bin/env bash
# Train a small GPT on one device: a GPU, or the CPU.
#
#     bash examples/pretrain_gpt.sh
#     bash examples/pretrain_gpt.sh --train-iters 1000 --override-lr-scheduler    # flags at the end win
#
# The second call resumes. It needs the second flag, because the decay ends with the training. The results are in runs/pretrain_gpt, or in $EXAMPLE_DIR.
set -euo pipefail
EXAMPLE_DIR="${EXAMPLE_DIR:-runs/pretrain_gpt}"
source "$(dirname "${BASH_SOURCE[0]}")/tiny_data.sh"

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 8
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

megatron-pretrain "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
