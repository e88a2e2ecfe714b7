"""The object store of a run: uploads of its checkpoints, and downloads of what a rank loads.

A save writes the same files as on a disk. Each rank uploads its tensor file from a folder of the
host and removes it. Rank 0 uploads the small files, and then one conditional write of `latest.json`
makes the checkpoint visible. The objects of each attempt have keys of their own, so nothing that
anybody still uploads can change a checkpoint.
"""

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.base.errors import CheckpointError, DamagedError
from megatron.base.plain_text import format_bytes, format_count
from megatron.checkpoint.folder import UNFINISHED
from megatron.checkpoint.lease import Lease, is_alive, read_holder
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import CONFIG, INDEX, MANIFEST, Manifest
from megatron.checkpoint.store import SMALL_FILES, Store, free_bytes
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.url import is_url
from megatron.extras.object_store.mirror import STAGING, Mirror
from megatron.extras.object_store.objects import ObjectFolder
from megatron.extras.object_store.ranges import (
    fetch_blocks,
    fetch_index,
    find_blocks,
    list_slices,
    verify_object,
)
from megatron.extras.object_store.root_object import KEY, RootObject, find_generation
from megatron.extras.object_store.store_lease import StoreLease
from megatron.parallel.launcher import read_ranks_per_node
from megatron.parallel.ranks import Ranks
from megatron.parallel.shard import TensorShard


