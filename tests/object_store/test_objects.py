"""Requests to a store: conditional writes, parts, and what happens after errors."""

import os
import threading
import uuid
from pathlib import Path

import pytest
from object_store.faulty_proxy import THROTTLING, FaultyProxy

from megatron.base.errors import CheckpointError, ConfigError
from megatron.extras.object_store import objects
from megatron.extras.object_store.objects import ObjectFolder, StaleTagError

pytestmark = pytest.mark.usefixtures("proxy")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # moto accepts small parts. So no test has to move many bytes.
    monkeypatch.setattr(objects, "PART", 64 << 10)


@pytest.fixture
def folder(address: str) -> ObjectFolder:
    return ObjectFolder(address, patience=5)


def make_file(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(size))
    return path


def test_a_write_needs_the_present_tag(folder: ObjectFolder) -> None:
    first = folder.write_if("x", b"1", None)
    with pytest.raises(StaleTagError, match="/a/x was written by another run"):
        folder.write_if("x", b"2", None)
    second = folder.write_if("x", b"3", first)
    with pytest.raises(StaleTagError):
        folder.write_if("x", b"4", first)
    found = folder.read_tagged("x")
    assert found is not None
    assert (found.body, found.tag) == (b"3", second)


def test_one_of_several_writers_wins(folder: ObjectFolder) -> None:
    tag = folder.write_if("x", b"0", None)
    won = []

    def write(number: int) -> None:
        try:
            folder.write_if("x", str(number).encode(), tag)
            won.append(number)
        except StaleTagError:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [folder.read("x")]


def test_a_lost_reply_is_no_conflict(folder: ObjectFolder, proxy: FaultyProxy) -> None:
    lost = proxy.add("lose", "PUT", "/x", times=1)
    tag = folder.write_if("x", b"1", None)
    assert lost.met.is_set()
    proxy.add("lose", "PUT", "/x", times=1)
    folder.write_if("x", b"2", tag)
    assert folder.read("x") == b"2"


@pytest.mark.parametrize("size", [0, 1000, (64 << 10) * 5 + 7])
def test_files_arrive_whole(folder: ObjectFolder, tmp_path: Path, size: int) -> None:
    path = make_file(tmp_path / "f", size)
    folder.upload(path, "d/f")
    assert folder.read("d/f") == path.read_bytes()
    assert folder.list() == {"d/f": size}
    if size:
        assert folder.read("d/f", 10, 20) == path.read_bytes()[10:20]
        assert folder.read("d/f", size + 1, size + 2) == b""


@pytest.mark.parametrize("action", ["SlowDown", "cut", "lose", "InternalError"])
def test_parts_are_sent_again(
    folder: ObjectFolder, proxy: FaultyProxy, tmp_path: Path, action: str
) -> None:
    path = make_file(tmp_path / "f", 400 << 10)
    faults = [
        proxy.add(action, "PUT", "partNumber=3", times=2),
        proxy.add(action, "POST", "uploadId", times=1),
        proxy.add(action, "GET", "/f", times=1),
    ]
    folder.upload(path, "f")
    assert folder.read("f") == path.read_bytes()
    assert all(fault.met.is_set() for fault in faults)


def test_parts_are_sent_with_checksums(
    folder: ObjectFolder, proxy: FaultyProxy, tmp_path: Path
) -> None:
    folder.upload(make_file(tmp_path / "f", 100 << 10), "f")
    sent = [
        headers
        for (method, path), headers in zip(proxy.requests, proxy.headers, strict=True)
        if method == "PUT" and "partNumber" in path
    ]
    assert len(sent) == 2
    for headers in sent:
        assert any(name.lower().startswith("x-amz-checksum-") for name in headers)


