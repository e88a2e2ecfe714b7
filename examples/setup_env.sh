# Create the Python environment of the quickstart and the tests. Source this file.
#
#     source examples/setup_env.sh
#     setup_env "data,observe"        # extras of pyproject.toml
#
# An active environment ($VIRTUAL_ENV) is used as it is. Otherwise .venv (or $VENV) is created in the
# repository. $TORCH replaces the version of torch that is installed, for example torch==2.11.0. A
# file in the environment records what is installed. A second call then does nothing and needs no
# network.
#
# On Linux, pip's own index has torch's CUDA build. Without a GPU, the smaller CPU build is enough:
#
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu TORCH=torch==2.13.0+cpu

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() {
    printf '\n==> %s\n' "$*"
}

stop() {
    printf '\nerror: %s\n' "$*" >&2
    exit 1
}

# Print the first Python that is new enough. $PYTHON is tried first.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    stop "no Python 3.11 or newer is on the PATH. Install one, or give its path: PYTHON=/path/to/python3.12 bash $0"
}

# nvidia-smi may be installed on a machine without a GPU, so the list itself is checked.
has_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU
}

activate_environment() {
    if [[ -n "${VIRTUAL_ENV:-}" ]]; then
        say "using the active environment $VIRTUAL_ENV"
        export PATH="$VIRTUAL_ENV/bin:$PATH"
        python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || stop "the Python of the active environment is older than 3.11. Deactivate the environment."
        return
    fi
    local venv="$repository/${VENV:-.venv}"
    # The Python of a .venv may be gone after a system upgrade or a move. It is created again then.
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        local python
        python="$(find_python)"
        say "creating $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv" ||
            stop "$python cannot create virtual environments. On Debian and Ubuntu: apt install python3-venv"
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

# Print a digest of everything that the installation depends on.
installation_digest() {
    (
        echo "$repository" "$1"
        python --version
        cd "$repository"
        cat pyproject.toml $([[ -f setup.py ]] && echo setup.py) $(find megatron -path '*/csrc/*' -type f | sort)
    ) | python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# setup_env EXTRAS installs the package (editable) with its dependencies. Afterwards `python` is the
# Python of the environment.
setup_env() {
    local extras="$1" torch="torch==2.13.0" note state
    if has_gpu; then
        torch="torch>=2.11"
    fi
    torch="${TORCH:-$torch}"
    activate_environment
    # The first line of the note is the digest of the repository that was installed. The other lines
    # are the sets of extras.
    note="$VIRTUAL_ENV/.megatron-installed"
    state="$(installation_digest "$torch")"
    if [[ -f "$note" && "$(head -n 1 "$note")" == "$state" ]]; then
        if grep -qxF "[$extras]" "$note"; then
            say "everything is already installed"
            return
        fi
    else
        rm -f "$note"
    fi
    # torch is installed alone and first. It is large, and without --quiet pip shows the download.
    say "installing $torch (the first time: several hundred MB, or several GB with the libraries of CUDA)"
    python -m pip install --disable-pip-version-check "$torch" || stop "pip could not install $torch. Its message is above."
    say "installing this repository and its dependencies: .[$extras]"
    python -m pip install --disable-pip-version-check --quiet --editable "$repository[$extras]" ||
        stop "pip could not install $repository[$extras]. Its message is above."
    # The note is written last, so that an interrupted installation is repeated.
    [[ -f "$note" ]] || echo "$state" >"$note"
    echo "[$extras]" >>"$note"
    say "installed in $VIRTUAL_ENV"
}
