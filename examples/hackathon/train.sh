#!/usr/bin/env bash
# Train the hackathon's Llama against the clock, and print a report at the end.
#
#     bash examples/hackathon/train.sh texts                       # 3 hours, on the Parquet files in the folder texts
#     bash examples/hackathon/train.sh texts --train-time 30m      # flags at the end have priority
#
# The column `text` has the texts. A folder or file of JSON lines works too: put DATASET_FORMAT=jsonl before the command.
# A second call resumes with the time that is left. The tokenizer is GPT-2's: set VOCAB_FILE and MERGE_FILE to its two
# files. The results are in runs/hackathon, or in $EXAMPLE_DIR.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
texts="${1:?give a folder of Parquet files with a column text}"
shift
EXAMPLE_DIR="${EXAMPLE_DIR:-runs/hackathon}"
TOKENIZER_ARGS=(
    --vocab-file "${VOCAB_FILE:?set it to the vocab.json of GPT-2}"
    --merge-file "${MERGE_FILE:?set it to the merges.txt of GPT-2}"
)

# ---- Data: the files need no preparation, and are tokenized during training ----
DATA_ARGS=(--dataset-format "${DATASET_FORMAT:-parquet}" --data-path "$texts" --col-name text --split 98,1,1)

mkdir -p "$EXAMPLE_DIR"

# ---- Training ----
# The configuration is in bf16, which is slow on a CPU. The compiler needs a GPU.
precision=(--no-bf16)
if command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then
    precision=(--use-torch-compile)
fi
megatron-pretrain --config "$here/llama-177m.yaml" "${DATA_ARGS[@]}" "${TOKENIZER_ARGS[@]}" "${precision[@]}" \
    --save "$EXAMPLE_DIR/checkpoints" --load "$EXAMPLE_DIR/checkpoints" "$@" | tee -a "$EXAMPLE_DIR/log.txt"
