"""The text of a continuation while its tokens arrive.

Invariant: the returned pieces together are the text of the continuation up to its first stop
string. A piece never ends within a character, and never has a part of a stop string.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
"""What decoders give for the bytes of an incomplete character."""
_CONTEXT = 6
"""Tokens before the continuation that are decoded with it. Some decoders remove the space at the
start of a text."""


class IncrementalText:
    """The text of one continuation."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
    ) -> None:
        """Start after a prompt.

        Args:
            decode: Returns the text of ids.
            prompt: The ids of the prompt.
            stop_strings: Strings that end the continuation. They are not part of its text.
        """
        self._decode = decode
        self._stop_strings = stop_strings
        # The ids that are decoded together, and how many of them have been returned as text.
        self._ids = list(prompt[-_CONTEXT:])
        self._returned = len(self._ids)
        # Text that may be the beginning of a stop string.
        self._held = ""
        self.stopped = False
        """Whether a stop string was found."""

    def add(self, token: int) -> str:
        """Add a token and return the text that is certain now."""
        self._ids.append(token)
        text = self._take_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._forget_returned()
        return self._cut_at_stop_string(text)

    def finish(self) -> str:
        """Return the rest of the text, which no further token can change."""
        if self.stopped:
            return ""
        text = self._cut_at_stop_string(self._take_text())
        self._forget_returned()
        if self.stopped:
            return text
        return text + self._held

    def _take_text(self) -> str:
        """Return the text of the tokens that were not returned yet."""
        before = self._decode(self._ids[: self._returned])
        return self._decode(self._ids)[len(before) :]

    def _forget_returned(self) -> None:
        """Keep only the tokens of the last piece, as the context of the next one."""
        self._ids = self._ids[self._returned :]
        self._returned = len(self._ids)

    def _cut_at_stop_string(self, text: str) -> str:
        """Return the text before a stop string, and hold back what may be the beginning of one."""
        text = self._held + text
        found = [text.find(stop) for stop in self._stop_strings if stop in text]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = max((_count_beginning(text, stop) for stop in self._stop_strings), default=0)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]


def _count_beginning(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop string."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
