#!/usr/bin/env bash
# From the model of docs/laptop.md to one that answers, without a GPU (a few minutes on two cores):
#
#     bash examples/instruct/laptop.sh corpus first first/chat
#
# The arguments are the folder of .txt files, the folder of the laptop's run, and a folder for the results.
# Further arguments are flags of the training, such as --train-iters 50.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ $# -lt 3 ]; then
    echo "error: give the folder of the text, that of the laptop's run, and one for the results" >&2
    exit 2
fi
TEXT=$1 FIRST=$2 OUT=$3
if [ ! -f "$FIRST/laptop.yaml" ]; then
    echo "error: $FIRST has no laptop.yaml; make it and its run by docs/laptop.md" >&2
    exit 2
fi
shift 3
TOKENIZER=(--tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$OUT/tokenizer")
mkdir -p "$OUT"
python examples/instruct/add_chat_tokens.py "$FIRST/tokenizer" "$OUT/tokenizer"
python examples/instruct/make_conversations.py "$TEXT" "$OUT/chat.jsonl"
# A sample of the training has 129 tokens, of which the last is only a label.
python tools/preprocess_data.py --conversations --input "$OUT/chat.jsonl" --output-prefix "$OUT/chat" \
    --longest 129 --on-long drop --overwrite "${TOKENIZER[@]}"
python tools/inspect_dataset.py "$OUT/chat_conversations" --show 1 --seq-length 128 "${TOKENIZER[@]}"
python pretrain_gpt.py --config "$FIRST/laptop.yaml" --vocab-file None --merge-file None "${TOKENIZER[@]}" \
    --data-path "$OUT/chat_conversations" --reset-position-ids --reset-attention-mask --eod-mask-loss \
    --pretrained-checkpoint "$FIRST/run" --save "$OUT/run" --load "$OUT/run" --train-iters 300 --lr 1e-3 "$@"
python tools/generate.py --load "$OUT/run" --chat --temperature 0 --max-new-tokens 20 \
    --prompt "Repeat: the first word"
