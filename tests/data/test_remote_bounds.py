"""Tests that a server cannot make a reader wait, list or read without end."""

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.base.errors import DataError
from megatron.extras.operations.hub import answers
from megatron.extras.samples.stream import remote
from megatron.extras.samples.stream.remote import BlockCache, RemoteFolder

pytest.importorskip("aiohttp")
Answer = Callable[[http.server.BaseHTTPRequestHandler], object]
SIZE = 3_000_000


@contextmanager
def serve(answer: Answer) -> Iterator[str]:
    """Yield the URL of a server whose files have 3 MB, and that answers GET as it is told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.begin(200, SIZE)

        def do_GET(self) -> None:
            # The reader closes the connection when it has read enough.
            try:
                answer(self)
            except OSError:
                self.close_connection = True

        def begin(self, code: int, length: int) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "text/html")
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", str(length))
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/data"
    finally:
        server.shutdown()
        server.server_close()


def open_folder(url: str, folder: Path, lines: list[str]) -> RemoteFolder:
    return RemoteFolder(url, BlockCache(str(folder), 0, lines.append), lines.append)


def send(handler: http.server.BaseHTTPRequestHandler, body: bytes, code: int = 200) -> None:
    handler.begin(code, len(body))  # type: ignore[attr-defined]
    handler.wfile.write(body)


def make_page(number: int) -> bytes:
    return "".join(f'<a href="{each}.jsonl">x</a>\n' for each in range(number)).encode()


@pytest.mark.parametrize("kind", ["folders", "entries", "page", "time"])
def test_a_listing_without_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(answers, "PAGE_BYTES", 10_000)
    if kind == "entries":
        monkeypatch.setattr(remote, "_MOST_ENTRIES", 50)
    if kind == "folders":
        monkeypatch.setattr(remote, "_MOST_LEVELS", 5)
    if kind == "time":
        monkeypatch.setattr(remote, "_LISTING_SECONDS", 0.2)

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        if kind == "folders":
            send(handler, b'<a href="a.jsonl">a</a><a href="more/">more</a>')
        elif kind == "entries":
            send(handler, make_page(51))
        elif kind == "time":
            time.sleep(0.05)
            send(handler, b'<a href="more/">more</a>')
        else:
            handler.begin(200, 1 << 40)  # type: ignore[attr-defined]
            while True:
                handler.wfile.write(make_page(100))

    expected = {
        "folders": "5 levels of folders",
        "entries": "50 entries",
        "page": "more than the 10,000 bytes",
        "time": "what can be listed in 0.2 s",
    }
    lines: list[str] = []
    with serve(answer) as url, pytest.raises(DataError, match=expected[kind]) as caught:
        open_folder(url, tmp_path, lines).list_files((".jsonl",))
    assert url in str(caught.value)
    # It is not asked again.
    assert lines == []


def test_an_answer_is_read_no_further_than_the_range(tmp_path: Path) -> None:
    sent = [0]

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        # The range is ignored, and there is no end.
        handler.begin(206, 2 << 30)  # type: ignore[attr-defined]
        for _ in range(2048):
            sent[0] += handler.wfile.write(b"x" * (1 << 20))

    lines: list[str] = []
    with serve(answer) as url:
        folder = open_folder(f"{url}/a.jsonl", tmp_path, lines)
        with pytest.raises(DataError, match="more than the 1,048,576 bytes") as caught:
            folder.read_block(folder.describe(""), 0, 1 << 20)
    assert f"{url}/a.jsonl" in str(caught.value)
    assert lines == []
    # What the system's buffers hold is sent, too.
    assert sent[0] < 64 << 20


@pytest.mark.parametrize(
    ("code", "named", "begin", "good"),
    [
        (206, "bytes 100-199/3000000", 100, True),
        (206, "bytes 500-599/3000000", 100, False),
        (206, "nonsense", 100, False),
        (200, "", 100, False),
        (200, "", 0, True),
    ],
)
def test_bytes_of_another_place_are_refused(
    tmp_path: Path, code: int, named: str, begin: int, good: bool
) -> None:
    """They are as many as were asked for."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        if named:
            handler.send_header("Content-Range", named)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"x" * 100)

    with serve(answer) as url:
        folder = open_folder(f"{url}/a.jsonl", tmp_path, [])
        if good:
            assert folder.read_block(folder.describe(""), begin, begin + 100) == b"x" * 100
            return
        with pytest.raises(DataError, match="instead of the bytes from 100 on"):
            folder.read_block(folder.describe(""), begin, begin + 100)


def test_links_that_lead_out_of_the_folder_are_left_out(tmp_path: Path) -> None:
    page = b'<a href="a.jsonl">a</a><a href="../b.jsonl">b</a><a href="../../c/d.jsonl">d</a>'
    with serve(lambda handler: send(handler, page)) as url:
        files = open_folder(url, tmp_path, []).list_files((".jsonl",))
    assert [file.name for file in files] == ["a.jsonl"]


def test_a_server_that_sends_nothing_ends_at_a_limit_that_the_log_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(remote, "_LAST_TRY_SECONDS", 0.5)
    over = threading.Event()
    lines: list[str] = []
    with serve(lambda handler: over.wait(10)) as url:
        folder = open_folder(f"{url}/a.jsonl", tmp_path, lines)
        begin = time.monotonic()
        with pytest.raises(DataError, match=r"sends nothing for 0\.2 s"):
            folder.read_block(folder.describe(""), 0, 1 << 20)
        over.set()
    assert time.monotonic() - begin < 5
    assert lines
    assert all("No try starts after" in line for line in lines)


def test_a_slow_server_that_sends_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer takes longer than the longest silence."""
    monkeypatch.setattr(answers, "SILENT_SECONDS", 0.4)

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.begin(206, 1000)  # type: ignore[attr-defined]
        for _ in range(10):
            handler.wfile.write(b"y" * 100)
            time.sleep(0.06)

    lines: list[str] = []
    with serve(answer) as url:
        folder = open_folder(f"{url}/a.jsonl", tmp_path, lines)
        assert folder.read_block(folder.describe(""), 0, 1000) == b"y" * 1000
    assert lines == []


def test_links_of_a_page_are_found_and_a_hostile_one_takes_no_time(tmp_path: Path) -> None:
    """Patterns of fsspec take quadratic time in tags that do not end."""
    page = b"<a class=\"x y\" title='t' href=\"a.jsonl?x=1&y=2\">a</a><A HREF='b.jsonl'>" + (
        b"<a " * 20_000 + b"<a " + b" " * 20_000
    )
    with serve(lambda handler: send(handler, page)) as url:
        begin = time.monotonic()
        folder = open_folder(url, tmp_path, [])
        names = [facts["name"] for facts in folder._list_folder(folder._root, begin + 60)]
    assert sorted(names) == [f"{url}/a.jsonl?x=1&y=2", f"{url}/b.jsonl"]
    assert time.monotonic() - begin < 5
