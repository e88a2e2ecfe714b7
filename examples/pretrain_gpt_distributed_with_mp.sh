#!/usr/bin/env bash
# Train a small GPT with tensor and pipeline parallelism: TP 2 x PP 2.
#
#     bash examples/pretrain_gpt_distributed_with_mp.sh
#     PROCESSES=8 bash examples/pretrain_gpt_distributed_with_mp.sh --sequence-parallel    # TP 2 x PP 2 x DP 2
#
# Ask for the plan first. It prints the layout, the memory and every error:
#
#     megatron-plan --world-size 8 -- --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
set -euo pipefail
EXAMPLE_DIR="${EXAMPLE_DIR:-runs/pretrain_gpt_distributed_with_mp}"
source "$(dirname "${BASH_SOURCE[0]}")/tiny_data.sh"

PROCESSES="${PROCESSES:-4}"
# Several processes on one CPU would otherwise compete for its cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

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
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
