"""A store of objects, and a proxy in front of it."""

import http.client
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store.faulty_proxy import FaultyProxy
from object_store.jobs import SECRET, NewStoreJob, StoreJob

BUCKET = "runs"
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    """Start one server for all tests."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("moto_server.py"))],
        stdout=subprocess.PIPE,
        # Without it, moto refuses small parts, as S3 does.
        env={**os.environ, **KEYS, "S3_UPLOAD_PART_MIN_SIZE": "1"},
    )
    assert server.stdout is not None
    yield int(server.stdout.readline())
    server.kill()
    server.wait()


@pytest.fixture
def proxy(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Return a proxy to the store, which clients of this process and its children use."""
    found = FaultyProxy(moto_port)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": found.url}.items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


@pytest.fixture
def one_client(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all folders of this process share a client, because making one takes 0.1 s."""
    from megatron.extras.object_store.objects import ObjectFolder

    system = ObjectFolder("s3://bucket/any")._connect()
    monkeypatch.setattr(ObjectFolder, "_connect", lambda self: system)


@pytest.fixture
def new_store_job(
    corpus: str, tmp_path: Path, proxy: FaultyProxy, address: str
) -> Iterator[NewStoreJob]:
    """Return `new_store_job(flags, ranks=1, place=address)`."""
    jobs: list[StoreJob] = []

    def make(flags: str, ranks: int = 1, place: str = address) -> StoreJob:
        folder = tmp_path / f"job_{len(jobs)}"
        jobs.append(StoreJob(corpus, folder, place, proxy.url, flags, ranks))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def address(moto_port: int, proxy: FaultyProxy) -> str:
    """Return an address below which nothing is stored."""
    # moto does not check the signature.
    connection = http.client.HTTPConnection("127.0.0.1", moto_port)
    connection.request("PUT", f"/{BUCKET}")
    connection.getresponse().read()
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}/a"
