#!/usr/bin/env bash
# Train the hackathon's Llama against the clock, and print a report at the end.
#
#     bash examples/hackathon/train.sh texts.jsonl                       # 3 hours
#     bash examples/hackathon/train.sh texts.jsonl --train-time 30m      # flags at the end win
#
# A second call resumes with the time that is left. The tokenizer is GPT-2's: set VOCAB_FILE and MERGE_FILE to its two
# files. The results are in runs/hackathon, or in $EXAMPLE_DIR.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
texts="${1:?give a file of JSON lines, each with a text}"
shift
EXAMPLE_DIR="${EXAMPLE_DIR:-runs/hackathon}"
TOKENIZER_ARGS=(
    --vocab-file "${VOCAB_FILE:?set it to the vocab.json of GPT-2}"
    --merge-file "${MERGE_FILE:?set it to the merges.txt of GPT-2}"
)

# ---- Data: text to token ids, once ----
data="$EXAMPLE_DIR/data/texts"
if [[ ! -f "${data}_text_document.idx" ]]; then
    megatron-preprocess --input "$texts" --output-prefix "$data" --append-eod --workers "$(nproc)" "${TOKENIZER_ARGS[@]}"
fi
DATA_ARGS=(--data-path "${data}_text_document" --split 98,1,1)

# ---- Training ----
# bf16 and the compiler need a GPU.
precision=()
if command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then
    precision=(--bf16 --use-torch-compile)
fi
megatron-pretrain --config "$here/llama-177m.yaml" "${DATA_ARGS[@]}" "${TOKENIZER_ARGS[@]}" "${precision[@]}" \
    --save "$EXAMPLE_DIR/checkpoints" --load "$EXAMPLE_DIR/checkpoints" "$@" | tee -a "$EXAMPLE_DIR/log.txt"
