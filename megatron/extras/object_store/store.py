"""The object store of a run: uploads of its checkpoints, and downloads of what a rank loads.

A save writes the same files as on a disk. Each rank uploads its tensor file from a folder of the
host and removes it. Rank 0 uploads the small files, and then one conditional write of `latest.json`
makes the checkpoint visible. The objects of each attempt have keys of their own, so nothing that
anybody still uploads can change a checkpoint.
"""

import contextlib
import functools
import glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.base.errors import CheckpointError, DamagedError
from megatron.base.file_lock import LockResult, try_lock
from megatron.base.plain_text import is_url
from megatron.checkpoint.folder import UNFINISHED
from megatron.checkpoint.lease import Lease, is_alive, read_holder
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import CONFIG, INDEX, MANIFEST, Manifest
from megatron.checkpoint.store import Store
from megatron.config.checkpoint import CheckpointConfig
from megatron.extras.object_store.mirror import STAGING, Mirror
from megatron.extras.object_store.objects import ObjectFolder, raise_as_checkpoint_error
from megatron.extras.object_store.ranges import FetchedCheckpoint, verify_object
from megatron.extras.object_store.writer import KEY, RootObject, StoreLease, find_generation
from megatron.parallel.launcher import read_ranks_per_node
from megatron.parallel.ranks import Ranks
from megatron.parallel.shard import TensorShard


