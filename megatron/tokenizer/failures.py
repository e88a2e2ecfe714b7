"""Failures of the libraries that tokenize, and files that none of them reads.

The latter are files of tiktoken: `*.tiktoken`, the `tokenizer.model` of Llama 3, and Mistral's
`tekken.json`. A `*.tiktoken` lacks the pattern that divides a text and the special tokens, so its
ids cannot be known from the file alone. `transformers` converts them to a tokenizer.json.
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from megatron.base.errors import DataError, MegatronError
from megatron.base.outside_file import open_regular


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


_BEGIN = re.compile(rb'(?P<tekken>\s*\{.*?"token_bytes")|[A-Za-z0-9+/]+=* \d+\r?\n', re.DOTALL)
"""How the files begin. A line of a `*.tiktoken` is a token in base64 and its rank."""
_TEKKEN = "transformers.integrations.mistral import MistralConverter as C; C({!r})"
_TIKTOKEN = (
    "transformers.convert_slow_tokenizer import TikTokenConverter as C; "
    "C({!r}, pattern=PATTERN, extra_special_tokens=[TOKENS])"
)


def describe_tiktoken(name: str | Path | None) -> str | None:
    """Return how to convert a file of tiktoken, or one in a folder. None if there is none."""
    named = Path(name or os.devnull)
    # A pipe with such a name would be waited for.
    files = filter(Path.is_file, [named, *named.glob("*.tiktoken"), *named.glob("tekken*.json")])
    for path in files:
        found = None
        # The caller reports a file that cannot be read.
        with contextlib.suppress(OSError), open_regular(path) as opened:
            found = _BEGIN.match(opened.read(1 << 16))
        if found is not None:
            call = (_TEKKEN if found["tekken"] else _TIKTOKEN).format(str(path))
            json = str(path.with_name("tokenizer.json"))
            return (
                f"{path} is a file of tiktoken, which must be converted to a tokenizer.json: "
                f'python -c "from {call}.converted().save({json!r})", with PATTERN and TOKENS, if '
                "they are there, from the model's code. Then give its folder with --tokenizer-type "
                "PretrainedFromHF (docs/tokenizers.md)"
            )
    return None
