"""Runs whose checkpoints are on a store, each rank on a host of its own."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from faults.launches import ERROR, Launch
from training.runs import SIZES

from megatron.extras.object_store.objects import ObjectFolder
from megatron.observe.metrics import read_metrics

QUICK = {
    "megatron.checkpoint.lease.STALE_SECONDS": 2.0,
    "megatron.checkpoint.lease.BEAT_SECONDS": 0.2,
}
SECRET = "a-secret-that-no-log-has"


def enter_own_folder(rank: int) -> None:
    """Give each rank another --local-dir, which is relative. Hosts share no folder."""
    folder = Path(os.environ["HOSTS"], f"host_{rank}")
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


class StoreJob:
    """A command line that is launched repeatedly, and the address that it saves to."""

    def __init__(
        self, data: str, folder: Path, address: str, endpoint: str, flags: str, ranks: int = 1
    ) -> None:
        self.address = address
        self.ranks = ranks
        self.folder = folder
        self.hosts = "hosts"
        self._endpoint = endpoint
        places = f"--save {address} --load {address}"
        if address.startswith("s3:"):
            places += " --local-dir local"
        self.argv = [
            *SIZES.split(),
            *("--data-path", data, "--data-cache-path", str(folder / "cache")),
            *places.split(),
            *flags.split(),
        ]
        self.launches: list[Launch] = []

    @property
    def local(self) -> Path:
        """The --local-dir of rank 0."""
        return self.folder / self.hosts / "host_0" / "local"

    def launch(
        self,
        extra: str = "",
        *,
        ranks: int | None = None,
        environment: Mapping[str, str] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> Launch:
        own = {
            "AWS_ENDPOINT_URL": self._endpoint,
            "HOSTS": str(self.folder / self.hosts),
            **{name: value for name, value in os.environ.items() if name.startswith("AWS_ACCESS")},
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            **(environment or {}),
        }
        found = Launch(
            [*self.argv, *extra.split()],
            ranks or self.ranks,
            self.folder / f"logs_{len(self.launches)}_{self.hosts}",
            environment=own,
            constants={**QUICK, **(constants or {})},
            prepare=enter_own_folder,
        )
        self.launches.append(found)
        return found

    def succeed(self, extra: str = "", **how: Any) -> str:
        launch = self.launch(extra, **how)
        assert set(launch.codes()) == {0}, launch.all_output()
        assert SECRET not in launch.all_output()
        return launch.output()

    def fail(self, extra: str = "", **how: Any) -> str:
        launch = self.launch(extra, **how)
        assert launch.codes()[0] == ERROR, launch.all_output()
        assert SECRET not in launch.all_output()
        return launch.output()

    def curve(self) -> dict[int, tuple[float, float]]:
        return {
            entry["iteration"]: (entry["lm_loss"], entry["grad_norm"])
            for entry in read_metrics(self.local / "metrics.jsonl")
        }

    def close(self) -> None:
        for launch in self.launches:
            launch.kill()


class Stored:
    """What is at an address, read without the package's own readers of checkpoints."""

    def __init__(self, address: str) -> None:
        self.objects = ObjectFolder(address)

    @property
    def root(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.objects.read("latest.json"))
        return found

    def key(self, iteration: int, name: str = "") -> str:
        return f"{self.root['folders'][f'global_step{iteration}']}/{name}"

    def files(self, iteration: int) -> dict[str, bytes]:
        return self.read_files(self.key(iteration))

    def read_files(self, keys: str) -> dict[str, bytes]:
        return {key.removeprefix(keys): self.objects.read(key) for key in self.objects.list(keys)}

    def check(self, *iterations: int) -> None:
        """Check that exactly these checkpoints are visible and whole, and nothing else is left."""
        import xxhash

        root = self.root
        assert sorted(root["folders"]) == sorted(f"global_step{i}" for i in iterations)
        assert root["latest"] == f"global_step{max(iterations)}"
        for iteration in iterations:
            files = self.files(iteration)
            manifest = json.loads(files["manifest.json"])
            assert set(files) == {*manifest["files"], "manifest.json"}
            for name, facts in manifest["files"].items():
                assert xxhash.xxh3_128_hexdigest(files[name]) == facts["xxh128"], name
        named = set(root["folders"].values())
        for key in self.objects.list():
            prefix = key.partition("/")[0]
            known = prefix in named or prefix in ("latest.json", "lease.json", "local")
            assert known, f"{key} was left"
        assert self.objects.abort_uploads(lambda key: True) == 0


NewStoreJob = Callable[..., StoreJob]
"""Type of the fixture `new_store_job`: (flags, ranks=1, place=address) -> StoreJob."""


def saved_lines(output: str) -> list[int]:
    return [
        int(found)
        for found in re.findall(r"successfully saved checkpoint at iteration +(\d+) to", output)
    ]
