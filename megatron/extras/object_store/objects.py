"""Requests to the objects below an address: conditional writes, uploads in parts, ranges.

Invariants: a request that may succeed later is repeated with growing pauses, until its patience is
over. A conditional write that was repeated is never mistaken for another writer's, because its body
has a nonce. Every error names the object. Nothing here reads or prints a credential: the client
finds them itself, in the environment, its files or the machine's role.
"""

import contextlib
import importlib.util
import os
import random
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.outside_file import RECORD_BYTES, load_bytes, open_regular
from megatron.base.plain_text import find_address_mistake, is_url, redact_address
from megatron.checkpoint.digest import Digester

PATIENCE_SECONDS = 60.0
"""How long a request is repeated. A save that fails is tried again later."""
PART = 16 << 20
"""Bytes of a part of an upload or download, a multiple of a checkpoint's block."""
_MOST_PARTS = 9_000
"""Parts of an upload. S3 allows 10,000."""
_REQUESTS = 8
"""Requests of a rank at the same time. Their parts are in memory."""
_LONGEST_PAUSE = 10.0
_PER_REQUEST = 1_000
"""Objects that one request may list or delete, a limit of S3."""
_TEMPORARY = re.compile(
    r"SlowDown\w*|Throttl\w+|RequestThrottled\w*|RequestTimeout\w*|RequestLimitExceeded"
    r"|RequestError|TooManyRequests\w*|ProvisionedThroughputExceededException|InternalError"
    r"|TransactionInProgressException|BandwidthLimitExceeded|LimitExceededException|BadDigest"
    r"|PriorRequestNotComplete|EC2ThrottledException|ServiceUnavailable"
    r"|XMinioServerNotInitialized|OperationAborted|ConditionalRequestConflict|409",
    re.ASCII,
)
"""Codes after which the same request may succeed.

They are those that botocore (`retries/standard.py`, `data/_retry.json`) and the clients of MinIO
(`retry.go`, `Retry.java`) repeat, and three that the documentation of S3 and MinIO calls temporary.
`ExpiredToken` is not among them, although MinIO's client repeats it: a renewal may take hours.
"""
_TEMPORARY_STATUS = {408, 429, 499, 500, 502, 503, 504, 509, 520}
"""Status codes of HTTP after which these clients repeat a request, whatever its code."""
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "403"}
_MISSING = {"NoSuchKey", "NoSuchUpload", "404"}
_STALE = {"PreconditionFailed", "412"}
_BEYOND = {"InvalidRange", "416"}
_CLIENT = {"botocore", "aiobotocore", "aiohttp"}
"""Packages whose errors are those of a request."""
_WRONG_INPUT = {
    *("ParamValidationError", "NoRegionError", "UnknownRegionError", "ProfileNotFound"),
    "EndpointResolutionError",
}
"""Errors of the client about flags or settings, which come before the request."""
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
            raise ConfigError(mistake)
        if importlib.util.find_spec("s3fs") is None:
            raise ConfigError(
                f"{address} needs the package s3fs. Install it: pip install 'megatron-3d[s3]'"
            )
        for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            url = os.environ.get(variable, "")
            shown = redact_address(url)
            if shown != url:
                raise ConfigError(
                    f"{variable} is {shown}. It must have no user, password or query, which "
                    "the client cannot use. Give credentials in AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, or in ~/.aws"
                )
        self.address = address.rstrip("/")
        self._bucket, _, path = self.address.partition("://")[2].partition("/")
        # With the slash, the objects of s3://bucket/run do not include those of run2.
        self._prefix = f"{path}/" * bool(path)
        self._patience = patience
        self._system: Any = None
        # Several threads may send the first request.
        self._lock = threading.Lock()

    def name(self, key: str) -> str:
        """Return the address of an object, for messages."""
        return f"{self.address}/{key}"

    def enter(self, keys: str) -> "ObjectFolder":
        """Return the folder of the objects whose keys begin with a text and a slash."""
        found = ObjectFolder(self.name(keys), self._patience)
        # A new client would read the credentials and connect again.
        found._system = self._connect()
        return found

    def read(self, key: str, begin: int | None = None, end: int = 0) -> bytes:
        """Return the bytes of an object from `begin` to `end`, by default all of them.

        If the object is shorter, the result is shorter too.

        Raises:
            FileNotFoundError: There is no such object.
            OSError: It cannot be read.
        """
        options = {} if begin is None else {"Range": f"bytes={begin}-{end - 1}"}
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

    def upload(self, path: Path, key: str, xxh128: str | None = None) -> None:
        """Write a file to an object, in parts at the same time if it is large.

        The client sends a checksum with each part, and the store compares it.

        Args:
            path: The file.
            key: The object.
            xxh128: The digest that the file must have. It is computed from the bytes that are
                sent. None for a file that may change.

        Raises:
            OSError: The file cannot be read or has another digest, or the object cannot be written.
        """
        size = path.stat().st_size
        # Larger parts for a file that would have too many.
        part = max(PART, -(-size // _MOST_PARTS))
        digester = Digester()

        def check(body: bytes) -> bytes:
            digester.update(body)
            return body

        def refuse_changed() -> None:
            if xxh128 not in (None, digester.digest().xxh128):
                raise OSError(
                    f"{path} is not what was written, so {self.name(key)} is not stored. Another "
                    "process has changed it, or the disk or the memory of this host is damaged"
                )

        if size <= part:
            body = check(load_bytes(path, part))
            refuse_changed()
            self.write(key, body)
            return
        upload = self._request("create_multipart_upload", key)["UploadId"]

        def send(numbered: tuple[int, bytes]) -> dict[str, Any]:
            number, body = numbered
            named = {"UploadId": upload, "PartNumber": number}
            return {
                "PartNumber": number,
                "ETag": self._request("upload_part", key, Body=body, **named)["ETag"],
            }

        with open_regular(path) as file:
            # The parts are read in order, because the digest needs that.
            bodies = iter(lambda: check(file.read(part)), b"")
            parts = list(self.run_parallel(send, enumerate(bodies, 1)))
        refuse_changed()
        listed = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        try:
            self._request("complete_multipart_upload", key, **listed)
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
        options = {"MaxKeys": _PER_REQUEST, "Prefix": self._prefix + below}
        return {
            entry["Key"].removeprefix(self._prefix): entry["Size"]
            for answer in self._list_pages("list_objects_v2", options, ("ContinuationToken",))
            for entry in answer.get("Contents", ())
        }

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Those that do not exist count as deleted.

        Raises:
            OSError: One cannot be deleted.
        """
        objects = [{"Key": self._prefix + key} for key in keys]
        while objects:
            some, objects = objects[:_PER_REQUEST], objects[_PER_REQUEST:]
            answer = self._request("delete_objects", None, Delete={"Objects": some})
            for error in answer.get("Errors", ()):
                raise OSError(f"{self.address}: {error['Key']} cannot be deleted: {error['Code']}")

    def abort_uploads(self, is_over: Callable[[str], bool]) -> int:
        """Abort the unfinished uploads in parts of the keys that a function accepts.

        Returns:
            Their number.

        Raises:
            OSError: They cannot be listed or aborted.
        """
        aborted = 0
        options = {"MaxUploads": _PER_REQUEST, "Prefix": self._prefix}
        markers = ("KeyMarker", "UploadIdMarker")
        for answer in self._list_pages("list_multipart_uploads", options, markers):
            for entry in answer.get("Uploads", ()):
                key = entry["Key"].removeprefix(self._prefix)
                if is_over(key):
                    # It is gone if the reply to an earlier attempt was lost.
                    with contextlib.suppress(FileNotFoundError):
                        self._request("abort_multipart_upload", key, UploadId=entry["UploadId"])
                    aborted += 1
        return aborted

    def check_conditional_writes(self) -> None:
        """Check that the store refuses a write whose condition does not hold, and no other.

        Raises:
            CheckpointError: It does not.
            OSError: The store does not answer, or refuses all writes.
        """
        # Several runs may start at the same time.
        key = f"probe-{uuid.uuid4().hex}"

        def write(tag: str | None) -> str | None:
            try:
                return self.write_if(key, uuid.uuid4().bytes, tag)
            except StaleTagError:
                return None

        try:
            first = write(None) or ""
            again = write(None)
            second = write(again or first)
            # `first` is the tag of a content that was replaced.
            stale = write(first)
        finally:
            self.delete([key])
        accepted = {"If-None-Match": again, "If-Match": stale}
        ignored = " and ".join(name for name, tag in accepted.items() if tag is not None)
        if ignored or not first or second is None:
            raise CheckpointError(
                f"{self.address}: this store ignores {ignored or 'the right condition'}, so two "
                "runs could overwrite each other's checkpoints. Use a store with conditional "
                "writes (S3, MinIO, R2), or a folder"
            )

    def run_parallel(
        self, act: Callable[[Any], Result], arguments: Iterable[Any]
    ) -> Iterator[Result]:
        """Call a function in several threads, and yield its results in order.

        At most _REQUESTS arguments and results are in memory.
        """
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="object-store") as pool:
            waiting: deque[Future[Result]] = deque()
            try:
                for argument in arguments:
                    if len(waiting) == _REQUESTS:
                        yield waiting.popleft().result()
                    waiting.append(pool.submit(act, argument))
                while waiting:
                    yield waiting.popleft().result()
            finally:
                # After an error, the requests that have not started are left out.
                for future in waiting:
                    future.cancel()

    def _list_pages(
        self, method: str, options: dict[str, Any], markers: Iterable[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the answers of a listing."""
        while True:
            answer = self._request(method, None, **options)
            yield answer
            if not answer.get("IsTruncated"):
                return
            # A listing of uploads goes on after a key and an upload.
            options = {**options, **{marker: answer[f"Next{marker}"] for marker in markers}}

    def _read(self, key: str, options: dict[str, str], limit: int | None = None) -> TaggedObject:
        """Read an object or a range of it, with its tag. See `read` and `read_tagged`."""

        async def get() -> TaggedObject:
            answer = await self._connect()._call_s3(
                "get_object", Bucket=self._bucket, Key=self._prefix + key, **options
            )
            # A foreign object may have any size.
            if limit is not None and answer["ContentLength"] > limit:
                raise CheckpointError(f"{self.name(key)} has more than {limit:,} bytes")
            async with answer["Body"] as body:
                return TaggedObject(await body.read(), answer["ETag"])

        def send() -> TaggedObject:
            import fsspec.asyn

            found: TaggedObject = fsspec.asyn.sync(self._connect().loop, get)
            return found

        return self._repeat(send, key)

    def _request(self, method: str, key: str | None, **arguments: Any) -> dict[str, Any]:
        """Send a request, and repeat it after errors that may be temporary.

        Raises:
            StaleTagError: The condition of a write does not hold.
            FileNotFoundError: The object or the upload does not exist.
            OSError: Anything else. The message names the object and the fix.
        """
        if key is not None:
            arguments["Key"] = self._prefix + key
        arguments["Bucket"] = self._bucket
        return self._repeat(lambda: self._connect().call_s3(method, **arguments), key or "")

    def _repeat(self, send: Callable[[], Result], key: str) -> Result:
        end = time.monotonic() + self._patience
        pause = 0.1
        while True:
            try:
                return send()
            except Exception as error:
                module = type(error).__module__.partition(".")[0]
                # Anything else is a mistake in this package. A wrong endpoint is a ValueError.
                if not isinstance(error, OSError | ValueError) and module not in _CLIENT:
                    raise
                is_temporary = _is_temporary(error)
                if not is_temporary or time.monotonic() + pause > end:
                    raise self._explain(key, error, is_temporary=is_temporary) from error
            # Ranks that fail together should not come back together.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _explain(self, key: str, error: Exception, *, is_temporary: bool) -> OSError:
        """Return the error for people: the object, what the store has answered, and the fix."""
        name = self.name(key).rstrip("/")
        code = _find_code(error)
        # The URL of the endpoint may have a password.
        said = redact_address(str(error))
        if code in _STALE:
            return StaleTagError(f"{name} was written by another run")
        if code in _MISSING:
            return FileNotFoundError(f"{name} does not exist")
        if code in _EXPIRED | _REFUSED:
            # A new client reads the credentials again, which may have been renewed in a file.
            self._system = None
        where = "those that the client finds (environment, ~/.aws, role of the machine)"
        if code in _EXPIRED:
            return OSError(f"{name}: the credentials have expired ({code}); renew {where}")
        if code in _REFUSED:
            what = f"the store refuses these credentials ({code}); give {where}"
            return OSError(f"{name}: {what} the right to list, read, write and delete here")
        if code == "NoSuchBucket":
            what = f"the bucket {self._bucket} does not exist; create it, or correct the address"
            return OSError(f"{name}: {what}")
        if code == "RequestTimeTooSkewed":
            return OSError(f"{name}: the clock of this host is wrong ({code}); set it")
        if code is not None and not is_temporary:
            return OSError(f"{name}: the store answers {code}: {said}")
        if not is_temporary:
            return OSError(
                f"{name}: the client refuses this address or its settings: {said}; correct the "
                "address, AWS_ENDPOINT_URL, or the file ~/.aws/config"
            )
        return OSError(
            f"{name}: no answer without an error within {self._patience:g} s "
            f"({code or redact_address(repr(error))}); check the network, the endpoint and the "
            "state of the store"
        )

    def _connect(self) -> Any:
        """Return the client, which is created at the first request."""
        with self._lock:
            if self._system is None:
                import s3fs

                config = {
                    # All repetitions are in `_repeat`, which knows the object and the patience.
                    "retries": {"total_max_attempts": 1},
                    "connect_timeout": 10,
                    "read_timeout": 30,
                    "max_pool_connections": 2 * _REQUESTS,
                }
                self._system = s3fs.S3FileSystem(
                    skip_instance_cache=True, use_listings_cache=False, config_kwargs=config
                )
                self._system.retries = 1
            return self._system


def find_address(path: str | os.PathLike[str]) -> str | None:
    """Return the address in an argument of a command line, or None if it is a folder."""
    # An argument of the type Path has lost a slash.
    text = re.sub(r"^(\w+):/+", r"\1://", os.fspath(path))
    return text.rstrip("/") if is_url(text) else None


@contextlib.contextmanager
def raise_as_checkpoint_error() -> Iterator[None]:
    """Raise errors of a store or a disk as errors that all ranks report."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(str(error)) from error


def _find_answer(error: BaseException | None) -> dict[str, Any]:
    """Return the store's answer in an error. It is empty if the store has not answered."""
    while error is not None:
        answer = getattr(error, "response", None)
        if isinstance(answer, dict) and "Error" in answer:
            return answer
        error = error.__cause__
    return {}


def _find_code(error: BaseException) -> str | None:
    """Return the store's code of an error, or None if the store has not answered."""
    answer = _find_answer(error)
    if answer:
        return str(answer["Error"].get("Code"))
    # The client found no key, so it has sent nothing and has no answer.
    if "CredentialsError" in type(error).__name__:
        return "AccessDenied"
    return None


def _is_temporary(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    code = _find_code(error)
    if code is None:
        # No answer came, unless the client has refused to send the request.
        return not isinstance(error, ValueError) and type(error).__name__ not in _WRONG_INPUT
    status = _find_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return _TEMPORARY.fullmatch(code) is not None or status in _TEMPORARY_STATUS
