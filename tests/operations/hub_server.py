"""A local server with the part of the Hub's HTTP API that the official client needs here.

The client creates, compares, uploads, commits, lists, reads and downloads. The server keeps every
commit's tree and counts the requests. It refuses what the real Hub refuses: a parent that is not
the head, an unknown oid, a bad token. A test can make requests fail, see `Fault`.
"""

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_tEsTtOkEnOfThisHubOnly"


@dataclass(frozen=True)
class Stored:
    """A file of a commit."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git(self) -> str:
        content = self.content
        if self.lfs:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\n"
            content = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Commit:
    id: str
    title: str
    tree: dict[str, Stored]
    parent: "Commit | None"


@dataclass
class Repository:
    branches: dict[str, Commit]
    private: bool = True
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large contents by sha256, whether or not a commit refers to them."""


@dataclass
class Fault:
    """How requests of one kind fail.

    The server answers with a status, does not answer, or loses the answer after the work was done.
    """

    kind: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    lose_answer: bool = False
    silence: threading.Event | None = None
    """The request is held until this is set."""


class HubServer:
    """Hub that listens on a port of 127.0.0.1 while its context is open."""

    def __init__(self, page: int = 1000) -> None:
        self.token = TOKEN
        self.readonly = False
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """Kind of each request so far."""
        self.uploaded: list[str] = []
        """sha256 of each large content that was sent."""
        self.reached = threading.Event()
        """Set when a request is held by a `silence`."""
        self.answered = 0
        """Number of requests that are complete, even if the client no longer waited."""
        self.page = page
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        for fault in self.faults:
            if fault.silence is not None:
                fault.silence.set()
        self._server.shutdown()
        self._server.server_close()

    def create(self, repo: str, *, private: bool = True) -> Repository:
        tree = {".gitattributes": Stored(b"*.bin filter=lfs diff=lfs merge=lfs -text\n", False)}
        self.repositories[repo] = Repository(
            {"main": _commit("initial commit", tree, None)}, private
        )
        return self.repositories[repo]

    def fail(self, kind: str, **fault: Any) -> Fault:
        self.faults.append(Fault(kind, **fault))
        return self.faults[-1]

    def add(self, repo: str, files: dict[str, bytes]) -> None:
        """Commit files to a repository, as somebody else."""
        branches = self.repositories[repo].branches
        tree = branches["main"].tree | {
            path: Stored(content, False) for path, content in files.items()
        }
        branches["main"] = _commit("add files", tree, branches["main"])

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """Return the files of a branch, without the file of the repository's first commit."""
        tree = self.repositories[repo].branches[branch].tree
        return {path: stored.content for path, stored in tree.items() if path != ".gitattributes"}

    def history(self, repo: str, branch: str = "main") -> list[Commit]:
        """Return the commits of a branch, the newest first."""
        found = [self.repositories[repo].branches[branch]]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found

    def count(self, kind: str) -> int:
        return self.requests.count(kind)

    def take_fault(self, kind: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.kind == kind and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


def _commit(title: str, tree: dict[str, Stored], parent: Commit | None) -> Commit:
    listing = json.dumps(
        [
            title,
            parent.id if parent else "",
            sorted((path, stored.git) for path, stored in tree.items()),
        ]
    )
    return Commit(hashlib.sha1(listing.encode()).hexdigest(), title, tree, parent)


class _RefusedError(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_HEAD = do_GET

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunks()
        fitting = [
            (kind, act, match)
            for kind, method, pattern, act in _ROUTES
            if self.command == method and (match := re.fullmatch(pattern, parts.path))
        ]
        if not fitting:
            return self._send(404, {"error": f"this Hub has no {self.command} {parts.path}"})
        kind, act, match = fitting[0]
        self.hub.requests.append(kind)
        fault = self.hub.take_fault(kind)
        if fault is not None and fault.silence is not None:
            self.hub.reached.set()
            fault.silence.wait(60)
        if fault is not None and fault.status is not None:
            return self._send(
                fault.status, {"error": "the test makes this request fail"}, fault.headers
            )
        try:
            if kind != "upload":
                self._check_token()
            with self.hub.lock:
                answer = act(
                    self, *(unquote(group) for group in match.groups()), parse_qs(parts.query), body
                )
        except _RefusedError as refused:
            headers = {"X-Error-Message": str(refused)}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            return self._send(refused.status, {"error": str(refused)}, headers)
        if fault is not None and fault.lose_answer:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        if isinstance(answer, tuple):
            return self._send(200, *answer)
        return self._send(200, answer)

    def _chunks(self) -> bytes:
        data = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return data

    def _send(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with self.hub.lock:
            self.hub.answered += 1
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(content)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        try:
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        # The client was killed, or its time limit is over.
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _check_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise _RefusedError(401, "Invalid credentials in Authorization header")

    def _repository(self, repo: str) -> Repository:
        if repo not in self.hub.repositories:
            raise _RefusedError(404, "Repository not found", "RepoNotFound")
        return self.hub.repositories[repo]

    def _revision(self, repo: str, revision: str) -> Commit:
        repository = self._repository(repo)
        if revision in repository.branches:
            return repository.branches[revision]
        for branch in repository.branches:
            for commit in self.hub.history(repo, branch):
                if commit.id == revision:
                    return commit
        raise _RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    # Requests

    def create(self, query: dict, body: bytes) -> Any:
        request = json.loads(body)
        repo = f"{request['organization']}/{request['name']}"
        if repo in self.hub.repositories:
            raise _RefusedError(409, "You already created this model repo")
        self.hub.create(repo, private=request.get("visibility") == "private")
        return {"url": f"{self.hub.url}/{repo}"}

    def validate_card(self, query: dict, body: bytes) -> Any:
        """Answer for the metadata of a README.md, which the client sends before a commit."""
        content = json.loads(body)["content"]
        if not content.startswith("---\n") or "\n---\n" not in content[4:]:
            return {"warnings": [{"message": "empty or missing yaml metadata"}], "errors": []}
        return {"warnings": [], "errors": []}

    def refs(self, repo: str, query: dict, body: bytes) -> Any:
        branches = self._repository(repo).branches
        listed = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit.id}
            for name, commit in branches.items()
        ]
        return {"branches": listed, "converts": [], "tags": []}

    def commits(self, repo: str, revision: str, query: dict, body: bytes) -> Any:
        self._revision(repo, revision)
        dated = {
            "date": "2024-01-01T00:00:00.000Z",
            "authors": [{"user": "someone"}],
            "message": "",
        }
        return [
            {"id": commit.id, "title": commit.title, **dated}
            for commit in self.hub.history(repo, revision)
        ]

    def branch(self, repo: str, name: str, query: dict, body: bytes) -> Any:
        repository = self._repository(repo)
        if name in repository.branches:
            raise _RefusedError(409, "Reference already exists")
        repository.branches[name] = self._revision(
            repo, json.loads(body).get("startingPoint", "main")
        )
        return {}

    def tree(self, repo: str, revision: str, folder: str, query: dict, body: bytes) -> Any:
        commit = self._revision(repo, revision)
        below = f"{folder.strip('/')}/" if folder.strip("/") else ""
        recursive = query["recursive"] == ["true"] or query["recursive"] == ["True"]
        entries: dict[str, dict] = {}
        for path, stored in commit.tree.items():
            if path.startswith(below):
                names = path[len(below) :].split("/")
                for depth in range(1, len(names) if recursive else min(2, len(names))):
                    name = below + "/".join(names[:depth])
                    entries[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
                if recursive or len(names) == 1:
                    entries[path] = _entry(path, stored)
        if below and not entries:
            raise _RefusedError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        listed = [entries[path] for path in sorted(entries)]
        begin = int(query.get("cursor", ["0"])[0])
        page = listed[begin : begin + self.hub.page]
        if begin + self.hub.page >= len(listed):
            return page
        listing = f"{self.hub.url}{urlsplit(self.path).path}?recursive={query['recursive'][0]}"
        address = f"{listing}&cursor={begin + self.hub.page}"
        return page, {"Link": f'<{address}>; rel="next"'}

    def paths_info(self, repo: str, revision: str, query: dict, body: bytes) -> Any:
        tree = self._revision(repo, revision).tree
        return [
            _entry(path, tree[path]) for path in parse_qs(body.decode())["paths"] if path in tree
        ]

    def preupload(self, repo: str, revision: str, query: dict, body: bytes) -> Any:
        tree = self._revision(repo, revision).tree
        ignore: list[str] = []
        if ".gitignore" in tree:
            ignore = tree[".gitignore"].content.decode().split()
        answer = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            large = (
                "tfevents" in path
                or path.endswith((".bin", ".safetensors"))
                or file["size"] > 10 << 20
            )
            entry = {
                "path": path,
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": path in ignore,
            }
            if path in tree:
                entry["oid"] = tree[path].sha256 if tree[path].lfs else tree[path].git
            answer.append(entry)
        return {"files": answer}

    def lfs_batch(self, repo: str, query: dict, body: bytes) -> Any:
        self._may_write()
        known = self._repository(repo).objects
        objects = []
        for wanted in json.loads(body)["objects"]:
            oid = wanted["oid"]
            upload = {
                "href": f"{self.hub.url}/storage/{repo}/{oid}?X-Amz-Signature=sEcReTsIgNaTuRe"
            }
            verify = {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"}
            actions = {}
            if oid not in known:
                actions = {"actions": {"upload": upload, "verify": verify}}
            objects.append({**wanted, **actions})
        return {"transfer": "basic", "objects": objects}

    def upload(self, repo: str, oid: str, query: dict, body: bytes) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _RefusedError(400, "the content has another digest")
        self._repository(repo).objects[oid] = body
        self.hub.uploaded.append(oid)
        return {}

    def verify(self, repo: str, query: dict, body: bytes) -> Any:
        request = json.loads(body)
        if len(self._repository(repo).objects.get(request["oid"], b"")) != request["size"]:
            raise _RefusedError(404, "not uploaded")
        return {}

    def commit(self, repo: str, branch: str, query: dict, body: bytes) -> Any:
        self._may_write()
        repository = self._repository(repo)
        head = self._revision(repo, branch)
        header, *operations = (json.loads(line) for line in body.splitlines())
        if header["value"].get("parentCommit", head.id) != head.id:
            raise _RefusedError(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(head.tree)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                tree[value["path"]] = Stored(base64.b64decode(value["content"]), False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in repository.objects:
                    raise _RefusedError(400, f"{value['oid']} was never uploaded")
                tree[value["path"]] = Stored(repository.objects[value["oid"]], True)
            elif tree.pop(value["path"], None) is None:
                raise _RefusedError(404, "A file with this name doesn't exist", "EntryNotFound")
        repository.branches[branch] = _commit(header["value"]["summary"], tree, head)
        oid = repository.branches[branch].id
        return {"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid}

    def resolve(self, repo: str, revision: str, path: str, query: dict, body: bytes) -> Any:
        tree = self._revision(repo, revision).tree
        if path not in tree:
            raise _RefusedError(404, "Entry not found", "EntryNotFound")
        commit = self._revision(repo, revision).id
        return tree[path].content, {"ETag": f'"{tree[path].git}"', "X-Repo-Commit": commit}

    def info(self, repo: str, revision: str, query: dict, body: bytes) -> Any:
        commit = self._revision(repo, revision)
        listed = [{"rfilename": path} for path in sorted(commit.tree)]
        return {"id": repo, "modelId": repo, "sha": commit.id, "siblings": listed, "tags": []}

    def _may_write(self) -> None:
        if self.hub.readonly:
            raise _RefusedError(403, "you need write access")


def _entry(path: str, stored: Stored) -> dict[str, Any]:
    size = len(stored.content)
    entry: dict[str, Any] = {"type": "file", "path": path, "oid": stored.git, "size": size}
    if stored.lfs:
        entry["lfs"] = {"oid": stored.sha256, "size": size, "pointerSize": 134}
    return entry


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, str, str, Callable]] = [
    ("create", "POST", r"/api/repos/create", _Handler.create),
    ("card", "POST", r"/api/validate-yaml", _Handler.validate_card),
    ("refs", "GET", rf"/api/models/{_REPO}/refs", _Handler.refs),
    ("commits", "GET", rf"/api/models/{_REPO}/commits/([^/]+)", _Handler.commits),
    ("branch", "POST", rf"/api/models/{_REPO}/branch/([^/]+)", _Handler.branch),
    ("tree", "GET", rf"/api/models/{_REPO}/tree/([^/]+)(/[^/]+|)", _Handler.tree),
    ("paths", "POST", rf"/api/models/{_REPO}/paths-info/([^/]+)", _Handler.paths_info),
    ("preupload", "POST", rf"/api/models/{_REPO}/preupload/([^/]+)", _Handler.preupload),
    ("batch", "POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("verify", "POST", rf"/{_REPO}\.git/info/lfs/objects/verify", _Handler.verify),
    ("upload", "PUT", rf"/storage/{_REPO}/([0-9a-f]+)", _Handler.upload),
    ("commit", "POST", rf"/api/models/{_REPO}/commit/([^/]+)", _Handler.commit),
    ("resolve", "GET", rf"/{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
    ("metadata", "HEAD", rf"/{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
    ("info", "GET", rf"/api/models/{_REPO}/revision/([^/]+)", _Handler.info),
]


def wait_for(event: Callable[[], bool], seconds: float = 30.0) -> None:
    """Poll until the event happens. Fail the test if it takes longer."""
    deadline = time.monotonic() + seconds
    while not event():
        assert time.monotonic() < deadline, f"the event did not happen within {seconds} s"
        time.sleep(0.02)
