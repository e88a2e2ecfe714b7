"""Access to one repository on a Hugging Face Hub, through the official client.

Invariant: every failure of the Hub is raised as one of two kinds. An `OperationsError` needs a
person, who corrects a token, a name or a permission. A `HubUnavailableError` may pass if the caller
waits and tries again.

The token is held in memory only. No message, URL or log line of this module contains the token,
or the signed part of a storage URL.
"""

import importlib
import json
import logging
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from megatron.base.errors import OperationsError
from megatron.base.plain_text import make_plain, print_to_stderr
from megatron.extras.operations.hub.answers import AnswerTooLongError, HubBound

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

MAIN = "main"
"""Name of the branch that holds the logs."""
LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause between two attempts, unless the Hub itself asks for a longer one."""
Say = Callable[[str], None]
"""Function that prints or logs one line."""


def warn(line: str) -> None:
    """Print a line to standard error. It may contain names of files and answers of the Hub."""
    print_to_stderr(make_plain(line))


class HubUnavailableError(OperationsError):
    """The Hub did not answer, or asked the client to wait. The request can be tried again."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        """Store the pause that the Hub asked for, 0 if it asked for none."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class HubMovedError(HubUnavailableError):
    """The branch has changed since it was listed. List it again before anything is sent."""


class HubOfflineError(HubUnavailableError):
    """The user has set HF_HUB_OFFLINE, so the client sends no request."""


class UnknownRepositoryError(OperationsError):
    """The token sees no repository of this name."""


