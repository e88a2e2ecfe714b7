#!/usr/bin/env bash
# Sets the environment up and runs the tests: `bash tests/run.sh [--full] [pytest's arguments]`.
# --full runs the long suites whole; without it they run as a fixed subset.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup_env.sh
setup_env "hf,hub,data,observe,bnb,test"

selection=(-m "not full")
arguments=()
for argument in "$@"; do
    if [[ "$argument" == "--full" ]]; then
        selection=()
    else
        arguments+=("$argument")
    fi
done

# The tests start several processes at a time: one thread each keeps them from fighting over the cores.
export OMP_NUM_THREADS=1
say "running the tests"
exec python -m pytest ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}