def test_unfinished_uploads_are_aborted(
    folder: ObjectFolder, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.add("AccessDenied", "PUT", "partNumber=2")
    for name in ("old/f", "new/f"):
        with pytest.raises(OSError, match="refuses these credentials"):
            folder.upload(make_file(tmp_path / "f", 200 << 10), name)
    monkeypatch.setattr(objects, "_PER_REQUEST", 1)
    assert folder.abort_uploads(lambda key: key.startswith("old/")) == 1
    assert folder.abort_uploads(lambda key: key.startswith("old/")) == 0
    assert folder.abort_uploads(lambda key: True) == 1


def test_listing_and_deletion_of_many(
    folder: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_PER_REQUEST", 10)
    keys = [f"many/{number:04d}" for number in range(23)]
    for _ in folder.run_parallel(lambda key: folder.write(key, b"1"), keys):
        pass
    assert sorted(folder.list("many/")) == keys
    folder.delete(keys)
    assert folder.list() == {}


def test_a_store_with_conditions_is_accepted(folder: ObjectFolder) -> None:
    folder.check_conditional_writes()
    assert folder.list() == {}


def test_a_store_that_ignores_conditions_is_refused(
    folder: ObjectFolder, proxy: FaultyProxy
) -> None:
    proxy.add("blind")
    with pytest.raises(CheckpointError, match="ignores If-None-Match"):
        folder.check_conditional_writes()
    assert folder.list() == {}


def test_a_store_that_ignores_one_condition_is_refused(
    folder: ObjectFolder, proxy: FaultyProxy
) -> None:
    # The third and the fourth write have a tag.
    proxy.add("blind", "PUT", "probe", skip=2)
    with pytest.raises(CheckpointError, match="ignores If-Match"):
        folder.check_conditional_writes()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("ExpiredToken", r"/x: the credentials have expired \(ExpiredToken\); renew"),
        ("AccessDenied", "/x: the store refuses these credentials"),
        ("SlowDown", r"/x: no answer without an error within 1 s \(SlowDown\)"),
        ("cut", "/x: no answer without an error within 1 s"),
        ("BadRequest", "/x: the store answers BadRequest"),
        ("NotImplemented", "/x: the store answers NotImplemented"),
        ("RequestTimeTooSkewed", "/x: the clock of this host is wrong"),
    ],
)
def test_errors_name_the_object_and_the_fix(
    address: str, proxy: FaultyProxy, action: str, message: str
) -> None:
    proxy.add(action, "PUT", "/x")
    with pytest.raises(OSError, match=message) as failure:
        ObjectFolder(address, patience=1).write("x", b"1")
    assert "a-secret" not in str(failure.value)


def test_requests_are_repeated_after_each_code_of_a_throttle(
    folder: ObjectFolder, proxy: FaultyProxy
) -> None:
    for number, code in enumerate(THROTTLING):
        fault = proxy.add(code, "PUT", f"/x{number}", times=1)
        folder.write(f"x{number}", code.encode())
        assert fault.met.is_set(), code
    assert len(folder.list("x")) == len(THROTTLING)


@pytest.mark.parametrize("skip", range(4))
def test_a_probe_whose_reply_is_lost_is_no_refusal(
    folder: ObjectFolder, proxy: FaultyProxy, skip: int
) -> None:
    fault = proxy.add("lose", "PUT", "probe-", skip=skip, times=1)
    folder.check_conditional_writes()
    assert fault.met.is_set()


def test_an_abort_whose_reply_is_lost_is_no_error(folder: ObjectFolder, proxy: FaultyProxy) -> None:
    folder._request("create_multipart_upload", "f")
    proxy.add("lose", "DELETE", "uploadId", times=1)
    assert folder.abort_uploads(lambda key: True) == 1


@pytest.mark.parametrize("user", ["http://me:hidden", "http://me:1/hidden", "me:hidden"])
def test_the_password_of_an_endpoint_is_not_printed(
    user: str, folder: ObjectFolder, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{user}@127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"AWS_ENDPOINT_URL is (http://)?\*\*\*@127.0.0.1"
    ) as failure:
        ObjectFolder(address)
    assert "hidden" not in str(failure.value)
    # A folder that exists connects later, as with a setting in ~/.aws.
    folder._patience = 0.1
    with pytest.raises(OSError, match=r"/x: (no answer|the client refuses)") as late:
        folder.write("x", b"1")
    assert "hidden" not in str(late.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:port")
    with pytest.raises(OSError, match="/x: the client refuses this address or its settings"):
        ObjectFolder(address).write("x", b"1")


def test_wrong_settings_of_the_client_are_not_repeated(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(OSError, match="the client refuses this address or its settings"):
        ObjectFolder(address).write("x", b"1")


def test_renewed_credentials_are_read_again(folder: ObjectFolder, proxy: FaultyProxy) -> None:
    folder.write("x", b"1")
    proxy.add("ExpiredToken", "GET", "/x", times=1)
    with pytest.raises(OSError, match="expired"):
        folder.read("x")
    assert folder.read("x") == b"1"


def test_a_bucket_that_does_not_exist() -> None:
    name = f"none-{uuid.uuid4().hex[:8]}"
    with pytest.raises(OSError, match=f"bucket {name} does not exist; create it"):
        ObjectFolder(f"s3://{name}/a").write("x", b"1")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("gs://bucket/run", "gs://bucket/run is not on a store with the interface of S3"),
        ("s3://", "with the name of a bucket"),
        ("s3://bucket/../x", "with the name of a bucket"),
        ("s3://key:hidden@bucket/run", "must have no user, password or query"),
        ("s3://key:12/hidden@bucket/run", "must have no user, password or query"),
        ("s3://bucket/run?token=hidden", "must have no user, password or query"),
        ("s3://my bucket/run", "has 'my bucket' as bucket, whose name may have letters"),
    ],
)
def test_wrong_addresses_are_refused(wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as failure:
        ObjectFolder(wrong)
    assert "hidden" not in str(failure.value)


def test_a_missing_client_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-3d\[s3\]'"):
        ObjectFolder("s3://bucket/run")