@dataclass
class RetryPolicy:
    """Exponential backoff with jitter, until some seconds have passed without progress."""

    _seconds: float
    _log: Say
    """Receives a line for each pause."""
    _since: float | None = None
    _tries: int = 0

    def note_progress(self) -> None:
        """Reset the time limit and the length of the pauses, because a request worked."""
        self._since = None
        self._tries = 0

    def wait(self, trouble: HubUnavailableError) -> None:
        """Sleep until the next attempt is due.

        Raises:
            HubUnavailableError: `trouble` itself, if the time limit ends before the next attempt.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
        # The random factors keep machines apart that failed at the same time. Otherwise all of them
        # would return to the Hub in the same second, and fail again.
        pause = min(LONGEST_PAUSE_SECONDS, 2.0**self._tries) * random.uniform(0.5, 1.0)
        pause = max(pause, trouble.retry_after_seconds * random.uniform(1.0, 1.1))
        self._tries += 1
        if now + pause > self._since + self._seconds:
            raise trouble
        self._log(f"{trouble}; trying again in {pause:.1f} s")
        time.sleep(pause)


class Hub:
    """One repository on a Hub.

    The environment variable HF_ENDPOINT selects the Hub. The token comes from HF_TOKEN, or from the
    login that the Hub's own command line tool has stored.
    """

    def __init__(
        self, repo: str, *, timeout_seconds: float, log: Say, must_write: bool = True
    ) -> None:
        """Prepare the client. No request is sent.

        Args:
            repo: Name of the repository, ORGANISATION/NAME.
            timeout_seconds: Longest silence of the Hub within a request.
            log: Receives the client's own warnings.
            must_write: Whether a token is required. Public repositories can be read without one.

        Raises:
            OperationsError: huggingface_hub or the token is missing, or the name of the repository
                or the endpoint is invalid.
        """
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII):
            raise OperationsError(
                f"{repo!r} is not a repository name; give ORGANISATION/NAME, like "
                "bigscience/tr8-104B-logs"
            )
        # huggingface_hub is an optional dependency. It is imported here and not at the top, so that
        # the other tools run without it.
        try:
            import huggingface_hub
            from huggingface_hub.utils._http import default_client_factory
        except ImportError as error:
            raise OperationsError(
                f"huggingface_hub is not installed ({error}); run: pip install -e '.[hub]'"
            ) from error
        self.repo = repo
        self._endpoint = huggingface_hub.constants.ENDPOINT
        self.host = _host(self._endpoint)
        # `_translate_errors` reads `_client_error`, so this comes before its first use.
        self._bound = HubBound()
        self._client_error = _set_client_limits(
            default_client_factory, timeout_seconds, self._bound
        )
        _forward_warnings(log)
        # Progress bars would fill the log of a cron job with thousands of control characters.
        if not sys.stderr.isatty():
            huggingface_hub.utils.disable_progress_bars()
        with self._translate_errors():
            self._token = huggingface_hub.get_token()
        if self._token is None and must_write:
            raise OperationsError(
                "there is no token for the Hub; set HF_TOKEN to one with write access, or run: hf "
                "auth login"
            )
        # With None the client would look for a token by itself. With False it sends none.
        self.api = huggingface_hub.HfApi(endpoint=self._endpoint, token=self._token or False)

    @property
    def has_token(self) -> bool:
        """Whether requests are sent with a token."""
        return self._token is not None

    # Reading

    def list_branches(self) -> dict[str, str]:
        """Return the branches, name -> commit. This is one small request."""
        with self._translate_errors():
            return {
                branch.name: branch.target_commit
                for branch in self.api.list_repo_refs(self.repo).branches
            }

    def head(self) -> str:
        """Return the commit of the main branch."""
        branches = self.list_branches()
        if MAIN not in branches:
            raise OperationsError(
                f"{self.repo} on {self.host} has no branch {MAIN}; create it there"
            )
        return branches[MAIN]

    def list_files(self, commit: str, folder: str | None = None) -> dict[str, str]:
        """Return the files at a commit, path -> `get_oid`.

        Args:
            commit: Commit to list.
            folder: List only this folder, without its subfolders. None lists the repository.
        """
        with self._translate_errors():
            tree = self.api.list_repo_tree(
                self.repo, folder, recursive=folder is None, revision=commit
            )
            return _read_oids(tree)

    def fetch_oids(self, commit: str, paths: Sequence[str]) -> dict[str, str]:
        """Return those of `paths` that exist at a commit, path -> `get_oid`.

        The Hub takes at most 1,000 paths in one request.
        """
        with self._translate_errors():
            return _read_oids(self.api.get_paths_info(self.repo, list(paths), revision=commit))

    def download_file(self, commit: str, path: str) -> bytes:
        """Return the content of a small file."""
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers

        # `hf_hub_download` would keep every version of a growing log in the cache on the disk.
        with self._translate_errors():
            url = f"{self._endpoint}/{self.repo}/resolve/{commit}/{quote(path)}"
            answer = get_session().get(url, headers=build_hf_headers(token=self._token or False))
            hf_raise_for_status(answer)
            return answer.content

    # Writing

    def create(self, *, private: bool) -> None:
        """Create the repository. An existing one is left as it is."""
        with self._translate_errors():
            self.api.create_repo(self.repo, private=private, repo_type="model", exist_ok=True)

    def create_branch(self, branch: str) -> None:
        """Create a branch at the repository's first commit, which holds no logs yet."""
        with self._translate_errors():
            # The Hub lists the newest commit first.
            first = self.api.list_repo_commits(self.repo)[-1].commit_id
            self.api.create_branch(self.repo, branch=branch, revision=first, exist_ok=True)

    def upload(self, branch: str, additions: Sequence["CommitOperationAdd"]) -> frozenset[str]:
        """Send large contents to the Hub's storage, before any commit refers to them.

        Contents that the Hub has already are not sent again.

        Returns:
            The paths that the repository's .gitignore excludes. The client would leave them out of
            a commit without an error, so the caller does not commit them.
        """
        with self._translate_errors():
            # `free_memory` would empty the additions. The caller passes the same objects to a
            # commit later, so they are left as they are.
            self.api.preupload_lfs_files(self.repo, additions, revision=branch, free_memory=False)
        # The client has no public way to learn what it ignores.
        return frozenset(addition.path_in_repo for addition in additions if addition._should_ignore)

    def commit(
        self,
        branch: str,
        parent: str,
        operations: Sequence["CommitOperationAdd | CommitOperationDelete"],
        title: str,
        description: str = "",
    ) -> str:
        """Make one commit on top of `parent`. Either all operations are in it, or it is not made.

        The files to add were passed to `upload` before, and it did not report them as excluded.

        Args:
            branch: Branch to extend.
            parent: Commit that the branch must have now.
            operations: Files to add and to delete.
            title: First line of the commit's message.
            description: Rest of the commit's message.

        Returns:
            The commit that the branch has then. It is `parent` if the operations change nothing.

        Raises:
            HubMovedError: The branch is not at `parent`. Somebody else committed, or an earlier
                attempt succeeded and its answer was lost.
            HubUnavailableError: It is unknown whether the commit was made.
        """
        with self._translate_errors():
            # The Hub compares `parent_commit` with the branch and commits in one step. So two
            # syncs cannot overwrite each other, and a repeated attempt cannot commit twice.
            done = self.api.create_commit(
                self.repo,
                operations,
                commit_message=title,
                commit_description=description,
                revision=branch,
                parent_commit=parent,
            )
        return str(done.oid)

    # Errors

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn the client's exceptions into the two kinds of this module.

        An error of a local file stays an OSError.
        """
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        self._bound.start_call()
        try:
            yield
        except AnswerTooLongError as error:
            raise OperationsError(f"{self.repo} on {self.host} cannot be read: {error}") from error
        except (OSError, RuntimeError, ValueError, self._client_error) as error:
            cause = _find_root_cause(
                error, (HfHubHTTPError, self._client_error, OfflineModeIsEnabled, OSError)
            )
            # The order matters. HfHubHTTPError and OfflineModeIsEnabled are also OSErrors, and
            # would be taken for errors of a local file.
            if isinstance(cause, HfHubHTTPError):
                raise self._explain_refusal(cause) from error
            if isinstance(cause, OfflineModeIsEnabled):
                raise HubOfflineError(
                    "HF_HUB_OFFLINE is set, so no request is sent; unset it",
                    retry_after_seconds=math.inf,
                ) from error
            # A proxy or a login page answers with HTML, which is not JSON. The client raises a
            # RuntimeError when the upload of a file fails.
            if isinstance(cause, (self._client_error, RuntimeError, json.JSONDecodeError)):
                raise HubUnavailableError(
                    f"{self.host} does not answer: {self._clean(cause)}"
                ) from error
            if isinstance(cause, OSError):
                raise cause from error
            raise OperationsError(f"the Hub's client refuses: {self._clean(cause)}") from error

    def _explain_refusal(self, error: Any) -> OperationsError:
        """Return the error to raise for an HTTP status, with what the operator can do about it."""
        from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError

        status = error.response.status_code
        reason = str(status)
        if error.server_message:
            reason += f": {self._clean(error.server_message)}"
        # Without a token, the Hub gives the same answer for a private and for a missing repository.
        if status in (401, 403) and not self.has_token:
            return UnknownRepositoryError(
                f"there is no repository {self.repo} on {self.host} that can be read without a "
                f"token ({reason}); check the name, or set HF_TOKEN"
            )
        if status == 401:
            return OperationsError(
                f"{self.host} refuses the token ({reason}): it has expired or was revoked; create "
                "a new one with write access, and set HF_TOKEN or run: hf auth login"
            )
        if status == 403:
            return OperationsError(
                f"the token has no permission for this request to {self.repo} ({reason}); use one "
                "with write access to it"
            )
        # A missing path or commit is also a 404. It must not be taken for a missing repository:
        # somebody has changed the branch since it was listed.
        if status in (409, 412) or isinstance(
            error, (RemoteEntryNotFoundError, RevisionNotFoundError)
        ):
            return HubMovedError(f"{self.repo} has changed in the meantime ({reason})")
        if status == 404:
            return UnknownRepositoryError(
                f"there is no repository {self.repo} on {self.host} that this token can see; check "
                "the name"
            )
        if status in (408, 429) or status >= 500:
            return HubUnavailableError(
                f"{self.host} answers {reason}", _retry_after_seconds(error.response.headers)
            )
        return OperationsError(f"{self.host} refuses ({reason}); the request was for {self.repo}")

    def _clean(self, words: object) -> str:
        """Return a text of the client on one short line, without secrets."""
        text = _remove_signature(
            f"{type(words).__name__}: {words}" if isinstance(words, Exception) else str(words)
        )
        # The attribute does not exist yet when reading the token itself fails.
        token = getattr(self, "_token", None)
        return " ".join((text.replace(token, "(token)") if token else text).split())[:500]


def _read_oids(entries: Iterable[Any]) -> dict[str, str]:
    """Return the path and the id of each entry that is a file."""
    from huggingface_hub.hf_api import RepoFile

    return {entry.path: get_oid(entry) for entry in entries if isinstance(entry, RepoFile)}


def get_oid(file: Any) -> str:
    """Return the Hub's id of a file's content.

    It is `sha256:` and the digest for a file in large file storage, else `git:` and the blob's id.
    """
    if file.lfs is not None:
        return f"sha256:{file.lfs.sha256}"
    return f"git:{file.blob_id}"


def _host(endpoint: str) -> str:
    """Return the host of the Hub's address, for messages and for the sync state.

    Raises:
        OperationsError: The address is invalid, or holds a password.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OperationsError(
            "HF_ENDPOINT is not the address of a Hub; an address looks like https://huggingface.co"
        )
    if parts.username or parts.password:
        raise OperationsError(
            "HF_ENDPOINT contains a user name or a password, which logs would show; remove it, and "
            "give the token in HF_TOKEN"
        )
    return parts.netloc


