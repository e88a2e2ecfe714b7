# Set the data of an example. Source this file from an example.
#
# With DATA_PATH, VOCAB_FILE and MERGE_FILE set, the example trains on your data. Otherwise this file
# builds a small data set from the sources of Python's standard library, which takes a few seconds.
# It is kept in $EXAMPLE_DIR/data.

if [[ -z "${DATA_PATH:-}" ]]; then
    data="$EXAMPLE_DIR/data"
    DATA_PATH="$data/stdlib_text_document"
    VOCAB_FILE="$data/vocab.json"
    MERGE_FILE="$data/merges.txt"
    if [[ ! -f "$DATA_PATH.idx" ]]; then
        python "$(dirname "${BASH_SOURCE[0]}")/quickstart/build_corpus.py" --output "$data/stdlib.jsonl" --max-megabytes 2
        megatron-train-tokenizer --input "$data/stdlib.jsonl" --vocab-size 1024 --output-dir "$data"
        megatron-preprocess --input "$data/stdlib.jsonl" --output-prefix "$data/stdlib" --append-eod \
            --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE"
    fi
fi
DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "${VOCAB_FILE:?set it to the vocab.json of the data set}"
    --merge-file "${MERGE_FILE:?set it to the merges.txt of the data set}"
    --split 949,50,1
)
