"""I/O errors at one chosen call, as from a disk that fails once during a save."""

import builtins
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "fsync")
"""Functions of `os` that change a file system or wait for it.

`open` for writing is watched as well.
"""


class FailingCalls:
    """Makes calls of this process that change a folder fail with EIO, and lists all such calls.

    Args:
        root: The folder. Calls outside of it are not changed.
        fails: Return whether a call fails. It is called with the number of the call, from 1, and
            its description, such as "rename latest.new".
        late: The call takes effect before the error, as on a network file system that loses the
            answer.
    """

    def __init__(
        self, root: Path, fails: Callable[[int, str], bool], *, late: bool = False
    ) -> None:
        self._root = os.path.realpath(root)
        self._fails = fails
        self._late = late
        self.calls: list[str] = []

    def _path(self, target: Any, dir_fd: int | None) -> str:
        """Return the absolute path of a call's target."""
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        folder = ""
        if dir_fd is not None:
            folder = os.readlink(f"/proc/self/fd/{dir_fd}")
        return os.path.abspath(os.path.join(folder, target))

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that replaces `original` while the errors are installed."""

        def call(target: Any, *arguments: Any, **keywords: Any) -> Any:
            mode = arguments[0] if arguments else keywords.get("mode", "r")
            if name == "open" and not set("wax+").intersection(mode):
                return original(target, *arguments, **keywords)
            path = self._path(target, keywords.get("dir_fd"))
            if not path.startswith(self._root):
                return original(target, *arguments, **keywords)
            self.calls.append(f"{name} {os.path.relpath(path, self._root)}")
            if not self._fails(len(self.calls), self.calls[-1]):
                return original(target, *arguments, **keywords)
            if self._late:
                result = original(target, *arguments, **keywords)
                if name == "open":
                    result.close()
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        return call

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which all calls of this process are watched."""
        functions = [(os, name) for name in CALLS] + [(builtins, "open")]
        originals = [getattr(module, name) for module, name in functions]
        for (module, name), original in zip(functions, originals, strict=True):
            setattr(module, name, self._wrap(name, original))
        try:
            yield
        finally:
            for (module, name), original in zip(functions, originals, strict=True):
                setattr(module, name, original)
