"""Counts how often texts spell a special token, such as `<|endoftext|>` in a page about GPT-2."""

import re
from collections.abc import Iterable

from megatron.base.plain_text import format_count
from megatron.tokenizer.build import Tokenizer, list_special_token_ids


class SpecialTokenCounter:
    """Finds the special tokens of a tokenizer in texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Search for the special tokens of `tokenizer`."""
        names = {tokenizer.decode([index]) for index in list_special_token_ids(tokenizer)} - {""}
        # A longer one may begin with a shorter one. Without any, nothing is found.
        ordered = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._are_tokens = tokenizer.encode(tokenizer.decode([tokenizer.eod])) == [tokenizer.eod]

    def count(self, texts: Iterable[str]) -> int:
        """Return how many special tokens the texts spell."""
        return sum(len(self._pattern.findall(text)) for text in texts)

    def describe(self, count: int) -> str:
        """Return the line of the log about `count` special tokens that texts spell."""
        found = f"texts spell {format_count(count, 'special token')}"
        if self._are_tokens:
            return f"{found}, and each became this token (--special-tokens-in-text)"
        return (
            f"{found}, and each is ordinary text. With --special-tokens-in-text, each would be a "
            "special token"
        )
