#!/usr/bin/env bash
# From raw texts to a model: filter and deduplicate, train a tokenizer, tokenize into a corpus of
# shards, and train over its manifest. Install first: pip install -e '.[data,observe,datatrove]'
#
#     bash examples/prepare_corpus/run.sh RAW_FOLDER [--html] [--languages en] [--tasks 8]
#
# The results are in prepared/ (or $PREPARE_CORPUS_DIR). Remove or rename it before another run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
raw="${1:?give the folder of the raw .jsonl files}"
work="${PREPARE_CORPUS_DIR:-prepared}"
tokenizer=(--vocab-file "$work/tokenizer/vocab.json" --merge-file "$work/tokenizer/merges.txt")

PYTHONPATH=. python examples/prepare_corpus/filter_texts.py --input "$raw" --output "$work/filtered" "${@:2}"
python tools/train_tokenizer.py --input "$work/filtered/kept" --vocab-size 4096 --output-dir "$work/tokenizer" --overwrite
python tools/preprocess_data.py --input "$work/filtered/kept" --output-prefix "$work/corpus" --engine local \
    "${tokenizer[@]}" --append-eod --overwrite
python pretrain_gpt.py --config examples/laptop.yaml "${tokenizer[@]}" --data-path "$work/corpus.json" \
    --train-iters "${TRAIN_ITERS:-200}" --lr-warmup-iters 2 --eval-iters 2 --save "$work/run" --load "$work/run"
