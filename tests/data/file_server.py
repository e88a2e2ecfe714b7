"""A local web server for tests of remote data. It fails when it is told to."""

import functools
import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class FailingServer(http.server.SimpleHTTPRequestHandler):
    """A web server with an index page, ETags and ranges, which fails when it is told to."""

    protocol_version = "HTTP/1.1"
    failures: ClassVar[Counter] = Counter()
    """Number of the next requests of a method that fail."""
    sent: int = 0

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            names = [f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir()]
            page = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return
        self.answer(path.read_bytes() if path.exists() else b"")

    def answer(self, content: bytes) -> None:
        cls = type(self)
        path = Path(self.translate_path(self.path))
        if cls.failures[self.command] > 0:
            cls.failures[self.command] -= 1
            # One half of the failures is an answer, the other half is a broken connection.
            if "Range" not in self.headers or cls.failures[self.command] % 2:
                self.send_error(503)
                return
            self.send_response(206)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"torn")
            self.close_connection = True
            return
        if not path.is_file():
            self.send_error(404)
            return
        status = path.stat()
        size = status.st_size
        code = 200
        wanted = self.headers.get("Range")
        if wanted and self.command == "GET":
            first, last = wanted.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
            size = len(content)
            code = 206
        cls.sent += len(content)
        self.send_response(code)
        self.send_header("ETag", f'"{status.st_mtime_ns}"')
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, type[FailingServer]]]:
    """Yield the URL of a folder, and the class that counts the failures to come."""

    class Own(FailingServer):
        failures: ClassVar[Counter] = Counter()

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Own, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", Own
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
