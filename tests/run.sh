#!/usr/bin/env bash
# Set up the environment and run the tests.
#
#     bash tests/run.sh [--full | --changed] [arguments of pytest]
#
# --full runs the long suites completely. Without it a fixed subset of them runs. --changed runs the
# tests that are nearest to what differs from the main branch, in less than 60 s for a module of the
# core. It prints what it leaves out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup_env.sh
setup_env "dev"

selection=(-m "not full")
arguments=()
for argument in "$@"; do
    if [[ "$argument" == "--full" ]]; then
        selection=()
    elif [[ "$argument" == "--changed" ]]; then
        # A failure of the script ends this one.
        nearest=$(python .ci/nearest_tests.py)
        while IFS= read -r line; do
            arguments+=("$line")
        done <<<"$nearest"
    else
        arguments+=("$argument")
    fi
done

# The ten slowest tests, if they take a second or more.
slowest=(--durations=10 --durations-min=1)
# The tests start several processes at a time. With one thread each they do not compete for cores.
export OMP_NUM_THREADS=1
# Three workers share the folders of tests, see `tests/conftest.py`. While one waits the others work.
workers=()
if python -c 'import xdist' 2>/dev/null; then
    workers=(-n 3 --no-loadscope-reorder)
fi
say "running the tests"
# bash 4.3 and older report an empty array as unset under `set -u`, hence the `+` expansions.
exec python -m pytest ${workers[@]+"${workers[@]}"} "${slowest[@]}" ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}
