#!/usr/bin/env bash
# Run the tests of the parts that call torch most with another version of torch or Python, and record
# the result in docs/tests.md.
#
#     bash tests/run_torch.sh [--torch 2.11.0|newest] [--python PATH] [arguments of pytest]
#
# `newest` (the default) is the newest release that pip finds. Each pair of versions has an environment
# of its own in the repository (.venv-torch-..., 6 GB), which later calls use again. With arguments of
# pytest the row of the table is only printed. The script fails if a test fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup_env.sh

torch=newest
arguments=()
while (($# > 0)); do
    case "$1" in
        --torch) torch="${2:?--torch needs a version}" && shift ;;
        --python) export PYTHON="${2:?--python needs a path}" && shift ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

python="$(find_python)"
if [[ "$torch" == newest ]]; then
    # The first line is "torch (2.15.0)".
    torch="$("$python" -m pip index versions torch 2>/dev/null | sed -n '1s/.*(\(.*\))$/\1/p')"
    [[ -n "$torch" ]] || stop "pip found no torch for $("$python" --version). Give a version: --torch 2.11.0"
fi
# An active environment has its own torch, and is not changed.
unset VIRTUAL_ENV
export TORCH="torch==$torch"
export VENV=".venv-torch-$torch-python-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"

results="$(mktemp -d)"
trap 'rm -r "$results"' EXIT
code=0
bash tests/run.sh tests/engine tests/parallel tests/model tests/training --junit-xml="$results/tests.xml" \
    ${arguments[@]+"${arguments[@]}"} || code=$?
"$VENV/bin/python" tests/torch_row.py "$results/tests.xml" $( ((${#arguments[@]} > 0)) || echo docs/tests.md)
exit "$code"
