"""Runs the assignments and the control flow of a script in bash, and nothing else of it.

Three layers contain the shell. The first one alone protects all files from any script:

1. The operating system. The shell may open no file descriptor, start no process and write no file,
   and it has limits of time and memory. With `RLIMIT_NOFILE` 0, bash cannot open `>`, `<`, pipes,
   here-documents, substitutions or sockets. Each of them needs a descriptor before anything is
   created. root is exempt from the limit of processes. If the planner runs as root, the shell
   therefore runs as another user.
2. bash. Builtins that act outside the shell, such as `kill`, are disabled. A DEBUG trap under
   `extdebug` refuses every command that is not on its list.
3. The rewriting (`rewrite.py`). It leaves no command that the trap would refuse.

The shell checks the first layer before it does anything else. If the check fails, nothing of the
script runs.
"""

import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.shell.syntax import NAME

SECONDS = 10.0
OUTPUT_LIMIT = 16 * 2**20
NOBODY = 65534
WITHOUT_SHELL = (
    "Read the script on Linux, such as a login node or a container of the Containerfile. "
    "Elsewhere, as on macOS, give the training command in place of the script: "
    "megatron-plan pretrain_gpt.py --num-layers ..."
)
# bash sets these itself, and some of them are read-only. PATH would let bash find commands.
OWN_VARIABLES = frozenset(
    ["PATH", "UID", "EUID", "PPID", "SHELLOPTS", "IFS", "ENV", "OPTIND", "SHLVL", "_", "PS4"],
)

# No command is found through this PATH, and messages are in English.
_ENVIRONMENT = {"PATH": "/dev/null", "LC_ALL": "C"}

# The limits come first, so that nothing below them can change a file. Even an assignment can: bash
# truncates the file HISTFILE when HISTFILESIZE is set. The shell has read its input by then, or
# reads it from the descriptor that it has.
_LIMITS = r"""
ulimit -c 0 && ulimit -f 0 && ulimit -t 5 && ulimit -v 1000000 && ulimit -u 0 && ulimit -n 0 ||
    exit 97
if (( EUID == 0 )); then exit 97; fi
if : < /dev/null; then exit 97; fi
"""
_PROLOGUE = r"""
__plan_allow() {
    case ${FUNCNAME[1]-} in __plan_command | __plan_document | __plan_exit) return 0 ;; esac
    [[ $1 =~ $__plan_allowed ]]
}
__plan_command() {
    local IFS=' '
    printf '%s\0' "$__plan_token" command "$@"
    if [[ " $* " =~ $__plan_training || " $* " =~ \ -[a-z]*c\  || $1 == eval ]]; then
        printf '%s\0' "$__plan_token" exported
        export -p
        printf '\0'
    fi
    if [[ " $* " =~ $__plan_training ]]; then
        printf '%s\0' "$__plan_token" loop "${__plan_loop-}"
        exit 0
    fi
    if (( ++__plan_count > 200 )); then __plan_exit end; fi
    return 0
}
__plan_document() {
    local IFS=' '
    printf '%s\0' "$__plan_token" document "$1" "${*:2}"
}
__plan_exit() {
    printf '%s\0' "$__plan_token" exit "$1"
    exit 0
}
readonly -f __plan_allow __plan_command __plan_document __plan_exit
__plan_count=0
# A file that reads itself with `source` has no end.
FUNCNEST=100
__plan_allowed='^(__plan_(command|document|exit|call_[A-Za-z0-9_.:-]+)|export|declare|typeset|local'
__plan_allowed+='|readonly|unset|shift|let|getopts|return|break|continue|test|\[|:|true|false'
__plan_allowed+='|set --)( |$)|^\[\[ |^\(\(|^for |^case '
__plan_allowed+='|^[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?='
readonly __plan_allowed
shopt -s extdebug
enable -n . alias bg bind builtin caller cd command compgen complete compopt dirs disown echo \
    eval exec fc fg hash help history jobs kill logout mapfile popd pushd pwd read readarray \
    shopt source suspend times type ulimit umask unalias wait enable || exit 97
printf '%s\0' "$__plan_token" contained
trap '__plan_allow "$BASH_COMMAND"' DEBUG
"""


@dataclass
class Trace:
    """What a script would have done.

    `commands` has one pair for each command: its words, and the variables that the script has
    exported before it. The variables are text as `export -p` prints it, or empty if they are not
    needed. `documents` are the files that the script would write, by name. `exit_at` is the file
    and the line of the `exit` that ended the script, or empty. `is_complete` is true if the shell
    reached the end of the script. `loop` is the header of the loop that starts training, or empty.
    """

    commands: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    documents: dict[str, str] = field(default_factory=dict)
    exit_at: str = ""
    is_complete: bool = False
    loop: str = ""


