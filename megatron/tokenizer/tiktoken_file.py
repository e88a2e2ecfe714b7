"""Files of tiktoken: `*.tiktoken`, the `tokenizer.model` of Llama 3, and Mistral's `tekken.json`.

They are not read. A `*.tiktoken` lacks the pattern that divides a text and the special tokens, so
its ids cannot be known from the file alone. `transformers` converts them to a tokenizer.json.
"""

import re
from pathlib import Path

_BEGIN = 1 << 16
_RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""A token in base64 and its rank."""
_TIKTOKEN = (
    'python -c "from transformers.convert_slow_tokenizer import TikTokenConverter as C; '
    'C({file!r}, pattern=PATTERN, extra_special_tokens=[TOKENS]).converted().save({json!r})", '
    "with PATTERN and TOKENS from the code of this model"
)
_TEKKEN = (
    'python -c "from transformers.integrations.mistral import MistralConverter as C; '
    'C({file!r}).converted().save({json!r})"'
)


def describe_tiktoken(name: str | Path | None) -> str | None:
    """Return how to convert a file of tiktoken, or one in a folder. None if there is none."""
    if name is None:
        return None
    named = Path(name)
    files = [named]
    if named.is_dir():
        files = sorted([*named.glob("*.tiktoken"), *named.glob("tekken*.json")])
    # A pipe with such a name would be waited for.
    found = (_describe_file(file) for file in files if file.is_file())
    return next((text for text in found if text is not None), None)


def _describe_file(path: Path) -> str | None:
    try:
        with path.open("rb") as opened:
            begin = opened.read(_BEGIN)
    except OSError:
        # The caller reports what cannot be read.
        return None
    if begin.lstrip().startswith(b"{") and b'"token_bytes"' in begin:
        command = _TEKKEN
    elif _RANKS.match(begin):
        command = _TIKTOKEN
    else:
        return None
    command = command.format(file=str(path), json=str(path.with_name("tokenizer.json")))
    return (
        f"{path} is a file of tiktoken, which must be converted to a tokenizer.json: {command}. "
        "Then give its folder with --tokenizer-type PretrainedFromHF (docs/tokenizers.md)"
    )
