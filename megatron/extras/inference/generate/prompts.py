"""Prompts from a file and from standard input."""

import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_text, parse_json


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file. Empty lines are left out.

    Raises:
        ConfigError: The file cannot be read, has no prompt, is not UTF-8, or has a line of another
            form.
    """
    try:
        lines = load_text(path).split("\n")
    except OSError as error:
        raise ConfigError(f"--prompt-file {path} cannot be read: {error.strerror}") from error
    if path.suffix == ".jsonl":
        prompts = list(_parse_objects(path, lines))
    else:
        prompts = [line.rstrip("\r") for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file {path} has no prompt; give one a line")
    return prompts


def _parse_objects(path: Path, lines: Sequence[str]) -> Iterator[str]:
    """Yield the prompts of a .jsonl file.

    Raises:
        ConfigError: A line has another form.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = parse_json(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise ConfigError(
                f'--prompt-file {path}: line {number} must have the form {{"prompt": "a text"}}'
            )
        yield prompt


def check_text(text: str, name: str) -> None:
    """Check that a prompt is UTF-8 text. Other bytes were decoded as halves of surrogate pairs.

    Raises:
        ConfigError: It is not. The message starts with `name`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text: character {error.start + 1} is {text[error.start]!r}; give "
            "valid text"
        ) from error


def prepare_input() -> None:
    """Decode bytes of standard input that are not UTF-8 as halves of surrogate pairs.

    Raises:
        ConfigError: There is no standard input.
    """
    # It is None if the file descriptor is closed.
    if sys.stdin is None:
        raise ConfigError("--interactive reads standard input, which is closed; use --prompt")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def read_line() -> str | None:
    """Return a line of standard input without its end, or None after the last one."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        return None
    return line.rstrip("\r\n")