def trace_script(
    script: str,
    source: str,
    *,
    parameters: Sequence[str],
    environment: Mapping[str, str],
    training: str,
    seconds: float = SECONDS,
) -> Trace:
    """Run `script` with everything except assignments and control flow disabled.

    Args:
        script: The rewritten script. Any other script is contained too, but its commands are not
            reported.
        source: The script's name in messages, and its `$0`.
        parameters: The script's arguments.
        environment: The variables that the script inherits.
        training: An extended regular expression. The script ends at the first command that matches.
        seconds: The time limit.

    Raises:
        ConfigError: The shell cannot be contained here, or the script does not end in time.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(f"reading a script needs bash, which is not installed. {WITHOUT_SHELL}")
    token = secrets.token_hex(8)
    head = [
        f"__plan_token={token}",
        f"__plan_training={shlex.quote(training)}",
        f"BASH_ARGV0={shlex.quote(source)}",
        f"PWD={shlex.quote(environment.get('PWD', os.getcwd()))}",
        *_write_environment(environment),
    ]
    output, code = _run(
        [bash, "--noprofile", "--norc", "-p", "-s", "--", *parameters],
        "\n".join([_LIMITS, *head, _PROLOGUE, script, "__plan_exit end", ""]),
        seconds,
    )
    records = list(_split_records(output, token))
    if not records or records[0] != ["contained"]:
        raise ConfigError(
            f"{source}: this system does not let the shell be contained (exit code {code}; "
            f"`ulimit -a` prints the limits). {WITHOUT_SHELL}"
        )
    return _build_trace(records[1:])


def _write_environment(environment: Mapping[str, str]) -> list[str]:
    return [
        f"export {name}={shlex.quote(value)}"
        for name, value in environment.items()
        if NAME.fullmatch(name)
        and name not in OWN_VARIABLES
        and not name.startswith(("BASH", "LD_", "__plan"))
    ]


def _run(command: list[str], script: str, seconds: float) -> tuple[bytes, int]:
    """Run the shell in an empty folder with `script` as its input. Return its output and code."""
    identity: dict[str, object] = {}
    if os.geteuid() == 0:
        # The limit of processes does not apply to root.
        identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as source:
        os.chmod(folder, 0o555)
        source.write(script.encode(errors="surrogateescape"))
        source.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=_ENVIRONMENT,
                start_new_session=True,
                **identity,  # type: ignore[call-overload]
            )
        except (OSError, ValueError, subprocess.SubprocessError) as failure:
            raise ConfigError(
                f"a shell without privileges cannot start ({failure}); run the planner as a user "
                "other than root."
            ) from None
        return _read_output(process, seconds)


def _read_output(process: "subprocess.Popen[bytes]", seconds: float) -> tuple[bytes, int]:
    expired = threading.Event()

    def end() -> None:
        expired.set()
        # It has no other process. `kill` does nothing if it has ended meanwhile.
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        assert process.stdout is not None
        output = process.stdout.read(OUTPUT_LIMIT)
        if len(output) == OUTPUT_LIMIT:
            end()
        process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if expired.is_set() or process.returncode < 0:
        raise ConfigError(
            f"the script started no training within {seconds:.2g} seconds, or printed more than "
            f"{OUTPUT_LIMIT:,} bytes. A loop may wait for the result of a command, which does "
            "not run here."
        )
    return output, process.returncode


def _split_records(output: bytes, token: str) -> Iterator[list[str]]:
    """Yield the records, each with its kind first. Other output of the script is left out."""
    record: list[str] | None = None
    for item in output.decode(errors="surrogateescape").split("\0")[:-1]:
        if item.endswith(token):
            if record:
                yield record
            record = []
        elif record is not None:
            record.append(item)
    if record:
        yield record


def _build_trace(records: list[list[str]]) -> Trace:
    trace = Trace()
    for kind, *items in records:
        if kind == "command":
            trace.commands.append((tuple(items), ""))
        elif kind == "exported" and trace.commands:
            trace.commands[-1] = (trace.commands[-1][0], "".join(items))
        elif kind == "document" and len(items) == 2:
            trace.documents[items[0]] = items[1]
        elif kind == "loop":
            trace.loop = "".join(items)
        # The script knows the token, so it can print any record.
        elif kind == "exit" and items != ["end"]:
            trace.exit_at = "".join(items)
        elif kind == "exit":
            trace.is_complete = True
    return trace
