"""Data behind URLs: the same samples, retries, a bounded cache, changes and secrets."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from data.file_server import FailingServer, serve
from data.row_files import make_documents, write_dataset, write_rows
from data.test_stream_formats import TEXTS, TOKENS

from megatron.base.errors import DataError
from megatron.base.plain_text import has_secret, redact
from megatron.extras.samples.stream import remote
from megatron.extras.samples.stream.formats import FORMATS
from megatron.extras.samples.stream.listing import Listing, list_dataset
from megatron.extras.samples.stream.remote import BlockCache

Served = tuple[Path, str, type[FailingServer]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Yield a folder, its URL, and the class with which the server can be told to fail."""
    (tmp_path / "served").mkdir()
    with serve(tmp_path / "served") as (url, server):
        yield tmp_path / "served", url, server


def read_all(listing: Listing) -> list:
    """Return all rows of a data set."""
    rows = []
    for number, file in enumerate(listing.file.tolist()):
        begin, end = int(listing.begin[number]), int(listing.end[number])
        files = FORMATS[listing.format]
        for chunk in files.read_rows(listing.get_path(file), listing.column, begin, end, 0):
            rows += [row if isinstance(row, str) else row.tolist() for row in chunk]
    return rows


@pytest.mark.parametrize("suffix", ["parquet", "file.arrow", "stream.arrow", "jsonl"])
@pytest.mark.parametrize("documents", [TEXTS, TOKENS], ids=["texts", "tokens"])
# Without a cache each read is a request, which takes seconds.
@pytest.mark.parametrize("cache_gb", [1, pytest.param(0, marks=pytest.mark.full)])
def test_each_format_is_read_from_a_server(
    served: Served,
    tmp_path: Path,
    suffix: str,
    documents: list,
    cache_gb: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Small blocks, so that rows lie across the bounds of blocks.
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 5_000)
    monkeypatch.setattr(remote, "_TAIL_BYTES", 3_000)
    folder, url, server = served
    write_rows(folder / "web" / f"a.{suffix}", "column", documents[:1700], group=500)
    write_rows(folder / "web" / "deeper" / f"b.{suffix}", "column", documents[1700:], group=500)
    write_rows(folder / "web" / f".hidden.{suffix}", "column", documents, group=500)
    format = suffix.split(".")[-1]
    cache = str(tmp_path / "cache")
    listing = list_dataset(f"{url}/web", format, "column", cache, cache_gb=cache_gb)
    here = list_dataset(str(folder / "web"), format, "column", None)
    assert listing.compute_fingerprint() == here.compute_fingerprint()
    assert read_all(listing) == read_all(here) == documents
    one = list_dataset(f"{url}/web/a.{suffix}", format, "column", cache, cache_gb=cache_gb)
    assert read_all(one) == documents[:1700]
    before = server.sent
    assert read_all(listing) == documents
    if cache_gb:
        assert server.sent == before, "everything is in the cache"
    else:
        assert not (tmp_path / "cache" / "remote-blocks").exists()


def test_memory_and_file_urls(tmp_path: Path) -> None:
    documents = make_documents(300, seed=1)
    write_dataset(tmp_path / "web", documents)
    system = fsspec.filesystem("memory")
    system.put(str(tmp_path / "web"), "/remote-test", recursive=True)
    for url in ("memory://remote-test", f"file://{tmp_path}/web"):
        listing = list_dataset(url, "parquet", "tokens", str(tmp_path / "cache"), cache_gb=1)
        assert sorted(read_all(listing)) == sorted(documents)
    listing = list_dataset(
        "memory://remote-test", "parquet", "tokens", str(tmp_path / "cache"), cache_gb=1
    )
    system.pipe(f"/remote-test/{listing.files[0].name}", b"other")
    with pytest.raises(DataError, match="has changed since the run started"):
        listing.get_path(0)


def test_failed_requests_are_repeated_and_reported(
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.01)
    folder, url, server = served
    documents = make_documents(500, seed=1)
    write_rows(folder / "a.parquet", "tokens", documents)
    for methods in (["GET"], ["HEAD", "GET"]):
        listing = list_dataset(url, "parquet", "tokens", str(tmp_path / "cache"))
        server.failures.update(dict.fromkeys(methods, 2))
        assert read_all(listing) == documents
        assert server.failures.total() == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert "Try 3 of 5" in lines[1]
    server.failures["GET"] = 1000
    with pytest.raises(DataError, match="after 5 tries"):
        read_all(listing)
    server.failures["GET"] = 0
    write_rows(folder / "a.parquet", "tokens", documents[1:])
    with pytest.raises(DataError, match="has changed since the run started"):
        read_all(listing)
    (folder / "a.parquet").unlink()
    with pytest.raises(DataError, match="does not exist"):
        read_all(listing)


def test_the_cache_stays_below_its_limit(tmp_path: Path) -> None:
    said: list[str] = []
    first, second = (BlockCache(str(tmp_path / "c"), 100_000, said.append) for _ in range(2))
    for number in range(400):
        cache = (first, second)[number % 2]
        cache.store(f"{number:032x}", bytes([number % 256]) * 1000)
        # The first block is used all the time, so it is never the oldest.
        assert first.load(f"{0:032x}") == bytes(1000)
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 112_000
    assert len(files) > 80
    assert first.load(f"{1:032x}") is None
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-1])
    assert first.load(newest.name) is None, "a damaged block is fetched again"
    assert not said
    (tmp_path / "file").write_text("")
    blocked = BlockCache(str(tmp_path / "file"), 100, said.append)
    blocked.store("0" * 32, b"1")
    blocked.store("0" * 32, b"1")
    assert len(said) == 1
    assert os.path.getsize(tmp_path / "file") == 0


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("s3://bucket/a@b", "http://host:9000/a@b", "https://host/a:b@c"):
        assert redact(url) == url
    # Many secret keys have a slash.
    for secret in ("se/cr+et", "12/34", "s/" * 400):
        text = f"s3://KEY:{secret}@bucket/run, s3://b"
        assert redact(text) == "s3://***@bucket/run, s3://b"
    assert not has_secret("s3://bucket/folder")
    text = "at https://me:pw@x.org/a/b?token=abc and (url=URL('http://y/z?key=abc'))"
    assert redact(text) == "at https://***@x.org/a/b?*** and (url=URL('http://y/z?***'))"
    # A hostile answer takes no time that grows faster than its size.
    begin = time.process_time()
    for part in ("a://", "a://b:", "a://@", "a://b:1/x@", "?a://"):
        redact(part * 100_000)
    assert time.process_time() - begin < 20
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.0)
    for url in ("http://me:secret@127.0.0.1:9/web", "http://127.0.0.1:9/web?token=secret"):
        with pytest.raises(DataError, match="after 5 tries") as raised:
            list_dataset(url, "parquet", "tokens", str(tmp_path))
        assert "secret" not in str(raised.value)
        assert raised.value.__suppress_context__ or raised.value.__context__ is None
    with pytest.raises(DataError, match="needs --data-cache-path"):
        list_dataset("memory://x", "parquet", "tokens", None)
    with pytest.raises(DataError, match="cannot be opened"):
        list_dataset("nothing-like-this://x", "parquet", "tokens", str(tmp_path))
