"""A proxy in front of a store that fails as networks and stores do."""

import http.client
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>injected</Message></Error>'
_CODES = {
    400: "Throttling ThrottlingException RequestLimitExceeded RequestThrottled",
    429: "TooManyRequests",
    503: "SlowDown SlowDownWrite SlowDownRead XMinioServerNotInitialized ServiceUnavailable",
}
THROTTLING = {
    **{code: status for status, codes in _CODES.items() for code in codes.split()},
    **{f"Unknown{status}": status for status in (408, 429, 499, 500, 502, 503, 504, 509, 520)},
}
"""Codes of AWS, MinIO and R2, and states without a known code, that are temporary."""
_FINAL = {"ExpiredToken": 400, "BadRequest": 400, "AccessDenied": 403, "RequestTimeTooSkewed": 403}
_STATUS = {**THROTTLING, **_FINAL, "InternalError": 500, "NotImplemented": 501}


@dataclass
class Fault:
    """What happens to some requests."""

    action: str
    """A code of S3, or `cut` (in the middle of the request), `lose` (the reply), `hold` (before the
    write), `hold_reply`, `blind` (conditions are removed) or `delay`."""
    matches: Callable[[str, str], bool] = lambda method, path: True
    times: int = 1 << 30
    """Requests that it is left for."""
    skip: int = 0
    """Requests that pass before."""
    seconds: float = 0.0
    met: threading.Event = field(default_factory=threading.Event)
    """Set when it happens for the first time."""
    over: threading.Event = field(default_factory=threading.Event)
    """Lets held requests go on."""


class FaultyProxy:
    """The proxy. `faults` may change at any time."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        """(Method, path with query) of each request so far."""
        self.headers: list[dict[str, str]] = []
        self.bytes_per_second: float | None = None
        self._free_at = 0.0
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.forward(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, action: str, method: str = "", part: str = "", **options: Any) -> Fault:
        """Add a fault for the requests of a method whose path contains a text."""

        def matches(asked: str, path: str) -> bool:
            return method in ("", asked) and part in path

        fault = Fault(action, matches, **options)
        self.faults.append(fault)
        return fault

    def close(self) -> None:
        for fault in self.faults:
            fault.over.set()
        self._server.shutdown()
        self._server.server_close()

    def _choose(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if not fault.matches(method, path) or fault.times <= 0:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def _wait_for_bandwidth(self, size: int) -> None:
        if self.bytes_per_second is None:
            return
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + size / self.bytes_per_second
            end = self._free_at
        time.sleep(max(0.0, end - time.monotonic()))

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        fault = self._choose(handler.command, handler.path)
        length = int(handler.headers.get("Content-Length") or 0)
        body = b""
        if fault is None or fault.action != "cut":
            body = handler.rfile.read(length)
        if fault is not None and not self._act_before(handler, fault, length):
            return
        self._wait_for_bandwidth(length)
        headers = dict(handler.headers)
        self.headers.append(headers)
        if fault is not None and fault.action == "blind":
            for name in ("If-Match", "If-None-Match", "if-match", "if-none-match"):
                headers.pop(name, None)
        status, received, content = self._send(handler, body, headers)
        if fault is not None and fault.action in ("lose", "hold_reply"):
            fault.met.set()
            if fault.action == "hold_reply":
                fault.over.wait()
            self._drop(handler)
            return
        self._wait_for_bandwidth(len(content))
        self._answer(handler, status, received, content)

    def _act_before(self, handler: BaseHTTPRequestHandler, fault: Fault, length: int) -> bool:
        """Do what a fault does before the request is sent on. Return whether it is sent on."""
        if fault.action not in ("lose", "hold_reply"):
            fault.met.set()
        if fault.action == "cut":
            handler.rfile.read(length // 2)
            self._drop(handler)
        elif fault.action in _STATUS:
            text = _ERROR.format(fault.action).encode()
            status = _STATUS[fault.action]
            self._answer(handler, status, {"Content-Type": "application/xml"}, text)
        elif fault.action == "hold":
            fault.over.wait()
            self._drop(handler)
        else:
            time.sleep(fault.seconds)
            return True
        return False

    def _send(
        self, handler: BaseHTTPRequestHandler, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request to the store, and return its status, headers and content."""
        connection = http.client.HTTPConnection("127.0.0.1", self._target)
        connection.request(handler.command, handler.path, body, {**headers, "Connection": "close"})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        kept = {
            name: value
            for name, value in response.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "date", "server")
        }
        return response.status, kept, content

    def _answer(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes
    ) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or handler.command == "HEAD":
                handler.send_header(name, value)
        if handler.command != "HEAD":
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def _drop(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)
