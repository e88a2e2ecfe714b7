"""The process with limits that compiles and renders chat templates, seen from outside.

Nothing of a template runs in the process that asks. A process that needs too long is killed, since
Python delivers no signal to code in C.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import Any

from megatron.base.errors import DataError

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""What surrounds the text of a generation block: two code points that Unicode gives to no text."""
_START_SECONDS = 60.0
"""Longest time in which the process must start."""


class RenderError(DataError):
    """A template failed, or exceeded a limit."""


class RenderTimeoutError(RenderError):
    """A template took too long. Its process is killed."""


class TemplateProcess:
    """A process that compiles and renders templates, for one process that asks."""

    def __init__(self) -> None:
        """Start the process.

        Raises:
            RenderError: It does not start, for example because jinja2 is missing.
        """
        self.parent = os.getpid()
        self._lock = threading.Lock()
        self._channel, other = multiprocessing.Pipe()
        # The process imports what this one can import.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        module = "megatron.extras.samples.chat.sandbox"
        # Only the process keeps the other end, so a read fails as soon as it has ended.
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(self.parent), str(other.fileno())],
                pass_fds=[other.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._receive(_START_SECONDS, "start")

    @property
    def runs(self) -> bool:
        """Whether it can be asked. A forked process must not ask the process of its parent."""
        return self.parent == os.getpid() and self._process.poll() is None

    def ask(self, request: dict[str, Any], deadline: float) -> str:
        """Return the text of a reply.

        Args:
            request: A template to compile, or a conversation to render.
            deadline: The monotonic time at which the process is killed.

        Raises:
            RenderError: The template failed, took too long, or ended the process.
        """
        with self._lock:
            # The process may have been killed since the last request, because memory was short.
            try:
                self._channel.send_bytes(json.dumps(request, default=str).encode())
            except OSError as error:
                self.close()
                raise RenderError("its process ended") from error
            reply = json.loads(self._receive(deadline - time.monotonic(), "answer"))
        if "error" in reply:
            raise RenderError(reply["error"].encode(errors="backslashreplace").decode())
        text = str(reply["text"])
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # No tokenizer takes it.
            raise RenderError("it writes half a surrogate pair, which is no character") from error
        return text

    def close(self) -> None:
        """End the process."""
        # Nothing else ends a comparison in C.
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _receive(self, seconds: float, what: str) -> bytes:
        try:
            if self._channel.poll(max(0.0, seconds)):
                return self._channel.recv_bytes()
        except (EOFError, OSError) as error:
            self.close()
            code = self._process.returncode
            raise RenderError(
                f"its process did not {what} and ended with code {code}. It may need too much "
                "memory"
            ) from error
        self.close()
        raise RenderTimeoutError(f"its process did not {what} in time")
