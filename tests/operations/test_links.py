"""Links and manifests do not make a tool publish, rewrite or remove files of other folders."""

# ruff: noqa: F811 (fixtures are imported by their names)

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from operations.hub_fixtures import (  # noqa: F401
    REPO,
    Sync,
    assert_in_step,
    environment,
    hub,
    log_lines,
    run,
    sync,
)
from operations.hub_server import HubServer
from operations.run_folder import FakeRun
from operations.test_hub_sync import describe_file, save_checkpoint

from megatron.base.durable import replace_file
from megatron.base.errors import DamagedError
from megatron.checkpoint.folder import point_to
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.manifest import Manifest, collect_digests, is_plain_name, read_manifest
from megatron.extras.interop.inspection.verification import verify
from megatron.extras.operations.hub import push as hub_push
from megatron.extras.operations.hub import queue as hub_queue
from megatron.extras.operations.hub.inside import OutsideError, open_inside
from megatron.extras.operations.rollback.execution import roll_back
from megatron.extras.operations.rollback.rollback_plan import (
    RollbackPlan,
    RollbackRequest,
    make_plan,
)

ROOT = Path(__file__).resolve().parents[2]
SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Write a file next to the run's folder that must not be published."""
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    path = tmp_path / "home" / ".ssh" / "id_ed25519"
    path.write_bytes(SECRET)
    return path


def published(server: HubServer) -> bytes:
    """Return all contents that the Hub has, on any branch or in its large file storage."""
    repository = server.repositories[REPO]
    trees = [
        commit.tree for branch in repository.branches for commit in server.history(REPO, branch)
    ]
    return b"".join(
        [
            *(stored.content for tree in trees for stored in tree.values()),
            *repository.objects.values(),
        ]
    )


# What is sent


