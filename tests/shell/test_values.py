"""Words and arithmetic have the values that bash gives them."""

import shutil
import subprocess

import pytest

from megatron.base.errors import ConfigError
from megatron.extras.translators.shell.arithmetic import NotStaticError, evaluate_arithmetic
from megatron.extras.translators.shell.syntax import Simple, parse_script
from megatron.extras.translators.shell.values import Values

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="bash is not installed")

ASSIGNMENTS = r"""
A=one
B='two words'
C="  quoted 'inside' \$A  "
E=
N=12
FILE=/data/corpus.v2.tar.gz
LINES=$'a\tb\nc\x41\101'
LIST=(x 'y z' "" w)
LIST+=("$B" $B)
LIST[1]+=!
NAME=FILE
MULTI=" \
    --num-layers 4 \
    --lr 1e-4 \
    "
N2=$((N * 2 + 1))
A+=' more'
"""

WORDS = r"""
$A
"$A"
x$A.y
${A}
$B$B
"$B"$B
a"$B"'$B'b
$C
"$C"
$E
"$E"
''
"$E"$E
pre$E
'single $A "x"'
"escaped \$A \"q\" \\ \x"
plain\ blank\$A
$'c\tstring\'s'
--data=$B
--data="$B"
$MULTI
"$MULTI"
${E:-default}
${E-default}
${UNSET:-two words}
"${UNSET:-two words}"
${UNSET:-"two words"}
${UNSET-$A}
${UNSET:+never}
${A:+set}
"${A:+set $B}"
${UNSET:=assigned}
$UNSET
${#A}
${#LIST[@]}
${#LIST[1]}
${LIST[0]}
${LIST[1]}
"${LIST[1]}"
${LIST[-1]}
"${LIST[@]}"
${LIST[@]}
"${LIST[*]}"
a"${LIST[@]}"b
"${LIST[@]:1:2}"
$LIST
${FILE##*/}
${FILE#*/}
${FILE%.*}
${FILE%%.*}
${FILE/data/x}
${FILE//./_}
${FILE/#\/data/y}
${FILE/%gz/zip}
${FILE:6}
${FILE:6:3}
${FILE: -2}
${A^^}
${A^}
${!NAME}
$((N + 3)) 
$(( N / 5 * 5 + N % 5 ))
$((N>10?1:0))
$N2
a$((1+1))b
"$((2**10))"
$((16#ff))
$((N<<2|1))
$(( -7 / 2 ))
$((-7%3))
pre{a,b}post
{1..4}
x{3..1}
"{a,b}"
--opt={1,2}
$LINES
"$LINES"
"$1"
$2
"$@"
$*
$#
"${@:2}"
"""


def bash_words(lines: list[str]) -> list[list[str]]:
    """Return the words that bash makes of each line."""
    script = ASSIGNMENTS + "".join(f"printf '%s\\0' {line}; printf '\\1\\0'\n" for line in lines)
    output = subprocess.run(
        [BASH or "", "--norc", "-s", "--", "p 1", "p2"],
        input=script.encode(),
        capture_output=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout.decode()
    groups = output.split("\1\0")[:-1]
    # printf prints one empty word where there is none. A marker tells them apart.
    return [group.split("\0")[:-1] for group in groups]


def our_words(lines: list[str]) -> list[list[str]]:
    values = Values("x", parameters=["p 1", "p2"])
    for node in parse_script(ASSIGNMENTS, "x"):
        assert isinstance(node, Simple)
        for raw in node.assignments:
            values.assign(raw)
    return [
        [word for raw in parse_line(line).words for word in values.expand(raw)] for line in lines
    ]


def parse_line(line: str) -> Simple:
    (node,) = parse_script(line, "x")
    assert isinstance(node, Simple)
    return node


@needs_bash
def test_words_are_those_of_bash():
    lines = [f"+ {line}" for line in WORDS.strip().split("\n")]
    expected = bash_words(lines)
    found = our_words(lines)
    assert dict(zip(lines, found, strict=True)) == dict(zip(lines, expected, strict=True))


@needs_bash
@pytest.mark.parametrize(
    "expression",
    [
        "1 + 2 * 3 - 4",
        "(1 + 2) * 3",
        "2 ** 3 ** 2",
        "-2 ** 2",
        "7 / -2",
        "-7 % 3",
        "!0 + !5",
        "~5 & 0xff",
        "1 << 4 >> 2",
        "3 > 2 && 2 > 3 || 1",
        "0 && (1 / 0)",
        "1 ? 10 : 1 / 0",
        "010 + 0x10 + 2#101",
        "a = 5, a += 3, a++ + ++a",
        "b + c",
        "9223372036854775807 + 1",
    ],
)
def test_arithmetic_is_that_of_bash(expression):
    variables = {"b": "c * 2", "c": "21"}
    printed = subprocess.run(
        [BASH or "", "-c", f"b='c * 2' c=21; echo $(({expression}))"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout

    def read(name: str) -> str:
        return variables.get(name, "")

    assert evaluate_arithmetic(expression, read, variables.__setitem__) == int(printed)


@pytest.mark.parametrize("expression", ["1 / 0", "1 +", "(1", "1.5", "08", "2 ** -1", "x y", "a"])
def test_invalid_arithmetic_has_no_value(expression):
    with pytest.raises(NotStaticError):
        evaluate_arithmetic(expression, lambda name: "a", lambda name, value: None)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("A='1", "is not closed"),
        ('A="1', "is not closed"),
        ("A=${B", "is not closed"),
        ("A=$(ls", "is expected"),
        ("if true; then", "is expected"),
        ("for x in a; do echo; fi", "is expected"),
        ("echo )", "is not expected"),
        ("coproc cat", "is not supported"),
        ("cat <", "target"),
    ],
)
def test_scripts_that_bash_refuses_are_errors(text, phrase):
    with pytest.raises(ConfigError, match=phrase):
        parse_script(text + "\n", "run.sh")


def test_depth_of_nesting_is_limited():
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_script("( " * 20_000, "run.sh")
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_script("echo " + "$(" * 20_000, "run.sh")
