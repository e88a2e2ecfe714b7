"""A script under --expand creates no file, changes no file and leaves no process."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.launch_script import read_launch_script
from megatron.extras.interop.translators.shell import sandbox
from megatron.extras.interop.translators.shell.sandbox import trace_script

pytestmark = [
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed"),
    pytest.mark.when_changed(
        "megatron/base/errors.py",
        "megatron/base/outside_file.py",
        "megatron/extras/interop/translators/*",
        "tests/translators/*",
    ),
]

START = "python pretrain_gpt.py --seed 1\n"
TRAINING = r"pretrain_gpt\.py"

# F does not exist, and G exists. In plain bash, each of these scripts changes F or G.
ATTACKS = [
    "echo > F",
    "/bin/touch F",
    "command -p touch F",
    "x=$(/bin/touch F)",
    "cat <<E > F\n{}\nE",
    "x=`/bin/touch F`",
    "echo > G",
    ": > G",
    "> G",
    "{ :; } > F",
    "if true; then :; fi > G",
    "while false; do :; done > F",
    "for i in 1; do :; done > F",
    "f() { :; } > F; f",
    "(:) > F",
    "exec > F",
    "exec 9<> F",
    "exec /bin/touch F",
    "export X=1 > F",
    "[ 1 = 1 ] > F",
    "[[ 1 == 1 ]] > F",
    "(( 1 )) > F",
    "builtin echo > F",
    "command echo > F",
    "eval 'echo > F'",
    "eval /bin/touch F",
    "source <(echo /bin/touch F; sleep 1)",
    ". /dev/stdin <<E\n/bin/touch F\nE",
    "bash -c '/bin/touch F'",
    "trap - DEBUG\n/bin/touch F",
    "trap '/bin/touch F' EXIT",
    "trap '/bin/touch F' ERR; false",
    "trap '/bin/touch F' DEBUG; :",
    "set +o functrace\n/bin/touch F",
    "set +T; x=$(/bin/touch F)",
    "shopt -u extdebug; /bin/touch F",
    "enable -f /dev/null x; /bin/touch F",
    "f() { /bin/touch F; }; f",
    "test() { /bin/touch F; }; test",
    "function [ { /bin/touch F; }; [ 1 ]",
    "export() { /bin/touch F; }; export X",
    "printf() { /bin/touch F; }; printf x",
    "true() { /bin/touch F; }; while true; do break; done",
    "__plan_allow() { :; }; /bin/touch F",
    "__plan_command() { /bin/touch F; }; __plan_command; ls > F",
    "unset -f __plan_allow; /bin/touch F",
    "__plan_allowed=.; /bin/touch F",
    "/bin/touch F & wait",
    "{ /bin/touch F; } & wait",
    "( /bin/touch F )",
    "/bin/true | /bin/touch F",
    "/bin/true |& /bin/touch F",
    "/bin/false || /bin/touch F",
    "! /bin/touch F",
    "time /bin/touch F",
    "X=1 /bin/touch F",
    "X=$(/bin/touch F) true",
    "echo >(/bin/touch F); sleep 1",
    "cat <(/bin/touch F)",
    "/bin/true <<< $(/bin/touch F)",
    "/bin/cat <<E\n$(/bin/touch F)\nE",
    "[[ -n $(/bin/touch F) ]]",
    "[[ $(< /dev/null; /bin/touch F) ]]",
    "[ -n $(/bin/touch F) ]",
    "(( $(/bin/touch F) + 1 ))",
    "for i in $(/bin/touch F); do :; done",
    "for (( i = $(/bin/touch F) 0; i < 1; i++ )); do :; done",
    "case $(/bin/touch F) in *) ;; esac",
    ": ${x:=$(/bin/touch F)}",
    ': "${x:-`/bin/touch F`}"',
    "a='b[$(/bin/touch F)]'; (( a ))",
    "a='b[$(/bin/touch F)]'; [[ a -eq 1 ]]",
    "a='b[$(/bin/touch F)]'; x=$(( a ))",
    "a='b[$(/bin/touch F)]'; [ -v \"$a\" ]",
    "a='b[$(/bin/touch F)]'; declare \"$a=1\"",
    "a='b[$(/bin/touch F)]'; b=(1); unset \"$a\"",
    "a='b[$(/bin/touch F)]'; let a",
    "x='$(/bin/touch F)'; : \"${x@P}\"",
    "X='/bin/touch F'; $X",
    "X='/bin/touch F'; eval $X",
    "PATH=/bin:/usr/bin; touch F",
    "command_not_found_handle() { /bin/touch F; }; nowhere",
    "coproc /bin/touch F; wait",
    "select x in a; do /bin/touch F; done <<< 1",
    "echo x | while read y; do /bin/touch F; done",
    "mkdir F",
    "rm G",
    "mv G F",
    "ln -s G F",
    "ulimit -n 99; : > F",
    "ulimit -u 99; /bin/touch F",
    "printf -v 'a[$(/bin/touch F)]' x",
    "set -- x; set -x; echo > F",
    "alias :='/bin/touch F'; shopt -s expand_aliases\n:\n/bin/touch F",
    "BASH_ENV=F; PS4='$(/bin/touch F)'; set -x; :",
    "exit() { /bin/touch F; }; exit",
    "set -- 1; case $1 in 1) /bin/touch F ;& 2) ;; esac",
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder in which every user may create and change files."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o777)
        (path / "G").write_text("content")
        (path / "G").chmod(0o666)
        yield path


def place(attack: str, folder: Path) -> str:
    words = attack.replace(" F", f" {folder}/F").replace("=F", f"={folder}/F")
    return words.replace(" G", f" {folder}/G") + "\n"


def is_unchanged(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    return names == ["G"] and (folder / "G").read_text() == "content"


MARK = f"CONTAINED_SHELL_OF={os.getpid()}"
"""Variable of this process's contained shells. Other tests may start shells at the same time."""


