"""The files of examples/cloud fit the published models. Their commands and the container's run."""

import copy
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml
from process_pool import find_free_port

from megatron.extras.interop.translators.translator import load_config
from megatron.observe.metrics import read_metrics
from megatron.plan.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/cloud"
GPUS = 16
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "PersistentVolumeClaim": "IoK8sApiCoreV1PersistentVolumeClaim",
}
TINY = """
--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1
--global-batch-size 4 --train-iters 1000000 --lr 1e-3 --eval-iters 0 --log-interval 1
--pipeline-model-parallel-size 2 --mock-data --vocab-size 64
"""


def read_documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def find_pod(tree: Any) -> dict[str, Any]:
    """Return the description of the only pod of a document."""
    while "containers" not in tree:
        tree = tree.get("spec") or tree.get("template") or tree["replicatedJobs"][0]
    return tree


def read_flags(name: str) -> list[str]:
    """Return the trainer's flags in a file."""
    if name == "skypilot.yaml":
        words = shlex.split(read_documents(name)[0]["run"].replace("\\\n", " "), comments=True)
    elif name == "jobset.yaml":
        words = find_pod(read_documents(name)[0])["containers"][0]["args"]
    else:
        words = read_documents(name)[-1]["spec"]["trainer"]["args"]
    return words[words.index("megatron.commands.pretrain") + 1 :]


@pytest.mark.parametrize("name", ["claims.yaml", "jobset.yaml", "trainjob.yaml"])
def test_kubernetes_files_fit_the_published_models(name: str) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    for document in read_documents(name):
        model = getattr(models, MODELS[document["kind"]])

        def keeps_everything(given: dict[str, Any], model: Any = model) -> bool:
            # The models leave out keys that they do not know, and refuse wrong types.
            return json.loads(model.from_dict(copy.deepcopy(given)).to_json()) == given

        assert keeps_everything(document)
        assert not keeps_everything(document | {"spec": document["spec"] | {"misspelt": 1}})


def test_skypilot_file_fits_the_published_schemas() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    (task,) = read_documents("skypilot.yaml")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    for mount in task["file_mounts"].values():
        jsonschema.validate(mount, schemas.get_storage_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task["resources"] | {"misspelt": 1}, schemas.get_resources_schema())


def test_all_files_train_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flags = read_flags("jobset.yaml")
    assert read_flags("trainjob.yaml") == read_flags("skypilot.yaml") == flags
    loaded = load_config(flags)
    assert resolve(loaded.config, GPUS, loaded.origin).errors == ()
    assert loaded.config.checkpoint.save == loaded.config.checkpoint.load == "/runs/llama3-1b"


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_the_ranks_end_before_their_pod(name: str) -> None:
    pod = find_pod(read_documents(name)[0])
    (timeout,) = (
        int(variable["value"])
        for variable in pod["containers"][0]["env"]
        if variable["name"] == "PET_SHUTDOWN_TIMEOUT"
    )
    assert timeout < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_the_claims_of_the_pods_are_shared_by_nodes(name: str) -> None:
    claims = {each["metadata"]["name"]: each["spec"] for each in read_documents("claims.yaml")}
    volumes = find_pod(read_documents(name)[0])["volumes"]
    used = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
    assert {each["claimName"] for each in used} == set(claims)
    assert all(claim["accessModes"] == ["ReadWriteMany"] for claim in claims.values())


@pytest.mark.full
def test_a_signal_to_one_node_saves_and_the_same_command_resumes(tmp_path: Path) -> None:
    """Two launchers with the environment of jobset.yaml are the nodes. One gets SIGTERM."""
    environment = find_pod(read_documents("jobset.yaml")[0])["containers"][0]["env"]
    arguments = ["-m", "megatron.commands.pretrain", *TINY.split()]
    flags = read_flags("jobset.yaml")
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        if flag not in ("--config", "--data-path", "--tokenizer-name-or-path"):
            arguments += [flag, value.replace("/runs/", f"{tmp_path}/")]
    port = str(find_free_port())

    def start(node: int) -> subprocess.Popen[str]:
        variables = {each["name"]: each.get("value", str(node)) for each in environment}
        variables |= {
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            env=os.environ | variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    saved = []
    for _ in range(2):
        nodes = [start(node) for node in range(2)]
        try:
            assert nodes[0].stdout is not None
            lines = iter(nodes[0].stdout)
            assert any(re.search(r"iteration +\d+/", line) for line in lines)
            nodes[1].send_signal(signal.SIGTERM)
            assert any("received a signal to stop" in line for line in lines)
            nodes[1].communicate(timeout=120)
        finally:
            # The launcher of node 0 waits for the other one, and Kubernetes ends its pod.
            for node in nodes:
                node.kill()
        # Kubernetes must see a failure, or the run would count as done.
        assert nodes[1].returncode == 1
        saved.append(int((tmp_path / "llama3-1b/latest").read_text().removeprefix("global_step")))
    assert 0 < saved[0] < saved[1]
    iterations = [line["iteration"] for line in read_metrics(tmp_path / "llama3-1b/metrics.jsonl")]
    assert iterations == list(range(1, saved[1] + 1))


def read_instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile with their words."""
    lines = re.sub(r"(?m)^#.*\n", "", (ROOT / "Containerfile").read_text()).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in lines.splitlines() if line]  # type: ignore[misc]


def copy_context(folder: Path) -> None:
    """Copy what .containerignore lets through, without files that git ignores."""
    rules = (ROOT / ".containerignore").read_text().splitlines()
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    copy = (
        'git ls-files -z -- "$@" | tar --create --null --files-from - | tar --extract --directory'
    )
    command = ["bash", "-c", f'set -o pipefail; {copy} "$0"', str(folder), *kept]
    subprocess.run(command, cwd=ROOT, check=True)


def test_container_has_a_fixed_base_and_no_root() -> None:
    instructions = read_instructions()
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-[\w-]+", instructions[0][1])
    assert [words for name, words in instructions if name == "USER"][-1] not in ("0", "root")


@pytest.mark.full
def test_commands_of_the_container_run_in_a_clean_folder(tmp_path: Path) -> None:
    """The commands that need root or a package manager of the system are left out."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    venv.create(tmp_path / "environment", with_pip=True)
    environment["PATH"] = f"{tmp_path}/environment/bin:{os.environ['PATH']}"
    # The CPU build is small. EXTRAS stays as it is.
    environment["TORCH"] = os.environ.get("TORCH", "torch==2.13.0+cpu")
    folder = tmp_path / "megatron"
    folder.mkdir()
    ran = 0
    for name, words in read_instructions():
        if name == "ARG":
            environment.setdefault(*words.split("=", 1))
        elif name == "COPY":
            copy_context(folder)
        elif name == "RUN" and not words.startswith(("apt-get", "useradd")):
            done = subprocess.run(
                ["sh", "-c", words],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, words + done.stdout[-2000:] + done.stderr[-2000:]
            ran += 1
        elif name == "CMD":
            shown = subprocess.run(json.loads(words), cwd=folder, env=environment, check=False)
            assert shown.returncode == 0
    assert ran == 3
