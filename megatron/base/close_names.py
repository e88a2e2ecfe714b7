"""Finds the name that a user probably meant."""

import difflib
import re
from collections.abc import Iterable


def find_close_names(
    typed: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return the known names that are spelled nearly as a typed one, the nearest first.

    Each word of `typed` must be among the words of the other name, perhaps in another spelling.
    Otherwise, a name for evaluations would lead to one that changes the training.
    """

    def has_each_word(name: str) -> bool:
        words = re.findall(r"[^\W_]+", name)
        return all(difflib.get_close_matches(word, words) for word in typed_words)

    # No name is longer, and the search among thousands of words would take minutes.
    typed = typed[:100]
    typed_words = re.findall(r"[^\W_]+", typed)
    return difflib.get_close_matches(typed, filter(has_each_word, known), most, cutoff)