@pytest.fixture(autouse=True)
def mark_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, value = MARK.partition("=")
    monkeypatch.setattr(sandbox, "_ENVIRONMENT", {**sandbox._ENVIRONMENT, name: value})


def list_processes() -> set[int]:
    """Return the ids of contained shells and of what they started."""
    name, _, value = MARK.partition("=")
    return {
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get(name) == value
    }


def run_contained(script: str) -> None:
    """Run `script` in the contained shell, as it is written.

    bash waits when it can start no process, so there may be an error about the time limit.
    """
    with suppress(ConfigError):
        trace_script(script, "run.sh", parameters=[], environment={}, training=TRAINING, seconds=1)


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_changes_nothing(attack, folder):
    script = folder / "run.sh"
    script.write_text(place(attack, folder) + START)
    # What cannot be followed is refused.
    with suppress(ConfigError):
        assert read_launch_script(script).arguments == ("--seed", "1")
    script.unlink()
    assert is_unchanged(folder)
    assert list_processes() == set()


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(each, marks=pytest.mark.full if at % 3 else ())
        for at, each in enumerate(ATTACKS)
    ],
)
def test_attack_changes_nothing_without_the_rewriting(attack, folder):
    run_contained(place(attack, folder))
    assert is_unchanged(folder)
    assert list_processes() == set()


def test_attack_changes_nothing_without_the_trap(folder, monkeypatch):
    """The system refuses descriptors and processes, without the trap and without the rewriting."""
    bare = sandbox._PROLOGUE.replace("trap '__plan_allow \"$BASH_COMMAND\"' DEBUG", "")
    assert "DEBUG" not in bare
    monkeypatch.setattr(sandbox, "_PROLOGUE", bare)
    for attack in ("echo > F", "x=$(/bin/touch F)", "/bin/touch F", "cat <<E > F\n{}\nE", ": > G"):
        run_contained(place(attack, folder))
        assert is_unchanged(folder)


def test_plain_bash_carries_out_the_attacks(folder):
    """The attacks are real, so the tests above can fail."""
    harmless = []
    for attack in ATTACKS:
        subprocess.run(
            ["bash", "--norc", "-c", place(attack, folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=folder,
            timeout=20,
        )
        if is_unchanged(folder):
            harmless.append(attack)
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "G").write_text("content")
    assert harmless == []


def test_what_is_not_contained_is_not_run(folder, monkeypatch):
    monkeypatch.setattr(sandbox, "_LIMITS", sandbox._LIMITS.replace("ulimit -n 0", "ulimit -n 99"))
    with pytest.raises(ConfigError, match=r"shell be contained.* on macOS, give the"):
        trace_script("__plan_command x", "run.sh", parameters=[], environment={}, training=TRAINING)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs bash.* on macOS, give the training command"):
        trace_script(":", "run.sh", parameters=[], environment={}, training=TRAINING)


@pytest.mark.parametrize(
    "text",
    [
        "while :; do :; done",
        "while :; do (( i++ )); done",
        "__plan_call_f() { __plan_call_f; }; __plan_call_f",
        "for i in {1..99999999}; do :; done",
        "x=a; while :; do x=$x$x; done",
    ],
)
def test_endless_scripts_end(text):
    """A limit of time or of memory ends them, whichever is reached first."""
    start = time.monotonic()
    run_contained(text)
    assert time.monotonic() - start < 30
    assert list_processes() == set()


def test_script_that_does_not_end_is_an_error():
    with pytest.raises(ConfigError, match="no training within 1 seconds"):
        trace_script(
            "while :; do :; done",
            "run.sh",
            parameters=[],
            environment={},
            training=TRAINING,
            seconds=1,
        )


def test_loop_that_starts_training_again_ends_with_the_first_start(folder):
    (folder / "run.sh").write_text(f"while true; do {START.strip()}; sleep 5; done\n")
    assert read_launch_script(folder / "run.sh").arguments == ("--seed", "1")


def test_environment_of_the_shell_is_not_inherited(folder, monkeypatch):
    (folder / "env.sh").write_text(f"echo > {folder}/F\n")
    monkeypatch.setenv("BASH_ENV", str(folder / "env.sh"))
    monkeypatch.setenv("ENV", str(folder / "env.sh"))
    monkeypatch.setenv("BASH_FUNC_test%%", f"() {{ echo > {folder}/F; }}")
    (folder / "G").write_text("test 1\n" + START)
    assert read_launch_script(folder / "G", environment=os.environ).arguments == ("--seed", "1")
    assert not (folder / "F").exists()


def test_environment_changes_no_file(folder):
    """bash truncates the history file when HISTFILESIZE is set."""
    environment = {"HISTFILE": str(folder / "G"), "HISTFILESIZE": "0", "SEED": "7"}
    trace = trace_script(
        '__plan_command python pretrain_gpt.py --seed "$SEED"\n',
        "run.sh",
        parameters=[],
        environment=environment,
        training=TRAINING,
    )
    assert trace.commands[-1][0][-1] == "7"
    assert is_unchanged(folder)


def test_forged_records_are_no_crash(folder):
    script = folder / "run.sh"
    script.write_text('nothing "$__plan_token" exit soon\n' + START)
    assert read_launch_script(script).arguments == ("--seed", "1")
