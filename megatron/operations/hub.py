"""A repository on a Hugging Face Hub, through the official client, and what its refusals mean to an operator.

Every failure ends as one of two: `OperationsError`, which a person must mend (token, name, permission), or `HubUnavailable`, which
time may mend. The token is held in memory only: no message, URL or log line of this module has it, nor the signed part of a URL.
"""

import importlib
import json
import logging
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from megatron.errors import OperationsError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

MAIN = "main"
LONGEST_PAUSE_SECONDS = 60.0
Say = Callable[[str], None]


class HubUnavailable(OperationsError):
    """The Hub did not answer, or asked to wait: what was asked is still to be done."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class HubMoved(HubUnavailable):
    """The branch is not where it was when we looked: look again before anything is sent."""


class UnknownRepository(OperationsError):
    """There is none of this name that the token can see."""


class RetryPolicy:
    """Waits between attempts, longer each time and never two machines in step, until `seconds` have passed without progress."""

    def __init__(self, seconds: float, say: Say) -> None:
        self._seconds, self._say = seconds, say
        self._since: float | None = None
        self._tries = 0

    def note_progress(self) -> None:
        """Something worked: the next trouble begins anew."""
        self._since, self._tries = None, 0

    def wait(self, trouble: HubUnavailable) -> None:
        """
        Raises:
            HubUnavailable: the trouble itself, when the patience would be over before the next attempt.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        pause = min(LONGEST_PAUSE_SECONDS, 2.0**self._tries) * random.uniform(0.5, 1.0)
        pause = max(pause, trouble.retry_after_seconds * random.uniform(1.0, 1.1))
        self._tries += 1
        if now + pause > self._since + self._seconds:
            raise trouble
        self._say(f"{trouble}; again in {pause:.1f} s")
        time.sleep(pause)


@dataclass(frozen=True)
class CommitResult:
    head: str
    """The branch's commit now."""
    ignored: frozenset[str]
    """Paths that the repository's own .gitignore keeps out."""