class ObjectStore(Store):
    """The store of a run whose --save or --load is an address. See `Store`."""

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
        staging = Path(config.save_staging or Path(config.local_dir) / STAGING)
        self._staging = staging / f"rank_{ranks.rank:05d}"
        self._mirrors: dict[Path, tuple[Mirror, RootObject]] = {}
        """Local folder -> what it mirrors."""
        for folder, address in self._list_addresses():
            objects = ObjectFolder(address)
            self._mirrors[folder] = (Mirror(objects, folder), RootObject(objects))
        self._lease: StoreLease | None = None
        self._token = ""
        """Generation and a random number, which the keys of this writer's objects contain."""
        self._attempt = 0
        """Number of saves that were started."""
        self._keys = ""
        """What the keys of the present save begin with."""

    def _list_addresses(self) -> Iterator[tuple[Path, str]]:
        config = self._config
        if config.save is not None and is_url(config.save):
            yield Path(str(config.save_folder)), config.save
        for load in (config.load, config.pretrained_checkpoint):
            if load is not None and is_url(load):
                yield Path(str(replace(config, load=load).load_folder)), load

    @property
    def _own(self) -> tuple[Mirror, RootObject] | None:
        """The mirror of --save. None if that is a folder."""
        return self._mirrors.get(Path(str(self._config.save_folder)))

    def open(self) -> None:
        """See `Store`. It also checks that the store of --save has conditional writes."""
        log = self._ranks.log

        def pull() -> None:
            with _as_checkpoint_error():
                for folder, (mirror, root) in self._mirrors.items():
                    if self._config.save is not None and folder == Path(
                        str(self._config.save_folder)
                    ):
                        _refuse_running_holder(folder)
                        mirror.objects.check_conditional_writes()
                    record = root.read()
                    self._refuse_lost_root(mirror, root)
                    mirror.pull(record, log)

        names = ", ".join(mirror.objects.address for mirror, _ in self._mirrors.values())
        self._ranks.call_on_rank_0(pull, f"reading {names}", log)

    def _refuse_lost_root(self, mirror: Mirror, root: RootObject) -> None:
        """Raise CheckpointError if there are objects of checkpoints, and nothing names them."""
        if root.exists or self._config.allow_fresh_start:
            return
        found = sorted({key.partition("/")[0] for key in mirror.objects.list("global_step")})
        if found:
            raise CheckpointError(
                f"{mirror.objects.name(KEY)} does not exist, and there are {found[-1]} and "
                f"{format_count(len(found) - 1, 'other checkpoint')}. Restore the object from a "
                "version, or give --allow-fresh-start, which removes them"
            )

    def acquire(self, root: Path, log: Callable[[str], None]) -> Lease:
        """Become the writer of the address and of the local folder, on rank 0."""
        if self._own is None:
            return super().acquire(root, log)
        mirror, root_object = self._own
        self._lease = StoreLease.acquire_both(
            root, mirror.objects, root_object.read().generation, log
        )
        try:
            generation = self._lease.generation
            # From here on, an earlier writer cannot publish.
            before = root_object.seize(generation)
            mirror.pull(before, log)
            mirror.pull_records(before.generation, log)
            mirror.record_writer(generation)
            self._remove_orphans(keep="")
        except BaseException:
            self._lease.release()
            raise
        # The last lines come after the last save.
        self._lease.at_release = mirror.push_records
        self._token = f"{generation}-{uuid.uuid4().hex[:8]}"
        return self._lease

    def meet(self) -> None:
        """See `Store`."""
        self._token = self._ranks.call_on_rank_0(lambda: self._token, "sharing the lease")

    def describe_room(self, root: Path, size: int) -> str:
        """See `Store`. The address has no limit, and the staging folder one checkpoint."""
        if self._own is None:
            return super().describe_room(root, size)
        self._staging.mkdir(parents=True, exist_ok=True)
        free = free_bytes(self._staging)
        needed = self._count_staged(size)
        shortage = "" if free >= needed else "; THERE IS NO ROOM: saves will fail"
        return (
            f"uploaded to {self._config.save} from {self._staging.parent}, which needs "
            f"{format_bytes(needed)} on this host and has {format_bytes(free)} free{shortage}"
        )

    def check_room(self, root: Path, size: int) -> None:
        """See `Store`."""
        if self._own is None:
            super().check_room(root, size)
            return
        self._staging.mkdir(parents=True, exist_ok=True)
        free = free_bytes(self._staging)
        if free < self._count_staged(size):
            raise OSError(
                f"the files of this host need {format_bytes(self._count_staged(size))}, and "
                f"{self._staging.parent} has {format_bytes(free)} free; make room, or give another "
                "--save-staging"
            )

    def _count_staged(self, size: int) -> int:
        """Return the bytes of a checkpoint that the ranks of this host write."""
        ranks = self._ranks.size
        return size * read_ranks_per_node(ranks, unknown=ranks) // ranks + SMALL_FILES

    def stage(self, folder: Path) -> Path:
        """See `Store`. Each attempt has keys of its own."""
        if self._own is None:
            return folder
        self._attempt += 1
        self._keys = f"{folder.name.removesuffix(UNFINISHED)}-{self._token}-{self._attempt}"
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(parents=True)
        return self._staging

    def upload(self, staged: Path, name: str) -> None:
        """See `Store`. The file is removed, also after an error."""
        if self._own is None:
            return
        try:
            self._own[0].objects.upload(staged / name, f"{self._keys}/{name}")
        finally:
            (staged / name).unlink(missing_ok=True)

    def complete(self, folder: Path, manifest: Manifest) -> None:
        """See `Store`."""
        if self._own is None:
            return
        mirror = self._own[0]
        for name in (INDEX, CONFIG, MANIFEST):
            mirror.objects.upload(folder / name, f"{self._keys}/{name}")
        for name, facts in manifest.files.items():
            if name not in (INDEX, CONFIG):
                mirror.make_placeholder(folder / name, facts["bytes"])
        mirror.mark(folder, self._keys)

    def verify(self, folder: Path, name: str, size: int, xxh128: str) -> None:
        """See `Store`."""
        for root, (mirror, _) in self._mirrors.items():
            if folder.parent == root:
                keys = mirror.find_keys(folder) or self._keys
                verify_object(ObjectFolder(mirror.objects.name(keys)), name, size, xxh128)
                return
        super().verify(folder, name, size, xxh128)

    def publish(self) -> None:
        """See `Store`. This is the one write that makes a checkpoint visible."""
        if self._own is None:
            return
        mirror, root = self._own
        root.publish(mirror.collect(root.record))

    def has_published(self, iteration: int) -> bool:
        """See `Store`."""
        return self._own is None or self._own[1].record.latest == f"global_step{iteration}"

    def clean_up(self, removed: Sequence[int]) -> list[str]:
        """See `Store`. It also uploads the records of the run."""
        if self._own is None:
            return []
        mirror, root = self._own
        names = {f"global_step{iteration}" for iteration in removed}
        try:
            if names:
                folders = {
                    name: keys for name, keys in root.record.folders.items() if name not in names
                }
                # First, because no reader may find a checkpoint whose objects are going.
                root.publish(replace(root.record, folders=folders))
            self._remove_orphans(keep=self._keys)
            mirror.push_records()
        except OSError as error:
            return [f"warning: {error}; the next save tries again"]
        return []

    def _remove_orphans(self, keep: str) -> None:
        """Delete the objects and abort the uploads that no checkpoint has.

        Args:
            keep: What the keys of the present save begin with. They stay.

        Raises:
            OSError: One cannot be removed.
        """
        assert self._own is not None
        assert self._lease is not None
        mirror, root = self._own
        named = {*root.record.folders.values(), keep}
        own = self._lease.generation

        def is_orphan(key: str) -> bool:
            generation = find_generation(key)
            # A later writer may have begun. Its objects are not ours to remove.
            if generation is None or generation > own:
                return False
            return key.partition("/")[0] not in named

        mirror.objects.delete([key for key in mirror.objects.list("global_step") if is_orphan(key)])
        mirror.objects.abort_uploads(is_orphan)

    @contextlib.contextmanager
    def fetch(self, checkpoint: Checkpoint, shards: Sequence[TensorShard]) -> Iterator[Checkpoint]:
        """See `Store`. The ranges are in the staging folder while the block runs."""
        found = self._mirrors.get(checkpoint.folder.parent)
        if found is None:
            yield checkpoint
            return
        try:
            objects = _find_objects(*found, checkpoint.folder)
            folder = self._staging / checkpoint.folder.name
            shutil.rmtree(self._staging, ignore_errors=True)
            folder.mkdir(parents=True)
            index = fetch_index(objects, checkpoint, folder)
            blocks = find_blocks(index, list_slices(index, shards))
            fetch_blocks(objects, checkpoint, index, blocks, folder)
            yield replace(checkpoint, folder=folder)
        except OSError as error:
            raise CheckpointError(f"{checkpoint.folder} cannot be fetched: {error}") from error
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)


def _find_objects(mirror: Mirror, root: RootObject, folder: Path) -> ObjectFolder:
    """Return the objects of a checkpoint, whose folder this host may not have.

    Raises:
        DamagedError: No checkpoint has this name.
        CheckpointError, OSError: `latest.json` cannot be read.
    """
    keys = mirror.find_keys(folder)
    if keys is None:
        keys = RootObject(mirror.objects).read().folders.get(folder.name)
    if keys is None:
        raise DamagedError(f"{mirror.objects.name(KEY)} does not name {folder.name}", MANIFEST)
    return ObjectFolder(mirror.objects.name(keys))


def _refuse_running_holder(folder: Path) -> None:
    """Raise CheckpointError if a run of this host uses the folder, which `pull` would change."""
    holder = read_holder(folder)
    if holder is not None and is_alive(holder):
        raise CheckpointError(
            f"--local-dir {folder} is being written to by {holder.describe()}; end that run, or "
            "give another --local-dir"
        )


@contextlib.contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Raise errors of the store so that all ranks report them."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(str(error)) from error
