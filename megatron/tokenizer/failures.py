"""Failures of the libraries that tokenize."""

import contextlib
from collections.abc import Iterator, Sequence

from megatron.base.errors import DataError, MegatronError


class TokenizerError(DataError):
    """The library of a tokenizer fails for a text."""


@contextlib.contextmanager
def report_failure(name: str, texts: Sequence[str]) -> Iterator[None]:
    """Turn whatever a library raises for texts into an error with the name of the tokenizer.

    Raises:
        TokenizerError: The library raised something.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, MegatronError):
        raise
    # A panic in Rust code is a BaseException, but not an Exception.
    except BaseException as error:
        what = f"the text {texts[0][:80]!a}" if len(texts) == 1 else f"one of {len(texts)} texts"
        raise TokenizerError(
            f"the tokenizer {name} fails for {what} ({type(error).__name__}: {str(error)[:200]})"
        ) from error
