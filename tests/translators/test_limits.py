"""A hostile script cannot take much time or memory."""

import os
import resource
import sys
import time
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators import launch_script
from megatron.extras.interop.translators.launch_script import read_launch_script
from megatron.extras.interop.translators.shell.syntax import Node, parse_script

pytestmark = pytest.mark.when_changed(
    "megatron/base/errors.py",
    "megatron/base/outside_file.py",
    "megatron/extras/interop/translators/*",
    "tests/translators/*",
)

TRAIN = "python pretrain_gpt.py --lr 1 $x\n"
DOUBLING = {
    "variable": "x=ab\n" + "x=$x$x\n" * 40,
    "array": "x=(a b)\n" + "x=(${x[@]} ${x[@]})\n" * 40,
    "appended": "x=ab\n" + "x+=$x\n" * 40,
    "replaced": "x=ab\n" + "x=${x//[ab]/$x}\n" * 10,
    "default": "x=ab\n" + "x=${y:-$x$x}\n" * 40,
    "document": "x=ab\n" + "x=$x$x\n" * 20 + "cat > f <<E\n" + "$x\n" * 1000 + "E\n",
}
SLOW = {
    "functions": "f() { f; f; f; }\nf\n",
    "lines": "y=1; if [ $y ]; then z=$y; fi\n" * 120_000,
    "pattern": "x=" + "a" * 20_000 + "\n" + "y=${x##*b}\n" * 1000,
}


def read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.sh"
    path.write_text(text + TRAIN)
    read_launch_script(path)


@pytest.mark.parametrize("kind", DOUBLING)
def test_values_that_double(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_script, "SECONDS_LIMIT", 2.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"its values need more than 1 GB|16,777,216 bytes"):
        read(tmp_path, DOUBLING[kind])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


@pytest.mark.parametrize("kind", SLOW)
def test_scripts_that_take_long(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_script, "SECONDS_LIMIT", 0.5)
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"0\.5 s"):
        read(tmp_path, SLOW[kind])
    assert time.process_time() - start < 10


class Endless:
    """An object whose destruction ends only by an exception, which Python drops."""

    def __del__(self) -> None:
        while True:
            pass


def test_limit_applies_although_its_exception_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(text: str, source: str) -> tuple[Node, ...]:
        Endless()
        return parse_script(text, source)

    dropped: list[object] = []
    monkeypatch.setattr(launch_script, "SECONDS_LIMIT", 0.1)
    monkeypatch.setattr(launch_script, "parse_script", parse)
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    with pytest.raises(ConfigError, match=r"a\.sh cannot be read as a script: .* 0\.1 s"):
        read(tmp_path, SLOW["lines"])
    assert dropped


def test_files_that_never_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "zero.sh").symlink_to("/dev/zero")
    (tmp_path / "large.sh").write_text("#\n" * 3_000_000)
    for name in ("pipe.sh", "zero.sh", "large.sh"):
        with pytest.raises(ConfigError, match=r"it is not a regular file|it has more than"):
            read_launch_script(tmp_path / name)


def test_large_script_is_read(tmp_path: Path) -> None:
    """The limits are far from what scripts need."""
    read(tmp_path, "".join(f'x{i}="$x{i - 1} value"\n' for i in range(1, 1000)))
