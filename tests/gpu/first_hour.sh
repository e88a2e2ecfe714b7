#!/usr/bin/env bash
# Check a machine with at least one GPU, and measure the trainer on it. No network is needed.
#
#     bash tests/gpu/first_hour.sh --part N [--report FOLDER]
#
#     1    environment, node check, tests of the CUDA path on one GPU
#     2    the tests of parallel layouts, with ranks that share one GPU (gloo)
#     3    benchmarks at sizes that fit, quickstart, generated text on the CPU and the GPU
#     4    NCCL: the same layouts on several GPUs. It stops with a message on a machine with one GPU
#
# A part should take less than 9 minutes. Each step of a part has a time limit, and the sum of these
# limits may be longer. A part can be repeated, and needs no other part. Results are added to
# FOLDER/report.txt (default: gpu-report/report.txt). The Python of the active environment is used. It
# must have torch with CUDA, and the packages that `pip install -e '.[test]'` installs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

part=""
folder=gpu-report
while (($#)); do
    case "$1" in
    --help | -h)
        # The comment at the top, without the line that names the interpreter.
        awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' tests/gpu/first_hour.sh
        exit 0
        ;;
    --part) part="${2:-}" ;;
    --report) folder="${2:-}" ;;
    *)
        echo "error: unknown argument $1; see the comment at the top of $0" >&2
        exit 2
        ;;
    esac
    shift 2 || exit 2
done
mkdir -p "$folder"
report=$folder/report.txt
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
# With this, torch checks for a GPU without a CUDA context, so processes that are forked later can
# use CUDA.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: torch sees no GPU; check nvidia-smi and torch.version.cuda" >&2
    exit 2
}
failed=0

# step TITLE SECONDS COMMAND...: run a command, and add its output and exit status to the report.
step() {
    local title="$1" seconds="$2" start=$SECONDS status
    shift 2
    printf '\n==> %s\n' "$title" | tee -a "$report"
    # `timeout` can start only programs, so a shell calls the functions of this file.
    timeout --kill-after=10 "$seconds" bash -c '"$@"' bash "$@" >"$folder/step.log" 2>&1
    status=$?
    cat "$folder/step.log" >>"$report"
    tail -n "${lines:-25}" "$folder/step.log"
    printf -- '--- %s: exit status %d after %d s\n' "$title" "$status" $((SECONDS - start)) | tee -a "$report"
    ((status == 0)) || failed=1
}

has_index_helpers() {
    python -c 'import megatron.data._index_helpers' 2>/dev/null
}

environment() {
    date -u
    git rev-parse --short HEAD 2>/dev/null || true
    nvidia-smi
    python -c 'import sys, torch; print(sys.version); print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version(), torch.backends.cudnn.version())'
}

run_tests() {
    python -m pytest -q -rfEs -m "not full" -p no:cacheprovider --no-header --tb=short "$@"
}

# Each test file runs in processes of its own. The results are printed file by file.
run_in_parallel() {
    printf '%s\n' "$@" | xargs -P "${WORKERS:-5}" -I {} bash -c '
        log=$(run_tests {} 2>&1)
        printf "\n%s\n%s\n" {} "$(tail -n 400 <<<"$log")"'
}

quickstart() {
    # The active environment is used as it is, without an installation.
    python examples/quickstart/build_corpus.py --output "$folder/corpus.jsonl" &&
        python tools/train_tokenizer.py --input "$folder/corpus.jsonl" --vocab-size 4096 --output-dir "$folder/tokenizer" &&
        python tools/preprocess_data.py --input "$folder/corpus.jsonl" --output-prefix "$folder/stdlib" --append-eod \
            --tokenizer-type GPT2BPETokenizer --vocab-file "$folder/tokenizer/vocab.json" --merge-file "$folder/tokenizer/merges.txt" --workers 8 &&
        python pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 \
            --position-embedding-type rotary --micro-batch-size 16 --global-batch-size 32 --bf16 --hidden-dropout 0 --attention-dropout 0 \
            --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 20 --train-iters 200 --clip-grad 1.0 --weight-decay 0.1 \
            --data-path "$folder/stdlib_text_document" --split 94,5,1 --eval-interval 100 --eval-iters 5 --log-interval 20 \
            --tokenizer-type GPT2BPETokenizer --vocab-file "$folder/tokenizer/vocab.json" --merge-file "$folder/tokenizer/merges.txt" \
            --save "$folder/run" --save-interval 100 --async-save
}

compare_generated_text() {
    local device
    for device in cpu cuda; do
        python tools/generate.py --load "$folder/run" --prompt 'def __init__(self, ' --temperature 0 --max-new-tokens 40 \
            --device "$device" >"$folder/$device.txt" || return
    done
    cat "$folder/cuda.txt"
    diff "$folder/cpu.txt" "$folder/cuda.txt"
}

export folder
export -f environment run_tests run_in_parallel quickstart compare_generated_text

has_index_helpers || step "compile the C++ index helpers" 120 python setup.py --quiet build_ext --inplace
case "$part" in
1)
    lines=40 step "environment" 60 environment
    step "node check" 120 python tools/node_check.py
    lines=80 step "CUDA path on one GPU" 420 run_tests -s tests/gpu
    ;;
2)
    lines=150 step "parallel layouts on one GPU" 530 run_in_parallel \
        tests/equivalence/test_*.py tests/engine/test_*.py tests/parallel/test_*.py tests/model/test_*.py \
        tests/generate/test_*.py tests/training/test_*runs.py
    ;;
3)
    rm -rf "$folder/run"
    step "training of 125M" 150 quickstart
    step "generated text" 60 compare_generated_text
    for size in 125m 350m 1.3b; do
        step "step time, $size" 120 python benchmarks/step_time.py --size "$size" --precision bf16 --rounds 5
    done
    step "losses of ranks on one GPU" 120 python benchmarks/layouts.py --ranks-on-one-gpu
    ;;
4)
    gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
    if ((gpus < 2)); then
        echo "part 4 needs at least two GPUs, and there is one" | tee -a "$report"
        exit 0
    fi
    step "node check with all GPUs" 120 torchrun --standalone --nproc-per-node "$gpus" tools/node_check.py
    lines=80 step "layouts on $gpus GPUs" 400 python benchmarks/layouts.py
    ;;
*)
    echo "error: --part must be 1, 2, 3 or 4; see the comment at the top of $0" >&2
    exit 2
    ;;
esac
exit "$failed"
