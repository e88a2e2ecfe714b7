#!/usr/bin/env bash
# Check a machine with at least one GPU, and measure the trainer on it. No network is needed.
#
#     bash tests/gpu/first_hour.sh --part N [--report FOLDER]
#
#     1    8 minutes: 7B (3B on 80 GB) in bf16 and float8, each also with a CUDA graph, with clocks
#          and a sustained product; 125M, nanochat's shape and 177M beside compiled peers; the gaps
#          of float8 at 1.3B
#     2    5 minutes: losses and kernels against the CPU; experts beside a dense model; the kernels
#          against PyTorch's operators; products, attention, float8
#     3    9 minutes: modded-nanogpt's program; calibration; further tests; ranks that share the GPU
#          (gloo); checkpoint of 1B
#     4    9 minutes: NCCL, layouts on several GPUs. It ends with a message on one GPU
#
# Each step has a time limit, and a step that fails does not stop the others. FOLDER (default:
# gpu-report) gets partN.json and partN.log after each step. tests/gpu/tables.py makes tables of
# them. Everything else goes to a temporary folder.
#
# The Python of the active environment is used. It needs torch with CUDA, and the packages that
# docs/gpus.md lists. --tiny checks this script on a CPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for argument in "$@"; do
    if [[ "$argument" == "--help" || "$argument" == "-h" ]]; then
        # The comment at the top, without the line that names the interpreter.
        awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' tests/gpu/first_hour.sh
        exit 0
    fi
done
# Not each Python of a machine has torch. Finding it does not import it.
has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
for python in python python3; do
    if "$python" -c "$has_torch" 2>/dev/null; then
        # exec: a signal for this script reaches the program that completes the report.
        exec "$python" tests/gpu/first_hour.py "$@"
    fi
done
echo "error: neither python nor python3 has torch; activate the environment that has it" >&2
exit 2
