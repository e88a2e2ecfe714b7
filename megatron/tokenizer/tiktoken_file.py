"""Files of tiktoken: `*.tiktoken`, the `tokenizer.model` of Llama 3, and Mistral's `tekken.json`.

They are not read. A `*.tiktoken` lacks the pattern that divides a text and the special tokens, so
its ids cannot be known from the file alone. `transformers` converts them to a tokenizer.json.
"""

import contextlib
import os
import re
from pathlib import Path

from megatron.base.outside_file import open_regular

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