class Hub:
    """One repository. HF_ENDPOINT says on which Hub; HF_TOKEN or the Hub's own login gives the token."""

    def __init__(
        self, repo: str, *, timeout_seconds: float, say: Say, must_write: bool = True
    ) -> None:
        """
        Args:
            timeout_seconds: how long the Hub may be silent within a request.
            must_write: whether a token is needed.

        Raises:
            OperationsError: huggingface_hub or the token is missing, or the repository or the endpoint has no proper name.
        """
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII):
            raise OperationsError(
                f"{repo!r} names no repository; give ORGANISATION/NAME, like bigscience/tr8-104B-logs"
            )
        try:
            import huggingface_hub
            from huggingface_hub.utils._http import default_client_factory
        except ImportError as error:
            raise OperationsError(
                f"huggingface_hub is not installed ({error}); run: pip install -e '.[hub]'"
            ) from error
        self.repo, self._endpoint = repo, huggingface_hub.constants.ENDPOINT
        self.host = _host(self._endpoint)
        self._client_error = _set_client_timeout(default_client_factory, timeout_seconds)
        _forward_warnings(say)
        if not sys.stderr.isatty():
            huggingface_hub.utils.disable_progress_bars()
        with self._translate_errors():
            self._token = huggingface_hub.get_token()
        if self._token is None and must_write:
            raise OperationsError(
                "there is no token for the Hub; set HF_TOKEN to one with write access, or run: hf auth login"
            )
        self.api = huggingface_hub.HfApi(endpoint=self._endpoint, token=self._token or False)

    # What is there

    def list_branches(self) -> dict[str, str]:
        """Branch -> its commit. One small request."""
        with self._translate_errors():
            return {
                branch.name: branch.target_commit
                for branch in self.api.list_repo_refs(self.repo).branches
            }

    def head(self) -> str:
        """The commit of the main branch."""
        branches = self.list_branches()
        if MAIN not in branches:
            raise OperationsError(
                f"{self.repo} on {self.host} has no branch {MAIN}; make one there"
            )
        return branches[MAIN]

    def list_files(self, commit: str, folder: str | None = None) -> dict[str, str]:
        """Path -> `get_oid` of every file; of one folder, without those within it, when it is given."""
        from huggingface_hub.hf_api import RepoFile

        with self._translate_errors():
            tree = self.api.list_repo_tree(
                self.repo, folder, recursive=folder is None, revision=commit
            )
            return {entry.path: get_oid(entry) for entry in tree if isinstance(entry, RepoFile)}

    def fetch_oids(self, commit: str, paths: Sequence[str]) -> dict[str, str]:
        """Path -> `get_oid` of those of `paths` that are there; at most 1,000."""
        from huggingface_hub.hf_api import RepoFile

        with self._translate_errors():
            found = self.api.get_paths_info(self.repo, list(paths), revision=commit)
            return {entry.path: get_oid(entry) for entry in found if isinstance(entry, RepoFile)}

    def download_file(self, commit: str, path: str) -> bytes:
        """A small file, whole, into memory."""
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers

        with self._translate_errors():
            url = f"{self._endpoint}/{self.repo}/resolve/{commit}/{quote(path)}"
            answer = get_session().get(url, headers=build_hf_headers(token=self._token or False))
            hf_raise_for_status(answer)
            return answer.content

    # What we do there

    def create(self, *, private: bool) -> None:
        """Make the repository; nothing happens where it is there."""
        with self._translate_errors():
            self.api.create_repo(self.repo, private=private, repo_type="model", exist_ok=True)

    def create_branch(self, branch: str) -> None:
        """A branch at the repository's first commit, before any logs."""
        with self._translate_errors():
            first = self.api.list_repo_commits(self.repo)[-1].commit_id
            self.api.create_branch(self.repo, branch=branch, revision=first, exist_ok=True)

    def upload(self, branch: str, additions: Sequence["CommitOperationAdd"]) -> frozenset[str]:
        """Send large contents, which are in no commit yet; what the Hub has already is not sent again.

        Returns the paths that the repository's .gitignore keeps out, which the client leaves out without a word to its caller.
        """
        with self._translate_errors():
            self.api.preupload_lfs_files(self.repo, additions, revision=branch, free_memory=False)
        return frozenset(addition.path_in_repo for addition in additions if addition._should_ignore)

    def commit(
        self,
        branch: str,
        parent: str,
        operations: Sequence["CommitOperationAdd | CommitOperationDelete"],
        title: str,
        description: str = "",
    ) -> CommitResult:
        """One commit upon `parent`, or none at all.

        Raises:
            HubMoved: the branch is elsewhere: somebody committed, or an earlier attempt of ours did and its answer was lost.
            HubUnavailable: perhaps it has landed, perhaps not.
        """
        from huggingface_hub import CommitOperationAdd

        additions = [
            operation for operation in operations if isinstance(operation, CommitOperationAdd)
        ]
        ignored = self.upload(branch, additions)
        remaining = [operation for operation in operations if operation.path_in_repo not in ignored]
        if not remaining:
            return CommitResult(parent, ignored)
        with self._translate_errors():
            done = self.api.create_commit(
                self.repo,
                remaining,
                commit_message=title,
                commit_description=description,
                revision=branch,
                parent_commit=parent,
            )
        return CommitResult(done.oid, ignored)

    # What its refusals mean

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn the client's exceptions into the two kinds. What goes wrong with a local file stays an OSError."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            yield
        except (OSError, RuntimeError, ValueError, self._client_error) as error:
            cause = _find_root_cause(
                error, (HfHubHTTPError, self._client_error, OfflineModeIsEnabled, OSError)
            )
            if isinstance(cause, HfHubHTTPError):
                raise self._explain_refusal(cause) from error
            if isinstance(cause, OfflineModeIsEnabled):
                raise HubUnavailable(
                    "HF_HUB_OFFLINE is set: nothing is sent; unset it", retry_after_seconds=math.inf
                ) from error
            if isinstance(cause, (self._client_error, RuntimeError, json.JSONDecodeError)):
                raise HubUnavailable(
                    f"{self.host} does not answer: {self._clean(cause)}"
                ) from error
            if isinstance(cause, OSError):
                raise cause from error
            raise OperationsError(f"the Hub's client refuses: {self._clean(cause)}") from error

    def _explain_refusal(self, error: Any) -> OperationsError:
        from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError

        status = error.response.status_code
        said = (
            f"{status}: {self._clean(error.server_message)}"
            if error.server_message
            else f"{status}"
        )
        if status == 401:
            return OperationsError(
                f"{self.host} refuses the token ({said}): it has expired or was revoked; make a new one with write access, "
                "and set HF_TOKEN or run: hf auth login"
            )
        if status == 403:
            return OperationsError(
                f"the token may not do this to {self.repo} ({said}); use one with write access to it"
            )
        if status in (409, 412) or isinstance(
            error, (RemoteEntryNotFoundError, RevisionNotFoundError)
        ):
            return HubMoved(f"{self.repo} has changed meanwhile ({said})")
        if status == 404:
            return UnknownRepository(
                f"there is no repository {self.repo} on {self.host} that this token can see; check the name"
            )
        if status in (408, 429) or status >= 500:
            return HubUnavailable(
                f"{self.host} answers {said}", _retry_after_seconds(error.response.headers)
            )
        return OperationsError(f"{self.host} refuses ({said}); the request was for {self.repo}")

    def _clean(self, words: object) -> str:
        text = _remove_signature(
            f"{type(words).__name__}: {words}" if isinstance(words, Exception) else str(words)
        )
        token = getattr(self, "_token", None)
        return " ".join((text.replace(token, "(token)") if token else text).split())[:500]