@pytest.mark.parametrize("kind", ["file", "folder", "chain", "relative"])
def test_a_link_out_of_the_folder_is_not_published(
    kind: str,
    hub: HubServer,
    run: Path,
    sync: Sync,
    secret: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The link is reported, and the other files are sent."""
    if kind == "file":
        (run / "logs" / "key.txt").symlink_to(secret)
    elif kind == "folder":
        (run / "logs" / "home").symlink_to(secret.parent)
    elif kind == "chain":
        (run / "hop").symlink_to(secret)
        (run / "logs" / "key.txt").symlink_to("../hop")
    else:
        (run / "logs" / "key.txt").symlink_to(
            f"../../{secret.parent.parent.name}/.ssh/{secret.name}"
        )
    assert sync() == 1
    assert SECRET not in published(hub)
    assert "logs/main_log.txt.000000" in hub.files(REPO)
    messages = capsys.readouterr().err
    assert f"outside of {run}" in messages
    assert "the folder that holds it" in messages


def test_links_within_the_folder_are_followed(hub: HubServer, run: Path, sync: Sync) -> None:
    """This also works if the run's folder is itself a link, for example to another mount."""
    real = run.with_name("another-mount")
    run.rename(real)
    run.symlink_to(real)
    (run / "elsewhere").mkdir()
    log_lines(run / "elsewhere" / "a.txt", 0, 5)
    (run / "logs" / "deeper").symlink_to("../elsewhere")
    (run / "logs" / "same.txt").symlink_to("main_log.txt")
    assert sync() == 0
    assert (
        hub.files(REPO)["logs/deeper/a.txt.000000"] == (real / "elsewhere" / "a.txt").read_bytes()
    )
    assert hub.files(REPO)["logs/same.txt.000000"] == (real / "logs" / "main_log.txt").read_bytes()


def test_a_link_that_replaces_a_scanned_file_is_not_published(
    hub: HubServer,
    run: Path,
    sync: Sync,
    secret: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The target of the link has the same content, so only the path shows the difference."""
    (run / "logs" / "key.txt").write_bytes(SECRET)
    look = hub_push.look

    def look_then_replace(*arguments: object) -> hub_queue.FolderScan:
        found = look(*arguments)  # type: ignore[arg-type]
        (run / "logs" / "key.txt").unlink()
        (run / "logs" / "key.txt").symlink_to(secret)
        (run / "logs").rename(run / "logs-before")
        (run / "logs").symlink_to(secret.parent)
        (secret.parent / "key.txt").write_bytes(SECRET)
        (secret.parent / "main_log.txt").write_bytes(
            (run / "logs-before" / "main_log.txt").read_bytes()
        )
        return found

    with monkeypatch.context() as patch:
        patch.setattr(hub_push, "look", look_then_replace)
        assert sync() == 1
    assert SECRET not in published(hub)
    assert "logs/main_log.txt cannot be sent (leads to" in capsys.readouterr().err


def test_a_folder_that_keeps_becoming_a_link_opens_nothing_outside(
    tmp_path: Path, secret: Path
) -> None:
    """While a thread exchanges a folder and a link, an opened file is never the one outside."""
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / secret.name).write_bytes(b"mine")
    (folder / "link").symlink_to(secret.parent)
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            os.rename(folder / "a", folder / "b")
            os.rename(folder / "link", folder / "a")
            os.rename(folder / "a", folder / "link")
            os.rename(folder / "b", folder / "a")

    thread = threading.Thread(target=exchange)
    thread.start()
    opened = 0
    refused = 0
    try:
        for _ in range(500):
            try:
                with open_inside(folder, f"a/{secret.name}") as file:
                    assert file.read() == b"mine"
                opened += 1
            except OSError:
                refused += 1
    finally:
        stop.set()
        thread.join()
    assert opened > 0
    assert refused > 0


def test_special_files_are_left_out(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FIFO, a socket and a device do not block the sync, and the other files are sent."""
    os.mkfifo(run / "logs" / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(run / "logs", os.O_RDONLY)
        server.bind(f"/proc/self/fd/{folder}/socket.txt")
        os.close(folder)
        # This device is /dev/zero, which never ends.
        os.mknod(run / "logs" / "device.txt", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        assert sync("--timeout", "5") == 1
    messages = capsys.readouterr().err
    for name in ("pipe.txt", "socket.txt", "device.txt"):
        assert f"logs/{name} is not a regular file" in messages
    assert {"logs/main_log.txt.000000", "codecarbon/emissions.csv"} < hub.files(REPO).keys()


def test_opening_a_fifo_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    """Opening a FIFO is refused immediately."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutsideError, match="not a regular file"):
        open_inside(tmp_path, "pipe")


def test_files_behind_a_link_are_not_deleted_on_the_hub(
    hub: HubServer, run: Path, sync: Sync, secret: Path
) -> None:
    """A link that leads out is not followed, so it is unknown whether its files still exist."""
    (run / "logs" / "deep").mkdir()
    log_lines(run / "logs" / "deep" / "a.txt", 0, 3)
    sync()
    (run / "logs" / "deep").rename(secret.parent / "deep")
    (run / "logs" / "deep").symlink_to(secret.parent / "deep")
    assert sync() == 1
    assert "logs/deep/a.txt.000000" in hub.files(REPO)


@pytest.mark.parametrize("suffix", [".copies", ".lock", ".new"])
def test_links_in_place_of_the_syncs_own_files_are_not_followed(
    suffix: str, hub: HubServer, run: Path, sync: Sync, secret: Path
) -> None:
    """The sync empties its folder of copies and writes its other files, but not through a link."""
    (run / hub_push.OWN_FOLDER).mkdir()
    state = hub_push.get_default_state_path(run, REPO)
    target = secret
    if suffix == ".copies":
        target = secret.parent
    state.with_name(f"{state.name}{suffix}").symlink_to(target)
    assert sync() == 2
    assert secret.read_bytes() == SECRET


# Checkpoints


def rewrite_manifest(folder: Path, **changes: object) -> None:
    """Change a manifest, and compute its digest again."""
    text = json.loads((folder / "manifest.json").read_text())
    text.pop("digest")
    manifest = replace(Manifest(**text), **changes)  # type: ignore[arg-type]
    (folder / "manifest.json").write_text(manifest.dump_json())


@pytest.mark.parametrize("name", ["absolute", "relative"])
def test_a_manifest_that_names_a_file_elsewhere_publishes_nothing(
    name: str,
    hub: HubServer,
    run: Path,
    sync: Sync,
    secret: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The sync, a load and the verification refuse the manifest."""
    folder = save_checkpoint(run / "checkpoints", 10)
    if name == "absolute":
        path = str(secret)
    else:
        path = os.path.relpath(secret, folder)
    files = {**read_manifest(folder).files, path: describe_file(secret)}
    rewrite_manifest(folder, files=files)
    assert sync("--checkpoints", str(run / "checkpoints"), patterns=()) == 1
    assert SECRET not in published(hub)
    assert hub.repositories[REPO].branches.keys() == {"main"}
    assert "plain file names" in capsys.readouterr().err
    with pytest.raises(DamagedError, match="plain file names"):
        open_checkpoint(run / "checkpoints", 10)
    (damage,) = verify(folder).damage
    assert "plain file names" in damage.what


@pytest.mark.parametrize("kind", ["tensors", "manifest", "folder"])
def test_a_checkpoint_behind_a_link_is_not_published(
    kind: str,
    hub: HubServer,
    run: Path,
    sync: Sync,
    secret: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The checkpoint is left out and reported, and the next one is pushed."""
    root = run / "checkpoints"
    folder = save_checkpoint(root, 10)
    save_checkpoint(root, 20)
    if kind == "folder":
        folder.rename(secret.parent / "global_step10")
        folder.symlink_to(secret.parent / "global_step10")
    else:
        name = {"tensors": "model.safetensors", "manifest": "manifest.json"}[kind]
        (folder / name).rename(secret.parent / name)
        (folder / name).symlink_to(secret.parent / name)
    assert sync("--checkpoints", str(root), patterns=()) == 1
    assert hub.repositories[REPO].branches.keys() == {"main", "global_step20"}
    assert "global_step10 is left out: leads to" in capsys.readouterr().err


def test_large_files_are_sent_from_the_file_that_was_opened(
    hub: HubServer, run: Path, sync: Sync, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that replaces a file before each request of the client is not followed."""
    root = run / "checkpoints"
    folder = save_checkpoint(root, 10, b"weights" * 100)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr("megatron.extras.operations.hub.checkpoints.IN_MEMORY_BYTES", 100)
    upload = hub_push.Hub.upload

    def replace_then_upload(self: hub_push.Hub, branch: str, additions: list) -> frozenset[str]:
        for addition in additions:
            path = folder / addition.path_in_repo
            path.rename(f"{path}.before")
            path.symlink_to(secret)
        try:
            return upload(self, branch, additions)
        finally:
            for addition in additions:
                path = folder / addition.path_in_repo
                Path(f"{path}.before").replace(path)

    monkeypatch.setattr(hub_push.Hub, "upload", replace_then_upload)
    assert sync("--checkpoints", str(root), patterns=()) == 0
    assert hub.files(REPO, "global_step10") == before
    assert SECRET not in published(hub)


@pytest.mark.full
def test_large_files_are_closed_after_their_upload(
    hub: HubServer, run: Path, sync: Sync, tmp_path: Path
) -> None:
    """A checkpoint may have more large files than a process may open."""
    root = run / "checkpoints"
    folder = save_checkpoint(
        root, 10, others=tuple(f"rank_{rank:05d}.safetensors" for rank in range(80))
    )
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))\n"
        "from megatron.extras.operations.hub import checkpoints; checkpoints.IN_MEMORY_BYTES = 1\n"
        "from megatron.extras.operations.commands import hub_sync\n"
        "sys.exit(hub_sync.main(sys.argv[1:]))"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "--repo",
        REPO,
        "--folder",
        str(run),
        "--checkpoints",
        str(root),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(hub, tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert hub.files(REPO, "global_step10") == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("rank_00000.safetensors", True),
        ("index.json", True),
        ("../x", False),
        ("..", False),
        (".", False),
        ("", False),
        ("/etc/passwd", False),
        ("a/b", False),
        ("a\\b", False),
        ("a\nb", False),
        ("a\x1b[2J", False),
        ("a\0b", False),
        ("\udcff", False),
        ("manifest.json", False),
        (3, False),
    ],
)
def test_only_plain_file_names_are_accepted(name: object, plain: bool) -> None:
    """A manifest may have names without a path, and no name of the manifest itself."""
    assert is_plain_name(name) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"course": [["10/../../victim", "digest", False]]},
        {"course": [[-1, "digest", False]]},
        {"course": ["10"]},
        {"iteration": "10/../../victim"},
        {"iteration": True},
    ],
)
def test_iterations_of_a_manifest_must_be_numbers(
    changes: dict[str, object], tmp_path: Path
) -> None:
    """Iterations become names of folders, and retention removes the folders of the lineage."""
    folder = save_checkpoint(tmp_path, 10)
    rewrite_manifest(folder, **changes)
    point_to(tmp_path, 10)
    with pytest.raises(DamagedError, match=r"iteration|course"):
        read_manifest(folder)


