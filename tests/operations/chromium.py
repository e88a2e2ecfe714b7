"""A page in headless Chromium, driven by the devtools protocol over pipes."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page. Messages are JSON that ends in a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = os.fdopen(answers, "rb")
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the browser has reported, in order."""

    def open(self, page: Path) -> None:
        """Open a page, and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", flatten=True, targetId=target["targetId"])
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def move_mouse(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window, in pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _receive(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            data += byte
        answer: dict[str, Any] = json.loads(data)
        if "method" in answer:
            self.events.append(answer)
        return answer


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium without a window, and end it afterwards."""
    # The browser reads commands from descriptor 3, and writes answers to descriptor 4.
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"
    command = (
        f'exec "$0" {flags} --disable-background-networking --disable-component-update '
        f'--user-data-dir="$1" 3<&{read_commands} 4>&{write_answers}'
    )
    process = subprocess.Popen(
        ["bash", "-c", command, str(CHROMIUM), str(profile)],
        pass_fds=(read_commands, write_answers),
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(write_commands, read_answers)
    finally:
        os.close(write_commands)
        process.terminate()
        process.wait(timeout=30)