def get_oid(file: Any) -> str:
    """What the Hub says of a file's content: `sha256:` of it where it is in large storage, else `git:`, the blob's id."""
    return f"sha256:{file.lfs.sha256}" if file.lfs is not None else f"git:{file.blob_id}"


def _host(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OperationsError(
            "HF_ENDPOINT is no address of a Hub; it looks like https://huggingface.co"
        )
    if parts.username or parts.password:
        raise OperationsError(
            "HF_ENDPOINT holds a user or a password, which logs would show; give the token by HF_TOKEN alone"
        )
    return parts.netloc


def _set_client_timeout(factory: Callable[[], Any], timeout_seconds: float) -> type[Exception]:
    """Give the client a time limit, which it has not by itself; returns the base of its transport's errors.

    By a hook on each request: some of the client's calls ask for no limit at all, and a silent Hub would hold them for ever.
    """
    from huggingface_hub import errors, set_client_factory

    def limit(request: Any) -> None:
        request.extensions["timeout"] = dict.fromkeys(
            ("connect", "read", "write", "pool"), timeout_seconds
        )

    def make_client() -> Any:
        made = factory()
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], limit]}
        return made

    set_client_factory(make_client)
    library = importlib.import_module(
        errors.HTTPError.__module__.partition(".")[0]
    )  # httpx; httpx2 since huggingface_hub 2
    error: type[Exception] = library.TransportError
    return error


def _forward_warnings(say: Say) -> None:
    """The client's own warnings (it tries some requests again by itself), without the signatures of storage URLs."""

    class _SayHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(f"huggingface_hub: {_remove_signature(record.getMessage())}")

    logging.getLogger("huggingface_hub").handlers = [_SayHandler()]


def _remove_signature(text: str) -> str:
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?...", text)


def _find_root_cause(error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException:
    """The first of `kinds` among an error and its causes (an upload's thread wraps them); else the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kinds):
            return cause
        cause = cause.__cause__
    return error


def _retry_after_seconds(headers: Any) -> float:
    """What the Hub asks for, in either of its two ways."""
    limit = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""))
    asked = headers.get("retry-after", "")
    return max(float(limit[1]) if limit else 0.0, float(asked) if asked.isdigit() else 0.0)
