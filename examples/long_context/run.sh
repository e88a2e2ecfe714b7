#!/usr/bin/env bash
# From 256 to 2,048 tokens with two processes that share each sequence.
#
#     bash examples/long_context/run.sh     # about ten minutes on 2 cores
#
# Results are in $EXAMPLE_DIR (default: long_context). loss_by_position.png shows both models.
# SHORT_ITERS and LONG_ITERS change the lengths of the two runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/setup_env.sh
setup_env "data,observe"
export EXAMPLE_DIR="${EXAMPLE_DIR:-long_context}"
source examples/tiny_data.sh

model=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --num-query-groups 2
    --position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu --no-add-bias-linear
    --hidden-dropout 0 --attention-dropout 0 "${DATA_ARGS[@]}" --data-cache-path "$EXAMPLE_DIR/cache"
    --log-interval 10 --eval-interval 100 --eval-iters 2 --weight-decay 0.1 --adam-beta2 0.95
)
long=(
    --seq-length 2048 --rope-scaling llama3 --rope-scaling-factor 8 --rope-original-length 256
    --micro-batch-size 1 --global-batch-size 4 --train-iters "${LONG_ITERS:-60}" --lr 5e-4 --lr-warmup-fraction 0.05
    --context-parallel-size 2 --load "$EXAMPLE_DIR/short" --finetune --save "$EXAMPLE_DIR/long"
)
rm -rf "$EXAMPLE_DIR/short" "$EXAMPLE_DIR/long"

say "256 tokens: two data-parallel processes"
torchrun --nproc-per-node 2 pretrain_gpt.py "${model[@]}" --seq-length 256 --micro-batch-size 8 \
    --global-batch-size 16 --train-iters "${SHORT_ITERS:-400}" --lr 1e-3 --lr-warmup-fraction 0.05 --save "$EXAMPLE_DIR/short"
say "the plan of 2,048 tokens"
python tools/plan.py --world-size 2 -- "${model[@]}" "${long[@]}"
say "2,048 tokens: both processes share each sequence"
torchrun --nproc-per-node 2 pretrain_gpt.py "${model[@]}" "${long[@]}"
say "the loss at each position, before and after"
python - "$EXAMPLE_DIR/held_out.txt" <<'PYTHON'
import pathlib
import sys
import sysconfig

# Files of the standard library that are long enough for a sample.
folder = pathlib.Path(sysconfig.get_path("stdlib"))
files = sorted(folder.glob("*.py"), key=lambda path: path.stat().st_size)[-4:]
pathlib.Path(sys.argv[1]).write_text("".join(path.read_text() for path in files))
PYTHON
python tools/evaluate.py --load "$EXAMPLE_DIR/long" --compare-with "$EXAMPLE_DIR/short" --batch-size 2 \
    --text-files "$EXAMPLE_DIR/held_out.txt" --by-position "$EXAMPLE_DIR/loss_by_position.png"
say "done: $EXAMPLE_DIR/loss_by_position.png"
