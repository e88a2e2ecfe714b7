#!/usr/bin/env bash
# Train a model from a fresh clone. The steps are environment, corpus, tokenizer, training on tensor-
# and pipeline-parallel ranks, resume, loss curve and text.
#
#     bash examples/quickstart.sh
#
# The script needs git, bash and Python 3.11 or newer. It uses the machine's GPUs, or 4 processes on
# the CPU. That takes less than 6 minutes on 2 cores after the installation. All results are in
# quickstart/ (or $QUICKSTART_DIR). A second call keeps the corpus and trains again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup_env.sh
setup_env "data,observe"

work="${QUICKSTART_DIR:-quickstart}"
corpus=$work/corpus.jsonl
tokenizer=$work/tokenizer
dataset=$work/stdlib
checkpoints=$work/checkpoints
split=94,5,1

# ---- Number of processes and their layout -------------------------------------------------------
processes=4
precision=()
if has_gpu; then
    gpus=$(nvidia-smi --list-gpus | grep -c GPU)
    # Use the largest of 8, 4, 2 and 1 GPUs that the machine has. The layouts of these sizes divide
    # the model's 4 heads and the batch of 16.
    for processes in 8 4 2 1; do
        ((processes <= gpus)) && break
    done
    precision=(--bf16)
fi
tensor_parallel=$((processes > 1 ? 2 : 1))
pipeline_parallel=$((processes > 2 ? 2 : 1))
data_parallel=$((processes / tensor_parallel / pipeline_parallel))
# Two microbatches for each stage. With fewer, the ranks of the pipeline wait longer for each other.
microbatches=$((pipeline_parallel > 1 ? 2 * pipeline_parallel : 1))
layout="TP $tensor_parallel x PP $pipeline_parallel x DP $data_parallel"
say "$processes processes on $(has_gpu && echo "GPUs" || echo "the CPU"): $layout"
# More threads per process would compete for the cores.
export OMP_NUM_THREADS=1

# ---- Text -> tokenizer -> token ids -------------------------------------------------------------
if [[ ! -f $corpus ]]; then
    say "building a corpus from the sources and docs of Python's standard library"
    python examples/quickstart/build_corpus.py --output "$corpus"
fi
if [[ ! -f $tokenizer/merges.txt ]]; then
    say "training a byte-level BPE tokenizer on the corpus"
    python tools/train_tokenizer.py --input "$corpus" --vocab-size 4096 --output-dir "$tokenizer"
fi
if [[ ! -f ${dataset}_text_document.idx ]]; then
    say "converting the corpus to token ids"
    python tools/preprocess_data.py --input "$corpus" --output-prefix "$dataset" --dataset-impl mmap --append-eod \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$tokenizer/vocab.json" --merge-file "$tokenizer/merges.txt" --workers 2
fi

# ---- Training -----------------------------------------------------------------------------------
train() {
    torchrun --standalone --nproc-per-node "$processes" pretrain_gpt.py \
        --tensor-model-parallel-size "$tensor_parallel" --pipeline-model-parallel-size "$pipeline_parallel" \
        --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --position-embedding-type rotary \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size $((16 / data_parallel / microbatches)) --global-batch-size 16 \
        --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20 --lr-decay-iters 200 \
        --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
        --data-path "${dataset}_text_document" --split "$split" \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$tokenizer/vocab.json" --merge-file "$tokenizer/merges.txt" \
        --eval-interval 50 --eval-iters 10 --log-interval 10 --show-progress \
        --save "$checkpoints" --load "$checkpoints" --save-interval 50 --tensorboard-dir "$work/tensorboard" \
        ${precision[@]+"${precision[@]}"} "$@"
}

# Each call trains a new run. Otherwise the training would resume from an earlier one.
rm -rf "$checkpoints" "$work/tensorboard"
say "training 150 iterations"
train --train-iters 150
say "resuming from the checkpoint and training to iteration 200"
train --train-iters 200

# ---- Results ------------------------------------------------------------------------------------
say "comparing the loss with that of a model that knows only the frequencies of the tokens"
# A failed comparison ends the script with the message of the comparison.
comparison=$(python examples/quickstart/compare_with_unigram.py --dataset "${dataset}_text_document" --split "$split" \
    --metrics "$checkpoints/metrics.jsonl") || stop "$comparison"
echo "$comparison"
python tools/chronicle.py "$checkpoints" --png "$work/loss.png"
say "generating text with the model"
python tools/generate.py --load "$checkpoints" --prompt 'def __init__(self, ' --max-new-tokens 60
say "done: the loss curve is in $work/loss.png, the checkpoints in $checkpoints, TensorBoard's events in $work/tensorboard"
