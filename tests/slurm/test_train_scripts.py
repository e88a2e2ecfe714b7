"""The job scripts of train/ and slurm/: Slurm accepts them, and their flags are as published."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from slurm.cluster import Cluster

from megatron.extras.interop.translators.launch_script import read_launch_script
from megatron.extras.interop.translators.translator import load_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("train", "slurm")
    for path in (ROOT / folder).rglob("*.slurm")
)
TRAINING = [script for script in SCRIPTS if "pretrain_gpt.py" in (ROOT / script).read_text()]
EXAMPLE = "examples/pretrain_gpt.slurm"
PUBLISHED = {
    "train/tr8-104B/tr8-104B.slurm": "tr8-104B",
    "train/tr8-104B/tr8-104B-64.slurm": "tr8-104B",
    "train/tr1-13B-base/tr1-13B.slurm": "tr1-13B",
    "train/tr11-176B-ml/tr11-176B-ml.slurm": "tr11-176B-ml",
}
LOCATIONS = {
    "config_file",
    "data.data_path",
    "data.train_weighted_split_paths_path",
    "data.valid_weighted_split_paths_path",
    "tokenizer.vocab_file",
    "tokenizer.merge_file",
    "checkpoint.save",
    "checkpoint.load",
    "parallel.deepspeed_config",
    "logging.tensorboard_dir",
    "logging.codecarbon_dir",
    "logging.metrics_file",
    "batch.kill_switch_path",
    "parallel.distributed_backend",
    "loss.loss_mean",
}
"""Fields that name a file or folder, the backend, which follows from the device, and the mean of
the loss, which has no effect without masked tokens. The scripts name it."""


def test_scripts_are_found() -> None:
    assert len(TRAINING) >= 6
    assert {
        "train/tr8-104B/tr8-104B-hub-sync-logs.slurm",
        "train/tr8-104B/tr8-104B-slurm-status.slurm",
    } <= set(SCRIPTS)


@pytest.mark.parametrize("script", [*SCRIPTS, EXAMPLE])
def test_slurm_accepts_the_script(script: str, cluster: Cluster) -> None:
    """The partition has 128 nodes of 8 GPUs, which never start."""
    cluster.run("sbatch", "--test-only", "--partition=absent", str(ROOT / script))


@pytest.mark.parametrize("script", [*SCRIPTS, EXAMPLE])
def test_script_has_no_syntax_error(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("script", TRAINING)
def test_plan_has_no_errors(script: str) -> None:
    """The plan has no errors for a run from the first sample."""
    command = [sys.executable, "tools/plan.py", "--json", "--consumed-samples", "0", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)
    assert plan["errors"] == []
    assert not [
        warning for warning in plan["warnings"] if "--deepspeed does not support it" in warning
    ]


def test_rehearsal_of_the_page_has_no_errors(tmp_path: Path) -> None:
    """The flags of the 104B run, with those that docs/operations.md adds, fit two nodes."""
    page = (ROOT / "docs/operations.md").read_text()
    commands = page.partition("## 2. A rehearsal")[2].split("```")[1]
    prepare = [line for line in commands.splitlines() if line.startswith(("mkdir ", "sed "))]
    added = commands.partition("followed by:>")[2]
    script = read_launch_script(ROOT / "train/tr8-104B/tr8-104B.slurm")
    plan = [sys.executable, "tools/plan.py", "--json", "--world-size", "8", "--", *script.arguments]
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*prepare, f"{shlex.join(plan)} {added}"])],
        cwd=ROOT,
        env=os.environ | {"SCRATCH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    planned = json.loads(done.stdout)
    assert planned["errors"] == []
    assert planned["data_parallel_size"] == 1


@pytest.mark.parametrize(("script", "run"), PUBLISHED.items())
def test_flags_are_the_published_ones(
    script: str, run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    published = json.loads((ROOT / "tests/fixtures/published_runs" / f"{run}.json").read_text())
    ds_config = tmp_path / "ds_config.json"
    ds_config.write_text(json.dumps(published["ds_config"]))
    arguments = [
        str(ds_config) if word == "./ds_config.0.json" else word for word in published["arguments"]
    ]
    ours, theirs = (
        _flat(load_config(list(words)).config)
        for words in (read_launch_script(ROOT / script).arguments, arguments)
    )
    differences = {name for name in ours if ours[name] != theirs[name]} - LOCATIONS
    # The published runs had no watchdog. It changes no number.
    assert differences == {"parallel.hang_timeout"}


def _flat(config: object, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_dataclass(value):
            flat |= _flat(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def test_scripts_have_no_options_of_a_site() -> None:
    """Account, partition and constraint come from the environment, as in SBATCH_ACCOUNT."""
    for script in SCRIPTS:
        options = re.findall(r"^#SBATCH\s+--([\w-]+)", (ROOT / script).read_text(), re.MULTILINE)
        assert not {"account", "partition", "constraint", "mail-user", "qos", "nodelist"} & set(
            options
        ), script
