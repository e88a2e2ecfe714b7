"""Requests to the objects below an address: conditional writes, uploads in parts, ranges.

Invariants: a request that may succeed later is repeated with growing pauses, until its patience is
over. A conditional write that was repeated is never mistaken for another writer's, because its body
has a nonce. Every error names the object. Nothing here reads or prints a credential: the client
finds them itself, in the environment, its files or the machine's role.
"""

import importlib.util
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.outside_file import RECORD_BYTES
from megatron.config.url import find_address_mistake, redact

PATIENCE_SECONDS = 60.0
"""How long a request is repeated. A save that fails is tried again later."""
PART = 16 << 20
"""Bytes of a part of an upload or download, a multiple of a checkpoint's block."""
_MOST_PARTS = 9_000
"""Parts of an upload. S3 allows 10,000."""
_REQUESTS = 8
"""Requests of a rank at the same time. Their parts are in memory."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
_PER_REQUEST = 1_000
"""Objects that one request may list or delete, a limit of S3."""
_TEMPORARY = {
    *("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "OperationAborted"),
    *("ConditionalRequestConflict", "Throttling", "500", "502", "503", "504", "409"),
}
"""Codes after which the same request may succeed."""
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException", "RequestExpired"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "403"}
_MISSING = {"NoSuchKey", "NoSuchUpload", "404", "NotFound"}
_BEYOND = {"InvalidRange", "416"}
_STALE = {"PreconditionFailed", "412"}
Result = TypeVar("Result")


class StaleTagError(OSError):
    """A conditional write was refused, because another writer has written the object."""


@dataclass(frozen=True)
class TaggedObject:
    """The content of an object, and the tag that its next conditional write must name."""

    body: bytes
    tag: str


class ObjectFolder:
    """The objects below an address. All threads of a process may use it."""

    def __init__(self, address: str, patience: float = PATIENCE_SECONDS) -> None:
        """Create the folder without a connection.

        Args:
            address: Such as `s3://bucket/run`.
            patience: Seconds for which a request is repeated.

        Raises:
            ConfigError: The address has a mistake, or the client is not installed.
        """
        mistake = find_address_mistake(address)
        if mistake is not None:
            raise ConfigError(f"{redact(address)} {mistake}")
        if importlib.util.find_spec("s3fs") is None:
            raise ConfigError(
                f"{address} needs the package s3fs. Install it: pip install 'megatron-3d[s3]'"
            )
        self.address = address.rstrip("/")
        self._bucket, _, path = self.address.partition("://")[2].partition("/")
        self._prefix = f"{path}/" if path else ""
        self._patience = patience
        self._system: Any = None
        self._lock = threading.Lock()

    def name(self, key: str) -> str:
        """Return the address of an object, for messages."""
        return f"{self.address}/{key}" if key else self.address

    def read(self, key: str, begin: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of an object from `begin` to `end`, by default all of them.

        If the object is shorter, the result is shorter too.

        Raises:
            FileNotFoundError: There is no such object.
            OSError: It cannot be read.
        """
        options = {} if begin is None else {"Range": f"bytes={begin}-{(end or 0) - 1}"}
        try:
            return self._read(key, options).body
        except OSError as error:
            # The object ends before `begin`.
            if _find_code(error) in _BEYOND:
                return b""
            raise

    def read_tagged(self, key: str) -> TaggedObject | None:
        """Return a small object with its tag, or None if it does not exist.

        Raises:
            CheckpointError: It is too large for a record.
            OSError: It cannot be read.
        """
        try:
            return self._read(key, {}, RECORD_BYTES)
        except FileNotFoundError:
            return None

    def write(self, key: str, body: bytes) -> None:
        """Write a small object, whatever is there.

        Raises:
            OSError: It cannot be written.
        """
        self._request("put_object", key, Body=body)

    def write_if(self, key: str, body: bytes, tag: str | None) -> str:
        """Write an object if nobody has written it since it had the tag. Return its new tag.

        Args:
            key: The object.
            body: Its new content, which must differ from all earlier ones.
            tag: The tag of its present content. None if it must not exist.

        Raises:
            StaleTagError: It has another tag, or exists.
            OSError: It cannot be written.
        """
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            return str(self._request("put_object", key, Body=body, **condition)["ETag"])
        except (StaleTagError, FileNotFoundError) as refusal:
            # The reply to an earlier attempt may have been lost. The object is then our own.
            found = self.read_tagged(key)
            if found is not None and found.body == body:
                return found.tag
            raise StaleTagError(f"{self.name(key)} was written by another run") from refusal

    def upload(self, path: Path, key: str) -> None:
        """Write a file to an object, in parts at the same time if it is large.

        The client sends a checksum with each part, and the store compares it.

        Raises:
            OSError: The file cannot be read, or the object cannot be written.
        """
        size = path.stat().st_size
        part = max(PART, -(-size // _MOST_PARTS))
        if size <= part:
            self.write(key, path.read_bytes())
            return
        upload = self._request("create_multipart_upload", key)["UploadId"]
        with open(path, "rb") as file:

            def send(number: int) -> dict[str, Any]:
                body = os.pread(file.fileno(), part, part * (number - 1))
                answer = self._request(
                    "upload_part", key, UploadId=upload, PartNumber=number, Body=body
                )
                return {"PartNumber": number, "ETag": answer["ETag"]}

            parts = list(self.run_parallel(send, range(1, -(-size // part) + 1)))
        try:
            self._request(
                "complete_multipart_upload",
                key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError:
            # The reply to an earlier attempt may have been lost. Then the upload is gone and the
            # object is there. No other process writes to this key.
            if self._request("head_object", key)["ContentLength"] != size:
                raise

    def list(self, below: str = "") -> dict[str, int]:
        """Return the objects whose keys begin with a text: key -> bytes.

        Raises:
            OSError: They cannot be listed.
        """
        found: dict[str, int] = {}
        for answer in self._list_pages("list_objects_v2", below, "ContinuationToken", "MaxKeys"):
            for entry in answer.get("Contents", ()):
                found[entry["Key"].removeprefix(self._prefix)] = entry["Size"]
        return found

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects. Those that do not exist count as deleted.

        Raises:
            OSError: One cannot be deleted.
        """
        waiting = sorted(keys)
        while waiting:
            some, waiting = waiting[:_PER_REQUEST], waiting[_PER_REQUEST:]
            objects = [{"Key": self._prefix + key} for key in some]
            answer = self._request(
                "delete_objects", "", Delete={"Objects": objects, "Quiet": True}, with_key=False
            )
            for error in answer.get("Errors", ()):
                raise OSError(f"{self.name(some[0])} cannot be deleted: {error.get('Code')}")

    def abort_uploads(self, is_over: Callable[[str], bool]) -> int:
        """Abort the unfinished uploads in parts of the keys that a function accepts.

        Returns:
            Their number.

        Raises:
            OSError: They cannot be listed or aborted.
        """
        aborted = 0
        for answer in self._list_pages("list_multipart_uploads", "", "KeyMarker", "MaxUploads"):
            for entry in answer.get("Uploads", ()):
                key = entry["Key"].removeprefix(self._prefix)
                if is_over(key):
                    self._request("abort_multipart_upload", key, UploadId=entry["UploadId"])
                    aborted += 1
        return aborted

    def check_conditional_writes(self) -> None:
        """Check that the store refuses a write whose condition does not hold, and no other.

        Raises:
            CheckpointError: It does not.
            OSError: The store does not answer, or refuses all writes.
        """
        key = f"probe-{uuid.uuid4().hex}"

        def is_accepted(condition: dict[str, str]) -> str | None:
            try:
                body = uuid.uuid4().bytes
                return str(self._request("put_object", key, Body=body, **condition)["ETag"])
            except StaleTagError:
                return None

        try:
            first = is_accepted({"IfNoneMatch": "*"})
            again = is_accepted({"IfNoneMatch": "*"})
            second = is_accepted({"IfMatch": again or first or "*"})
            # `first` is the tag of a content that was replaced.
            stale = is_accepted({"IfMatch": first or "*"})
            ignored = [
                name
                for name, tag in (("If-None-Match", again), ("If-Match", stale))
                if tag is not None
            ]
        finally:
            self.delete([key])
        if ignored or first is None or second is None:
            what = (
                f"ignores {' and '.join(ignored)}"
                if ignored
                else "refuses a conditional write that is right"
            )
            raise CheckpointError(
                f"{self.address}: this store {what}, so two runs could overwrite each other's "
                "checkpoints. Use a store with conditional writes (S3, MinIO, R2), or a folder"
            )

    def run_parallel(
        self, act: Callable[[Any], Result], arguments: Iterable[Any]
    ) -> Iterator[Result]:
        """Call a function in several threads, and yield its results in order."""
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="object-store") as pool:
            waiting = [pool.submit(act, argument) for argument in arguments]
            try:
                for future in waiting:
                    yield future.result()
            finally:
                # After an error, the requests that have not started are left out.
                for future in waiting:
                    future.cancel()

    def _list_pages(
        self, method: str, below: str, marker: str, limit: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the answers of a listing."""
        position: dict[str, Any] = {}
        while True:
            answer = self._request(
                method,
                "",
                Prefix=self._prefix + below,
                with_key=False,
                **position,
                **{limit: _PER_REQUEST},
            )
            yield answer
            if not answer.get("IsTruncated"):
                return
            position[marker] = answer[f"Next{marker}"]
            if marker == "KeyMarker":
                position["UploadIdMarker"] = answer["NextUploadIdMarker"]

    def _read(self, key: str, options: dict[str, str], limit: int | None = None) -> TaggedObject:
        """Read an object or a range of it, with its tag. See `read` and `read_tagged`."""

        async def get() -> TaggedObject:
            answer = await system._call_s3(
                "get_object", Bucket=self._bucket, Key=self._prefix + key, **options
            )
            # A foreign object may have any size.
            if limit is not None and answer["ContentLength"] > limit:
                raise CheckpointError(f"{self.name(key)} has more than {limit:,} bytes")
            async with answer["Body"] as body:
                return TaggedObject(await body.read(), answer["ETag"])

        system = self._connect()
        return self._repeat(lambda: _run_in_loop(system, get), key)

    def _request(
        self, method: str, key: str, *, with_key: bool = True, **arguments: Any
    ) -> dict[str, Any]:
        """Send a request, and repeat it after errors that may be temporary.

        Raises:
            StaleTagError: The condition of a write does not hold.
            FileNotFoundError: The object or the upload does not exist.
            OSError: Anything else. The message names the object and the fix.
        """
        if with_key:
            arguments["Key"] = self._prefix + key

        def send() -> dict[str, Any]:
            answer: dict[str, Any] = self._connect().call_s3(
                method, Bucket=self._bucket, **arguments
            )
            return answer

        return self._repeat(send, key)

    def _repeat(self, send: Callable[[], Result], key: str) -> Result:
        end = time.monotonic() + self._patience
        pause = _FIRST_PAUSE
        while True:
            try:
                return send()
            except Exception as error:
                if not _is_of_a_request(error):
                    raise
                code = _find_code(error)
                if code in _STALE:
                    raise StaleTagError(f"{self.name(key)} was written by another run") from error
                if code is not None and code not in _TEMPORARY:
                    raise self._explain(key, code, error) from error
                if time.monotonic() + pause > end:
                    raise OSError(
                        f"{self.name(key)}: no answer without an error within "
                        f"{self._patience:g} s ({code or _describe(error)}); check the network, "
                        "the endpoint and the state of the store"
                    ) from error
            # Ranks that fail together should not come back together.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _explain(self, key: str, code: str, error: Exception) -> OSError:
        """Return the error for people: the object, what the store has answered, and the fix."""
        name = self.name(key)
        if code in _MISSING:
            return FileNotFoundError(f"{name} does not exist")
        if code == "NoSuchBucket":
            return OSError(
                f"{name}: the bucket {self._bucket} does not exist; create it, or "
                "correct the address"
            )
        if code in _EXPIRED | _REFUSED:
            # A new client reads the credentials again, which may have been renewed in a file.
            self._system = None
        if code in _EXPIRED:
            return OSError(
                f"{name}: the credentials have expired ({code}); renew those that the "
                "client finds (environment, ~/.aws, role of the machine)"
            )
        if code in _REFUSED:
            return OSError(
                f"{name}: the store refuses these credentials ({code}); the client finds"
                " them in the environment, ~/.aws or the role of the machine. They need "
                "to list, read, write and delete objects here"
            )
        return OSError(f"{name}: the store answers {code}: {_describe(error)}")

    def _connect(self) -> Any:
        """Return the client, which is created at the first request."""
        with self._lock:
            if self._system is None:
                import s3fs

                # All repetitions are in `_repeat`, which knows the object and the patience.
                self._system = s3fs.S3FileSystem(
                    skip_instance_cache=True,
                    use_listings_cache=False,
                    config_kwargs={
                        "retries": {"total_max_attempts": 1},
                        "connect_timeout": 10,
                        "read_timeout": 30,
                        "max_pool_connections": 2 * _REQUESTS,
                    },
                )
                self._system.retries = 1
            return self._system


def _run_in_loop(system: Any, act: Callable[[], Any]) -> Any:
    import fsspec.asyn

    return fsspec.asyn.sync(system.loop, act)


def _find_code(error: BaseException | None) -> str | None:
    """Return the store's code of an error, or None if the store has not answered."""
    while error is not None:
        answer = getattr(error, "response", None)
        if isinstance(answer, dict) and "Error" in answer:
            return str(answer["Error"].get("Code"))
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            return "AccessDenied"
        error = error.__cause__
    return None


def _is_of_a_request(error: Exception) -> bool:
    """Return whether an error is one of a request, and not a mistake in this package."""
    if isinstance(error, OSError):
        return True
    return type(error).__module__.partition(".")[0] in ("botocore", "aiobotocore", "aiohttp")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
