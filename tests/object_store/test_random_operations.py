"""Random operations with faults: saves, kills, rollbacks and damage, on three hosts.

After each operation, no visible checkpoint differs from its digests. Then a start on two of the
hosts loads what `latest.json` names.
"""

import random
from pathlib import Path

import pytest
from object_store.faulty_proxy import THROTTLING, FaultyProxy
from object_store.jobs import Stored
from object_store.one_process import PlayedRun
from object_store.test_faults import check_visible
from object_store.test_local_copies import NO_RECORDS, flip

from megatron.checkpoint import lease
from megatron.extras.object_store import objects
from megatron.extras.object_store.objects import ObjectFolder
from megatron.extras.operations.commands import rollback

FAULTS = [*THROTTLING, "InternalError", "lose", "cut"]
METHODS = [("PUT", ""), ("GET", ""), ("POST", ""), ("DELETE", ""), ("PUT", "latest.json")]


class RandomOperations:
    """The operations, and what they expect of the store."""

    def __init__(self, seed: int, address: str, folder: Path, proxy: FaultyProxy) -> None:
        self._random = random.Random(seed)
        self._address = address
        self._hosts = [folder / name for name in "abc"]
        self._proxy = proxy
        self._stored = Stored(address)
        self._run: PlayedRun | None = None
        self._last = 0
        self.done: list[str] = []
        self.met: set[str] = set()
        """The faults that have happened."""

    def play(self, number: int) -> None:
        """Do some operations, each followed by a resume, and check the store after each step."""
        acts = [self.save, self.save, self.kill, self.end, self.roll_back, self.damage, self.copy]
        for _ in range(number):
            act = self._random.choice(acts)
            for step in (act, self.resume):
                self.done.append(step.__name__)
                self.add_faults()
                step()
                self.met |= {fault.action for fault in self._proxy.faults if fault.met.is_set()}
                self._proxy.faults.clear()
                self.check()

    def add_faults(self) -> None:
        for _ in range(self._random.randrange(4)):
            method, part = self._random.choice(METHODS)
            skip, times = self._random.randrange(6), self._random.choice((1, 1, 2))
            self._proxy.add(self._random.choice(FAULTS), method, part, skip=skip, times=times)

    def check(self) -> None:
        """Check what is visible."""
        if self._last:
            assert check_visible(self._stored, 0) == self._last, self.done

    def start(self) -> PlayedRun:
        """Start on any host if no run is active, and check that it resumes at the newest one."""
        if self._run is None:
            first, second = self._random.sample(self._hosts, 2)
            self._run = PlayedRun(self._address, first, second)
            assert self._run.iteration == self._last, (self.done, self._run.log)
            assert not any("damaged" in line for line in self._run.log), self._run.log
        return self._run

    def resume(self) -> None:
        if self._run is not None:
            self._random.choice((self.kill, self.end))()
        self.start()

    def save(self) -> None:
        run = self.start()
        iteration = self._last + self._random.choice((1, 2))
        # All these faults are shorter than the patience, so no save fails.
        assert run.save(iteration), (self.done, run.log)
        self._last = iteration

    def kill(self) -> None:
        self.start().kill()
        self._run = None

    def end(self) -> None:
        self.start().end()
        self._run = None

    def roll_back(self) -> None:
        """Go back to the older one of two checkpoints."""
        self.end()
        names = self._stored.root["folders"] if self._last else {}
        older = [int(name.removeprefix("global_step")) for name in names if "/" not in name]
        if len(older) > 1:
            self._last = min(older)
            assert rollback.main([self._address, "--to", str(self._last), *NO_RECORDS]) == 0

    def damage(self) -> None:
        """Flip a bit of any file in the local folder of any host."""
        self.end()
        host = self._random.choice(self._hosts)
        files = [path for path in sorted(host.rglob("*")) if path.is_file() and path.stat().st_size]
        # The lease and the files without content are no copies.
        files = [path for path in files if path.name != "lease.json" and path.stat().st_blocks]
        if files:
            path = self._random.choice(files)
            flip(path, self._random.randrange(path.stat().st_size))

    def copy(self) -> None:
        """Copy the local folder of a host to the records."""
        folder = ObjectFolder(self._address)
        host = self._random.choice(self._hosts)
        for name in ("latest", "course.json", "latest_checkpointed_iteration.txt"):
            if (host / name).is_file():
                folder.write(f"local/{name}", (host / name).read_bytes())


@pytest.mark.parametrize(
    ("number", "seed"), [(4, 1), *(pytest.param(200, s, marks=pytest.mark.full) for s in (2, 3, 4))]
)
@pytest.mark.usefixtures("one_client")
def test_random_operations_with_faults(
    number: int,
    seed: int,
    address: str,
    tmp_path: Path,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "PART", 64 << 10)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    # A killed run of this process must look as one of another host, whose process is unknown.
    boots = iter(range(1 << 30))
    monkeypatch.setattr(lease, "read_process_space", lambda: f"boot-{next(boots)}")
    played = RandomOperations(seed, address, tmp_path, proxy)
    played.play(number)
    played.end()
    played.check()
    assert number < 200 or played.met == {*FAULTS}
