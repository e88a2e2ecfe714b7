#!/usr/bin/env bash
# Curriculum learning on the quickstart's corpus. The script prints the plan, trains, and resumes
# while the sequence length still grows.
#
#     bash examples/quickstart.sh                  # once, for the corpus and the tokenizer
#     bash examples/curriculum_learning/run.sh     # about a minute on 2 cores
#
# The results are in quickstart/curriculum (or $QUICKSTART_DIR/curriculum).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/setup_env.sh
setup_env "data,observe"

work="${QUICKSTART_DIR:-quickstart}"
run=$work/curriculum
[[ -f ${work}/stdlib_text_document.idx ]] || stop "$work has no corpus. Run 'bash examples/quickstart.sh' first."

arguments=(
    --config examples/curriculum_learning/curriculum.yaml --data-path "$work/stdlib_text_document"
    --vocab-file "$work/tokenizer/vocab.json" --merge-file "$work/tokenizer/merges.txt"
    --save "$run" --load "$run" --tensorboard-dir "$run/tensorboard"
)
# Each call trains a new run. Otherwise the first training command would resume the previous one.
rm -rf "$run"

say "the plan: samples, tokens, sequence length and learning rate after some iterations"
python tools/plan.py --world-size 1 --at 1 10 25 50 100 123 -- "${arguments[@]}"
# The interruption is planned, and shows that a resume continues at the same sequence length.
say "training for 40 iterations; the sequence length still grows then"
python pretrain_gpt.py "${arguments[@]}" --exit-interval 40
say "the same command resumes, and trains until the run has its tokens"
python pretrain_gpt.py "${arguments[@]}"
say "done: validation losses at the full length are in $run/metrics.jsonl, TensorBoard's curriculum_seqlen in $run/tensorboard"
