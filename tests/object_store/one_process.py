"""A run at an address, played in one process: starts on several hosts, saves, kills and rollbacks.

It has no engine. The tensor of a checkpoint is computed from its iteration and the name of the
course that the run is on, so that a load shows whose bytes it got.
"""

import uuid
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.base.errors import DamagedError
from megatron.checkpoint.contents import CheckpointContents
from megatron.checkpoint.folder import list_run_leftovers, mark_started
from megatron.checkpoint.lineage import Lineage, find_run_lineage
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.save import Saver
from megatron.checkpoint.start import take_start
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.cli import load_config
from megatron.config.yaml_file import dump_yaml
from megatron.extras.object_store.store import ObjectStore
from megatron.parallel.ranks import Ranks
from megatron.parallel.shard import TensorShard
from megatron.run.state import TrainState

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --mock-data "
    "--vocab-size 5000 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters 1000"
)
CONFIG = dump_yaml(load_config(FLAGS.split()).config)
SIZE = 40_000
"""Elements of the tensor. Its file has several parts of 64 KiB."""


class FirstRank(Ranks):
    """Rank 0, which remembers what the other ranks would be told."""

    said: list[Any]

    def call_on_rank_0(self, act: Any, what: str, log: Any = None) -> Any:
        result = act()
        self.__dict__.setdefault("said", []).append(result)
        return result


class SecondRank(Ranks):
    """A rank on another host, which is told what rank 0 has said."""

    def call_on_rank_0(self, act: Any, what: str, log: Any = None) -> Any:
        return self.__dict__["heard"].pop(0)


def compute_tensor(iteration: int, course: str) -> torch.Tensor:
    """Return the tensor that a run on a course has after an iteration."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{iteration} {course}".encode()))
    return torch.randn(SIZE, generator=generator)


def make_shard(tensor: torch.Tensor) -> TensorShard:
    return TensorShard("weight", "w", tuple(tensor.shape), (0,), tensor, owner=True)


class PlayedRun:
    """One start of a run. It has the lease until `end` or `kill`."""

    def __init__(self, address: str, local: Path, other: Path | None = None, **flags: Any) -> None:
        """Start, and load the checkpoint that `latest.json` names on this and another host."""
        self.log: list[str] = []
        self._config = CheckpointConfig(
            save=address,
            load=address,
            local_dir=str(local),
            max_save_failures=1 << 30,
            **{"keep_latest_checkpoints": 2, **flags},
        )
        ranks = FirstRank()
        self.store = ObjectStore(self._config, ranks)
        self.store.open()
        local.mkdir(parents=True, exist_ok=True)
        self.lease = self.store.acquire(local, self.log.append)
        try:
            self.store.meet()
            if not list_run_leftovers(local):
                mark_started(local)
            self.checkpoint = self._choose_and_load()
        except BaseException:
            self.kill()
            raise
        self.iteration = 0 if self.checkpoint is None else self.checkpoint.iteration
        self.course = uuid.uuid4().hex
        lineage: Lineage = ()
        if self.checkpoint is not None:
            lineage = find_run_lineage(local, self.checkpoint.manifest)
            if other is not None:
                self._load_on(other, ranks.said)
        self.saved: list[int] = []
        self._saver = Saver(
            local,
            self._config,
            ranks,
            lease=self.lease,
            log=self.log.append,
            saved=self.saved.append,
            lineage=lineage,
            store=self.store,
        )

    def _choose_and_load(self) -> Checkpoint | None:
        """Load as a run does: what is damaged is renamed, and an older checkpoint is tried."""
        damage: dict[int, str] = {}
        while True:
            start = take_start(self._config, damage, holds_lease=True, log=self.log.append)
            if start.checkpoint is None:
                return None
            try:
                check_load(self.store, start.checkpoint)
                return start.checkpoint
            except DamagedError as found:
                damage[start.checkpoint.iteration] = str(found)

    def _load_on(self, other: Path, said: list[Any]) -> None:
        """Load on a second host, which knows only what rank 0 has said."""
        assert self.checkpoint is not None
        ranks = SecondRank(rank=1, size=2, names=("rank 0", "rank 1"))
        ranks.__dict__["heard"] = [*said]
        store = ObjectStore(replace(self._config, local_dir=str(other)), ranks)
        store.open()
        store.meet()
        # The hosts give --local-dir the same name, which two folders of one host cannot have.
        (names,) = store._named.values()
        store._named = {str(other): names}
        check_load(store, replace(self.checkpoint, folder=other / self.checkpoint.folder.name))

    def save(self, iteration: int) -> bool:
        """Save an iteration. Return whether the run calls it safe."""
        state = TrainState(iteration=iteration, applied_steps=iteration).to_json()
        state["course"] = self.course
        contents = CheckpointContents(iteration, {}, state, CONFIG)
        self._saver.begin(contents, [make_shard(compute_tensor(iteration, self.course))])
        self._saver.complete()
        return self.saved[-1:] == [iteration]

    def end(self) -> None:
        """End normally."""
        self.lease.release()

    def kill(self) -> None:
        """End without a release, as after a kill."""
        self.lease._over.set()


def check_load(store: ObjectStore, checkpoint: Checkpoint) -> None:
    """Load a checkpoint, and check that its tensor is that of its iteration and course.

    Raises:
        DamagedError: It is damaged in the store.
    """
    found = torch.empty(SIZE)
    shards = [make_shard(found)]
    with store.fetch(checkpoint, shards) as fetched:
        fetched.load_into(shards)
    expected = compute_tensor(checkpoint.iteration, checkpoint.manifest.state["course"])
    assert torch.equal(found, expected)
