"""Bounds of what a server sends: bytes and silence of an answer, and the time of a request.

A web server may send more than it was asked for, or send without end. `BoundedResponse` reads no
further than the range that was asked for, or than `PAGE_BYTES` of anything else. `HubBound` bounds
the answers of the Hugging Face Hub. Other file systems have time limits of their own. For all file
systems, `run_limited` stops waiting after a time.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

PAGE_BYTES = 16 << 20
"""Longest page of a listing."""
CALL_BYTES = 256 << 20
"""Bytes of all answers to one call of the Hub's client, which may read many pages."""
_ANSWER_BYTES = 1024
"""Counted for each answer, so that pages without content have an end, too."""
SILENT_SECONDS = 20.0
"""Longest time in which a web server sends no byte."""
REQUEST_SECONDS = 600.0
"""Longest time of a request, even if bytes arrive."""
Result = TypeVar("Result")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_SENT_RANGE = re.compile(r"bytes (\d{1,19})-")
# The pattern of fsspec for links takes quadratic time in a tag without an end, so it gets short
# tags. This one stops at the next tag.
_TAG = re.compile(rb"<a\s[^<>]*>?", re.IGNORECASE)
_TARGET = re.compile(rb"""\shref=["']([^"'<>]+)""", re.IGNORECASE)


class AnswerTooLongError(Exception):
    """An answer breaks a bound of bytes, place, time or compression. Asking again has no use."""


def run_in_thread(work: Callable[[], Result], seconds: float, name: str = "request") -> Result:
    """Return the result of a function that a daemon thread runs.

    Raises:
        TimeoutError: It takes too long. Its thread is left behind, and ends with the process.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future.result(seconds)


def run_limited(request: Callable[[], Result]) -> Result:
    """Return the result of a request to a web server.

    Raises:
        TimeoutError: See `run_in_thread`.
    """
    try:
        return run_in_thread(request, REQUEST_SECONDS)
    # Of fsspec or of this call. Both have no text.
    except TimeoutError:
        raise TimeoutError(
            f"the server sends nothing for {SILENT_SECONDS:g} s, or not all within "
            f"{REQUEST_SECONDS:g} s"
        ) from None


def make_web_options(url: str) -> dict[str, Any]:
    """Return the options of fsspec's file system that bound the answers of a web server.

    They are empty for other URLs.

    Raises:
        ImportError: The package aiohttp is not installed.
    """
    protocol = url.partition("://")[0]
    if protocol not in ("http", "https"):
        return {}
    import aiohttp
    import fsspec.config

    class BoundedResponse(aiohttp.ClientResponse):
        """An answer of a web server that is read up to a limit."""

        async def read(self) -> bytes:
            """Return the body.

            Raises:
                AnswerTooLongError: It is longer than the limit.
            """
            if self._body is None:
                asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
                # The page of an error may be longer than the range.
                if asked and self.ok:
                    sent = self.headers.get("Content-Range", "")
                    reason = _find_wrong_place(int(asked[1]), self.status, sent)
                    if reason:
                        self.close()
                        raise AnswerTooLongError(reason)
                    limit = int(asked[2]) - int(asked[1]) + 1
                else:
                    limit = PAGE_BYTES
                body = bytearray()
                async for part in self.content.iter_any():
                    body += part
                    if len(body) > limit:
                        self.close()
                        raise AnswerTooLongError(
                            f"the server sends more than the {limit:,} bytes that were asked for"
                        )
                self._body = bytes(body) if asked else _TAG.sub(_shorten_tag, body)
            return self._body

    silence = aiohttp.ClientTimeout(
        total=None, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS
    )
    # These would replace what the user has configured, such as headers.
    configured = fsspec.config.conf.get(protocol, {}).get("client_kwargs", {})
    return {"client_kwargs": {"timeout": silence, **configured, "response_class": BoundedResponse}}


class HubBound:
    """Bounds the bytes of all answers to one call of the Hub's client, and the time of each."""

    def __init__(self) -> None:
        """Start with the first call."""
        self.start_call()

    def start_call(self) -> None:
        """Count from 0 again."""
        self._left = CALL_BYTES

    def bound(self, response: Any, base: Any) -> None:
        """Bound an answer of httpx whose body has not been read.

        Args:
            response: The answer.
            base: The class `SyncByteStream` of httpx.

        Raises:
            AnswerTooLongError: The answer is compressed, or there are too many answers.
        """
        # A short text may be huge when it is decompressed. The request asks for plain answers.
        if response.headers.get("content-encoding", "identity") != "identity":
            raise AnswerTooLongError("the server compresses its answer, which was not asked for")
        stream = response.stream
        end = time.monotonic() + REQUEST_SECONDS
        take = self._take

        class BoundedStream(base):
            """The parts of the body."""

            def __iter__(self) -> Iterator[bytes]:
                for part in stream:
                    take(len(part), end)
                    yield part

            def close(self) -> None:
                stream.close()

        take(_ANSWER_BYTES, end)
        response.stream = BoundedStream()

    def _take(self, size: int, end: float) -> None:
        self._left -= size
        if self._left < 0:
            raise AnswerTooLongError(f"the server sends more than {CALL_BYTES:,} bytes")
        if time.monotonic() > end:
            raise AnswerTooLongError(f"the server sends for more than {REQUEST_SECONDS:g} s")


def _find_wrong_place(begin: int, status: int, sent: str) -> str:
    """Return why an answer does not begin at a byte, or an empty text.

    As many bytes of another place would be taken for the right ones. `sent` is the answer's
    Content-Range, which some servers leave out.
    """
    if status != 206:
        # Without a range, an answer is the file from its beginning.
        right = begin == 0
    else:
        found = _SENT_RANGE.match(sent)
        right = not sent or (found is not None and int(found[1]) == begin)
    if right:
        return ""
    return f"the server sends {sent[:80]!r} instead of the bytes from {begin:,} on"


def _shorten_tag(tag: re.Match[bytes]) -> bytes:
    """Return a link of a page with its target only."""
    target = _TARGET.search(tag[0])
    if target is None:
        return b""
    return b'<a href="' + target[1] + b'">'
