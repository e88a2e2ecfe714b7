"""Failures of the libraries that tokenize."""

from collections.abc import Callable

from megatron.base.errors import DataError, MegatronError


class TokenizerError(DataError):
    """The library of a tokenizer fails for a text."""

    text = ""
    """The text."""


def encode_checked(
    name: str, encode: Callable[[list[str]], list[list[int]]], texts: list[str]
) -> list[list[int]]:
    """Return the ids of texts.

    Args:
        name: The tokenizer, for messages.
        encode: Returns the ids of texts.
        texts: The texts.

    Raises:
        TokenizerError: The library raised something.
    """
    try:
        return encode(texts)
    except (KeyboardInterrupt, SystemExit, MemoryError, MegatronError):
        raise
    # A panic in Rust code is a BaseException, but not an Exception.
    except BaseException as error:
        if len(texts) > 1:
            # This raises for the text that fails.
            return [encode_checked(name, encode, [text])[0] for text in texts]
        failure = TokenizerError(
            f"the tokenizer {name} fails for the text {texts[0][:80]!a} "
            f"({type(error).__name__}: {str(error)[:200]})"
        )
        failure.text = texts[0]
        raise failure from error
