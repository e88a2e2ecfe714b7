#!/usr/bin/env bash
# Make a tokenizer and data of a folder of text files, for examples/one_dial/ladder.yaml.
#
#     bash examples/one_dial/prepare.sh TEXTS
#
# The results are in one_dial/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if (($# != 1)); then
    echo "usage: bash examples/one_dial/prepare.sh TEXTS, a folder of .txt, .jsonl or .parquet files" >&2
    exit 2
fi
python tools/train_tokenizer.py --input "$1" --vocab-size 512 --output-dir one_dial/tokenizer
python tools/preprocess_data.py --input "$1" --output-prefix one_dial/corpus --append-eod \
    --vocab-file one_dial/tokenizer/vocab.json --merge-file one_dial/tokenizer/merges.txt