def _set_client_limits(
    factory: Callable[[], Any], timeout_seconds: float, bound: HubBound
) -> type[Exception]:
    """Give every request of the client a time limit, and every answer a bound.

    Some of the client's calls set no limit, and would wait permanently for a silent Hub. So hooks
    set the limits on each request and each answer.

    Returns:
        The base class of the transport's errors.
    """
    from huggingface_hub import errors, set_client_factory

    def limit(request: Any) -> None:
        request.extensions["timeout"] = dict.fromkeys(
            ("connect", "read", "write", "pool"), timeout_seconds
        )
        request.headers["accept-encoding"] = "identity"

    def make_client() -> Any:
        made = factory()
        made.event_hooks = {
            "request": [*made.event_hooks["request"], limit],
            "response": [
                *made.event_hooks["response"],
                lambda response: bound.bound(response, library.SyncByteStream),
            ],
        }
        return made

    # The transport is httpx, and httpx2 since huggingface_hub 2. So its name is read from a class
    # that the client itself imports.
    library = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])
    set_client_factory(make_client)
    error: type[Exception] = library.TransportError
    return error


def _forward_warnings(log: Say) -> None:
    """Send the client's own warnings to `log`, without the signatures of storage URLs.

    The client retries some requests by itself, and logs a warning each time.
    """

    class _SayHandler(logging.Handler):
        """Handler that passes messages to `log`."""

        def emit(self, record: logging.LogRecord) -> None:
            log(f"huggingface_hub: {_remove_signature(record.getMessage())}")

    # The list is replaced, because the client's own handler would print the signed URLs.
    logging.getLogger("huggingface_hub").handlers = [_SayHandler()]


def _remove_signature(text: str) -> str:
    """Return `text` without the query part of URLs, which holds the credentials of a storage."""
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?...", text)


def _find_root_cause(error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException:
    """Return the first of `kinds` among an error and its causes, else the error itself.

    The client wraps the errors of its upload threads, so the error itself shows too little.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kinds):
            return cause
        cause = cause.__cause__
    return error


def _retry_after_seconds(headers: Any) -> float:
    """Return the pause that the Hub asks for, 0 if it asks for none.

    The Hub has two headers for it. `ratelimit` has the requests that remain, `r`, and the seconds
    until there are more, `t`. `retry-after` has seconds.
    """
    pause = 0.0
    limit = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""))
    if limit is not None:
        pause = float(limit[1])
    retry_after = headers.get("retry-after", "")
    if retry_after.isdigit():
        pause = max(pause, float(retry_after))
    return pause