class LoadedStore(Store):
    """The store of a run that only loads from addresses. See `Store`."""

    def __init__(self, config: CheckpointConfig, ranks: Ranks) -> None:
        """Create the store without a request.

        Args:
            config: The flags of checkpoints, with --local-dir.
            ranks: The ranks of the run.

        Raises:
            ConfigError: The client is not installed.
        """
        assert config.local_dir is not None, "a rule checks it"
        self._config = config
        self._ranks = ranks
        self._staging = Path(config.save_staging or Path(config.local_dir) / STAGING)
        self._roots: dict[Path, RootObject] = {}
        """Local folder -> the object that it mirrors."""
        for address in (config.save, config.load, config.pretrained_checkpoint):
            if address is not None and is_url(address):
                # `choose_own_run` turns the last one into --load, so it has the folder of --load.
                folder = Path(str(replace(config, load=address).load_folder))
                self._roots[folder] = RootObject(ObjectFolder(address))
        self._named: dict[str, dict[str, str]] = {}
        """Local folder -> the folders and keys in `latest.json`, as rank 0 last read or wrote it.

        A host may have a local folder of an earlier start, so no rank but 0 looks for keys there.
        """
        self._keys = ""
        """What the keys of the present save begin with."""

    def open(self) -> None:
        """See `Store`."""

        def pull() -> None:
            with raise_as_checkpoint_error():
                self._prepare_writing()
                for folder, root in self._roots.items():
                    record = root.read()
                    if not root.exists and not self._config.allow_fresh_start:
                        _refuse_lost_root(root.objects)
                    Mirror(root.objects, folder).pull(record, self._ranks.log)

        names = ", ".join(root.objects.address for root in self._roots.values())
        # The other ranks get the small files in messages, as with a folder.
        self._ranks.call_on_rank_0(pull, f"reading {names}", self._ranks.log)
        self._share_names()

    def _share_names(self) -> None:
        """Tell all ranks which objects belong to each checkpoint."""
        self._named = self._ranks.call_on_rank_0(
            lambda: {str(at): dict(root.record.folders) for at, root in self._roots.items()},
            "sharing the names of the checkpoints",
        )

    def _prepare_writing(self) -> None:
        """Check that this run may write. Without --save at an address there is nothing to check."""

    def verify(self, folder: Path, name: str, size: int, xxh128: str) -> None:
        """See `Store`."""
        root = self._roots.get(folder.parent)
        if root is None:
            super().verify(folder, name, size, xxh128)
            return
        # `latest.json` does not name the folder of a save in progress yet.
        keys = self._keys
        if not folder.name.endswith(UNFINISHED):
            keys = self._named[str(folder.parent)].get(folder.name, keys)
        verify_object(root.objects.enter(keys), name, size, xxh128)

    @contextlib.contextmanager
    def fetch(self, checkpoint: Checkpoint, shards: Sequence[TensorShard]) -> Iterator[Checkpoint]:
        """See `Store`. The ranges are in the staging folder while the block runs."""
        root = self._roots.get(checkpoint.folder.parent)
        if root is None:
            yield checkpoint
            return
        name = checkpoint.folder.name
        keys = self._named[str(checkpoint.folder.parent)].get(name)
        if keys is None:
            raise DamagedError(f"{root.objects.name(KEY)} does not name {name}", MANIFEST)
        with raise_as_checkpoint_error():
            folder = self._empty_staging() / name
            folder.mkdir()
        try:
            yield FetchedCheckpoint.of(checkpoint, root.objects.enter(keys), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @functools.cached_property
    def _claimed(self) -> Path:
        """The folder of this process in --save-staging, which several runs may share.

        It is locked until the process ends. Folders whose process has ended are removed.

        Raises:
            OSError: It cannot be made.
        """
        # Locks of a network file system may not reach other hosts, so their folders are left alone.
        host = os.uname().nodename
        self._staging.mkdir(parents=True, exist_ok=True)
        for path in self._staging.glob(f"{glob.escape(host)}-rank_*"):
            with contextlib.suppress(OSError), _open_folder(path) as left:
                if try_lock(left, path) is LockResult.HELD:
                    shutil.rmtree(path, ignore_errors=True)
        while True:
            path = self._staging / f"{host}-rank_{self._ranks.rank:05d}-{uuid.uuid4().hex[:8]}"
            path.mkdir()
            try:
                self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                # Another process has removed it.
                continue
            try:
                if try_lock(self._lock, path) is LockResult.HELD:
                    return path
            except OSError:
                # Without locks, no process can lock the folder and remove it.
                return path
            # Another process was about to remove it.
            os.close(self._lock)

    def _empty_staging(self) -> Path:
        """Return this process's staging folder without what an earlier save or load left."""
        if not self._claimed.is_dir():
            # A cleaner of temporary files has removed it, and with it the lock.
            del self.__dict__["_claimed"]
        for path in self._claimed.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return self._claimed


class ObjectStore(LoadedStore):
    """The store of a run whose --save is an address. See `Store`."""

    def __init__(self, config: CheckpointConfig, ranks: Ranks) -> None:
        """Create the store without a request. See `LoadedStore`."""
        super().__init__(config, ranks)
        self._folder = Path(str(config.save_folder))
        self._root = self._roots[self._folder]
        self._objects = self._root.objects
        self._mirror = Mirror(self._objects, self._folder)
        self._lease: StoreLease | None = None
        self._token = ""
        """Generation and a random number, which the keys of this writer's objects contain."""
        self._attempt = 0
        """Number of saves that were started."""

    def _prepare_writing(self) -> None:
        """Check that the store has conditional writes, and that no run uses the local folder."""
        holder = read_holder(self._folder)
        if holder is not None and is_alive(holder):
            raise CheckpointError(
                f"--local-dir {self._folder} is being written to by {holder.describe()}; end that "
                "run, or give another --local-dir"
            )
        self._objects.check_conditional_writes()

    def acquire(self, root: Path, log: Callable[[str], None]) -> Lease:
        """Become the writer of the address and of the local folder, on rank 0."""
        # If somebody deleted the lease or `latest.json`, generations must still rise.
        known = self._root.read().generation
        if not self._root.exists:
            found = map(find_generation, self._objects.list("global_step"))
            known = max((generation for generation in found if generation is not None), default=0)
        self._lease = StoreLease.acquire_both(root, self._objects, known, log)
        try:
            generation = self._lease.generation
            # From here on, an earlier writer cannot publish.
            before = self._root.seize(generation)
            self._mirror.pull(before, log)
            self._mirror.pull_records(before.generation, generation, log)
            self._remove_orphans()
        except BaseException:
            self._lease.release()
            raise
        # The records get more lines after the last save.
        self._lease.at_release = self._mirror.push_records
        self._token = f"{generation}-{uuid.uuid4().hex[:8]}"
        return self._lease

    def meet(self) -> None:
        """See `Store`."""
        self._token = self._ranks.call_on_rank_0(lambda: self._token, "sharing the lease")
        self._share_names()

    def choose_staging(self, root: Path) -> Path:
        """See `Store`."""
        self._staging.mkdir(parents=True, exist_ok=True)
        return self._staging

    def count_staged(self, size: int) -> int:
        """See `Store`. A host needs room for the files of its own ranks."""
        ranks = self._ranks.size
        return size * read_ranks_per_node(ranks, unknown=ranks) // ranks

    def stage(self, folder: Path) -> Path:
        """See `Store`. Each attempt has keys of its own."""
        # All ranks count alike, so that no message is needed.
        self._attempt += 1
        # A retry of the same iteration must not meet what the failed attempt left.
        self._keys = f"{folder.name.removesuffix(UNFINISHED)}-{self._token}-{self._attempt}"
        return self._empty_staging()

    def discard_staged(self) -> None:
        """See `Store`."""
        with contextlib.suppress(OSError):
            self._empty_staging()

    def upload(self, staged: Path, name: str, xxh128: str) -> None:
        """See `Store`. The file is removed, also after an error."""
        try:
            self._objects.upload(staged / name, f"{self._keys}/{name}", xxh128)
        finally:
            (staged / name).unlink(missing_ok=True)

    def complete(self, folder: Path, manifest: Manifest) -> None:
        """See `Store`."""
        for name in (INDEX, CONFIG):
            xxh128 = manifest.files[name]["xxh128"]
            self._objects.upload(folder / name, f"{self._keys}/{name}", xxh128)
        self._objects.write(f"{self._keys}/{MANIFEST}", manifest.dump_json().encode())
        # After a rollback, this process looks for a checkpoint and compares the sizes.
        for name in manifest.files.keys() - {INDEX, CONFIG}:
            self._mirror.make_placeholder(folder / name, manifest.files[name]["bytes"])
        self._mirror.mark(folder, self._keys)

    def publish(self) -> None:
        """See `Store`. This is the one write that makes a checkpoint visible."""
        self._root.publish(self._mirror.collect(self._root.record))

    def has_published(self, iteration: int) -> bool:
        """See `Store`."""
        return self._root.record.latest == f"global_step{iteration}"

    def publish_rollback(self) -> None:
        """See `Store`. A store that fails does not end the run: the next save tries again."""

        def publish() -> None:
            try:
                record = self._mirror.collect(self._root.record)
                # The decision alone changes no pointer.
                if record != self._root.record:
                    self._root.publish(record)
                # Last, because these records say that the rollback is completed.
                self._mirror.push_records()
            except OSError as error:
                self._ranks.log(f"warning: the rollback is not visible yet: {error}")

        self._ranks.call_on_rank_0(publish, "publishing a rollback", self._ranks.log)
        self._share_names()

    def clean_up(self, removed: Sequence[int]) -> list[str]:
        """See `Store`. It also uploads the records of the run."""
        names = {f"global_step{iteration}" for iteration in removed}
        record = self._root.record
        folders = {name: keys for name, keys in record.folders.items() if name not in names}
        try:
            # Before the deletion, so that no reader finds a checkpoint without its objects.
            if len(folders) < len(record.folders):
                self._root.publish(replace(record, folders=folders))
            self._remove_orphans()
            self._mirror.push_records()
        except OSError as error:
            return [f"warning: {error}; the next save tries again"]
        return []

    def _remove_orphans(self) -> None:
        """Delete the objects and abort the uploads that no checkpoint has.

        Raises:
            OSError: One cannot be removed.
        """
        assert self._lease is not None
        named = set(self._root.record.folders.values())
        own = self._lease.generation

        def is_orphan(key: str) -> bool:
            generation = find_generation(key)
            # A later writer may be active. Its objects are not ours to remove.
            return generation in range(own + 1) and key.partition("/")[0] not in named

        self._objects.delete(filter(is_orphan, self._objects.list("global_step")))
        self._objects.abort_uploads(is_orphan)


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    """Open a folder for a lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_lost_root(objects: ObjectFolder) -> None:
    """Raise CheckpointError if there are objects of checkpoints, and nothing names them."""
    found = sorted(objects.list("global_step"))
    if found:
        raise CheckpointError(
            f"{objects.name(KEY)} does not exist, and there are {found[-1]} and other objects of "
            "checkpoints. Restore the object from a version, or give --allow-fresh-start, with "
            "which a run with this --save deletes them"
        )