def test_an_index_that_names_another_file_is_damage(tmp_path: Path, secret: Path) -> None:
    """An index may only name files of the manifest."""
    folder = save_checkpoint(tmp_path / "run", 10)
    stored = {"file": str(secret), "begin": 0, "offset": [0], "shape": [1]}
    index = {"tensors": {"weight/w": {"shape": [1], "boxes": [stored]}}, "blocks": {}}
    (folder / "index.json").write_text(json.dumps(index))
    described = describe_file(folder / "index.json")
    rewrite_manifest(folder, files={**read_manifest(folder).files, "index.json": described})
    checkpoint = open_checkpoint(tmp_path / "run", 10)
    with pytest.raises(DamagedError, match="does not name"):
        collect_digests(checkpoint.manifest, checkpoint.read_index())


# What is rewritten


def test_a_small_file_is_not_written_through_a_link(tmp_path: Path, secret: Path) -> None:
    """Replacing a file fails if its temporary name is a link."""
    (tmp_path / "latest.new").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "latest", "global_step10")
    assert secret.read_bytes() == SECRET


def test_a_rollback_does_not_cut_event_files_of_another_run(tmp_path: Path) -> None:
    """Links to them in the run's folder of events, made to compare charts, are reported."""
    mine = FakeRun(tmp_path / "run", tmp_path / "aside")
    other = FakeRun(tmp_path / "other" / "run", tmp_path / "other" / "aside")
    for each in (mine, other):
        each.launch(1, 8)
    theirs = sorted(Path(other.paths()["tensorboard_dir"]).glob("*tfevents*"))
    before = [path.read_bytes() for path in theirs]
    for path in theirs:
        (Path(mine.paths()["tensorboard_dir"]) / f"other.{path.name}").symlink_to(path)
    messages: list[str] = []
    roll_back(mine.root, RollbackRequest(4, **mine.paths()), messages.append)
    assert [path.read_bytes() for path in theirs] == before
    assert any(f"is a link to {theirs[0]}, outside of" in line for line in messages)
    # The run's own event files were cut.
    assert list((mine.root / "rolled-back").glob("*/tensorboard/*tfevents*"))


@pytest.mark.parametrize("part", ["/tmp/x", "../x", "tensorboard/../../x", "", "a\nb"])
def test_a_plan_that_writes_elsewhere_is_damaged(part: str, tmp_path: Path) -> None:
    """A plan that was read from the disk must not lead out of the rollback's folder."""
    run = FakeRun(tmp_path / "run", tmp_path / "aside")
    run.launch(1, 8)
    plan, _ = make_plan(run.root, RollbackRequest(4, **run.paths()))
    assert RollbackPlan.parse_json(plan.dump_json()) == plan
    changed = replace(plan, files=[replace(plan.files[0], part=part), *plan.files[1:]])
    with pytest.raises(ValueError, match="leads out of"):
        RollbackPlan.parse_json(changed.dump_json())
