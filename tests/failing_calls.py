"""I/O errors at an exact call: what a disk does that fails at one moment of a save, and not before
or after."""

import builtins
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "fsync")
"""Functions of `os` that change a file system or wait for it; `open` for writing is watched,
too."""


class FailingCalls:
    """Fails calls that change what is under a folder with EIO, in this process, and lists all such
    calls.

    Args:
        root: Calls outside of it are not touched.
        fails: Called with the number of a call, from 1, and its description such as "rename
            latest.new".
        late: The call takes effect before the error: as on a network file system that loses the
            answer.
    """

    def __init__(
        self, root: Path, fails: Callable[[int, str], bool], *, late: bool = False
    ) -> None:
        self._root, self._fails, self._late = os.path.realpath(root), fails, late
        self.calls: list[str] = []

    def _path(self, target: Any, dir_fd: int | None) -> str:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        folder = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
        return os.path.abspath(os.path.join(folder, target))

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **keywords: Any) -> Any:
            mode = arguments[0] if arguments else keywords.get("mode", "r")
            reads = name == "open" and not set("wax+").intersection(mode)
            path = "" if reads else self._path(target, keywords.get("dir_fd"))
            if reads or not path.startswith(self._root):
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
        """Watch all calls of this process meanwhile."""
        places = [(os, name) for name in CALLS] + [(builtins, "open")]
        originals = [getattr(module, name) for module, name in places]
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, self._wrap(name, original))
        try:
            yield
        finally:
            for (module, name), original in zip(places, originals, strict=True):
                setattr(module, name, original)
