"""Tests of tools/plan.py, run with command lines."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.base import exit_codes
from megatron.commands import plan
from megatron.config.compare import compute_config_digest
from megatron.config.fields import all_fields
from megatron.config.model import ModelConfig
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands import plan_estimates, plan_search
from megatron.extras.planner.commands.plan_search import PlannedSearch
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.model.shape import ModelShape

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "tests" / "fixtures" / "published_runs"
SMALL = shlex.split(
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 1e-3 --vocab-size 1000"
)
KEYS = {"parameters", "data_parallel_size", "train_iters", "at", "errors", "warnings"}


@pytest.fixture(scope="module", autouse=True)
def one_search_of_each_plan() -> Iterator[None]:
    """Search the layouts of a plan once, because several tests read the result of the same one."""
    found: dict[str, PlannedSearch] = {}

    def search(*arguments: Any, **options: Any) -> PlannedSearch:
        key = repr((arguments, options))
        if key not in found:
            found[key] = plan_search.search_plan(*arguments, **options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "search_plan", search)
        yield


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict:
    assert plan.main(["--json", *argv]) == code
    return json.loads(capsys.readouterr().out)


def published(run: str) -> tuple[list[str], str]:
    record = json.loads((RUNS / f"{run}.json").read_text())
    return record["arguments"], str(record["facts"]["nodes"] * record["facts"]["gpus_per_node"])


def test_checkpoints_on_a_store_have_a_time_and_a_price(capsys):
    flags = [*SMALL, "--bf16", "--save", "s3://b/run", "--local-dir", "local"]
    flags += ["--save-interval", "10", "--keep-latest-checkpoints", "3"]
    options = ["--world-size", "8", "--store-gb-per-second", "0.5", "--store-price", "0.02"]
    result = as_json(capsys, *options, "--store-write-price", "0", *flags)
    found = result["cost"]["object_store"]
    size = 12 * result["parameters"]
    assert found["bytes"] == size
    assert found["upload_seconds"] == found["load_seconds"] == pytest.approx(size / 0.5e9)
    saves = 30 * 86400 / (10 * result["cost"]["seconds_per_iteration"])
    assert found["saves"] == pytest.approx(saves)
    # Three are kept, and a fourth one is on its way.
    assert found["kept"] == 4
    assert found["dollars_later"] == pytest.approx(4 * 0.02 * size / 1e9)
    assert found["dollars"] == pytest.approx(found["dollars_later"], rel=0.01)
    dear = as_json(capsys, *options, "--store-write-price", "1", *flags)["cost"]["object_store"]
    # A request for each rank, and one for each 16 MiB.
    requests = saves * (8 + size / (16 << 20))
    assert dear["dollars"] - found["dollars"] == pytest.approx(requests / 1000)
    assert plan.main([*options, *flags]) == 0
    text = capsys.readouterr().out
    assert re.search(r"object store .* GB upload in .* a month for \$", text)
    assert as_json(capsys, "--world-size", "8", *SMALL, "--bf16")["cost"]["object_store"] is None


@pytest.mark.parametrize("separator", [["--"], []], ids=["with --", "without --"])
def test_plan_of_tr11_has_the_numbers_of_the_published_run(capsys, separator):
    arguments, world = published("tr11-176B-ml")
    result = as_json(
        capsys, "--world-size", world, "--at", "12695", "31214", *separator, *arguments
    )
    assert set(result) >= KEYS
    assert result["errors"] == []
    assert result["parameters"] == 176_247_271_424
    assert result["data_parallel_size"] == 8
    assert result["train_iters"] == 115_311
    first, second = result["at"]
    assert set(first) == {
        "iteration",
        "consumed_samples",
        "consumed_tokens",
        "global_batch_size",
        "lr",
    }
    assert first["iteration"] == 12_695
    assert first["consumed_samples"] == 9_841_584
    assert first["global_batch_size"] == 2048
    assert first["consumed_tokens"] == 9_841_584 * 2048
    assert f"{first['lr']:.3E}" == "5.969E-05"
    assert f"{second['lr']:.3E}" == "5.279E-05"
    assert second["consumed_samples"] == 47_768_496


def test_plan_of_tr1_has_the_numbers_of_the_published_run(capsys):
    arguments, world = published("tr1-13B")
    result = as_json(
        capsys, "--world-size", world, "--at", "29020", "33240", "43680", "--", *arguments
    )
    assert result["errors"] == []
    assert result["data_parallel_size"] == 64
    assert result["train_iters"] == 311_541
    assert [state["consumed_samples"] for state in result["at"]] == [
        10_698_064,
        15_019_344,
        25_709_904,
    ]


def test_plan_of_tr8_has_the_numbers_of_the_published_run(capsys):
    arguments, world = published("tr8-104B")
    result = as_json(capsys, f"--world-size={world}", *arguments)
    assert result["errors"] == []
    assert result["data_parallel_size"] == 4
    assert any("145" in warning for warning in result["warnings"])


def test_a_resume_after_the_ramp_up_ignores_its_batch_sizes(capsys):
    arguments, world = published("tr1-13B")
    start = as_json(capsys, "--consumed-samples", "0", "--world-size", world, *arguments, code=2)
    assert "batch size 16 must" in start["errors"][0]
    later = as_json(capsys, "--consumed-samples", "5_000_001", "--world-size", world, *arguments)
    assert not any("resume" in warning for warning in later["warnings"])


def test_a_run_without_load_is_planned_from_its_first_batch(capsys):
    ramp = [*SMALL, "--rampup-batch-size", "2", "2", "100"]
    assert "batch size 2 must" in as_json(capsys, "--world-size", "8", *ramp, code=2)["errors"][0]
    assert as_json(capsys, "--world-size", "8", *ramp, "--load", "somewhere")["errors"] == []


def test_text_report_has_the_derived_numbers(capsys):
    arguments, world = published("tr11-176B-ml")
    assert plan.main(["--world-size", world, "--at", "45000", "--", *arguments]) == 0
    text = capsys.readouterr().out
    for part in (
        "176,247,271,424",
        "384 processes = 4 tensor x 12 pipeline x 8 data",
        "192 (12), 208 (13), 224 (14), ... 113 more ..., 2048 (128)",
        "115,311",
        "450,560,000,000",
        "2,954.58",  # 18 bytes x 176B, in GiB
        "4.298E-05",
        "warning: ",
    ):
        assert part in text
    assert "error: " not in text


def test_report_describes_the_learning_rate(capsys):
    flags = "--lr-decay-style WSD --lr-wsd-decay-style 1-sqrt --lr-wsd-decay-iters 20 --lr 1e-3"
    warmup = "--lr-warmup-iters 10 --lr-warmup-init 1e-5 --train-iters 100"
    argv = [*SMALL, *flags.split(), *warmup.split(), "--global-batch-size", "8"]
    plan.main(["--world-size", "1", *argv])
    assert (
        "0.001 to 0, WSD, warm-up 80 samples from 1e-05, decay to 800 samples, minus_sqrt over the "
        "last 160"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "mean", "why", "changes"),
    [
        ("", "step", "", False),
        ("--goldfish-loss", "step", "the default of a new run", False),
        ("--goldfish-loss --calculate-per-token-loss", "step", "given by --calc", False),
        (
            "--goldfish-loss --use-flash-attn",
            "microbatch",
            "trainer that has the flag --use-flash",
            True,
        ),
    ],
)
def test_report_has_the_mean_of_the_loss(capsys, flags, mean, why, changes):
    argv = [*SMALL, *flags.split(), "--bf16"]
    plan.main(["--world-size", "1", "--search", *argv])
    text = capsys.readouterr().out
    # Without masked tokens all means are the same.
    assert why in text
    assert ("\nloss  " in text) == bool(why)
    assert ("another micro-batch size changes the loss" in text) == changes
    assert as_json(capsys, "--world-size", "1", *argv)["loss_mean"] == mean


def test_report_has_a_decoupled_rate(capsys):
    flags = "--lr-decay-style linear --decoupled-lr 4e-3 --decoupled-min-lr 1e-4"
    argv = ["--world-size", "1", "--at", "0", "50", "--", *SMALL, *flags.split()]
    plan.main(argv)
    text = capsys.readouterr().out
    assert "word embedding and output matrix: 0.004 to 0.0001" in text
    assert " decoupled\n" in text
    assert "2.050E-03\n" in text
    at = as_json(capsys, *argv)["at"]
    assert [row["decoupled_lr"] for row in at] == pytest.approx([4e-3, 2.05e-3])


@pytest.mark.parametrize(
    ("optimizer", "rule", "bytes_of_layer_matrix"),
    [("adam", "18 bytes", 18), ("ademamix", "22 bytes", 22), ("muon", "and 4 less", 14)],
)
def test_report_names_the_bytes_of_the_optimizer(capsys, optimizer, rule, bytes_of_layer_matrix):
    argv = ["--world-size", "1", *SMALL, "--bf16", "--optimizer", optimizer]
    plan.main(argv)
    assert rule in capsys.readouterr().out
    result = as_json(capsys, *argv)
    total = result["memory_bytes"]["model"]["total"]
    # Four layers of 12 h^2. All other parameters have the bytes of AdamW or AdEMAMix.
    matrices = 4 * 12 * 256**2
    other = 22 if optimizer == "ademamix" else 18
    expected = matrices * bytes_of_layer_matrix + (result["parameters"] - matrices) * other
    assert total == expected


def test_report_has_the_stages_and_the_pipeline_schedule(capsys):
    arguments, world = published("tr8-104B")
    assert plan.main(["--world-size", world, *arguments]) == 0
    text = capsys.readouterr().out
    for part in (
        "layers by stage       32 x 2\n",
        "978.3, 30 x 807.5, 954.6 by pipeline rank",
        "GPipe, 4 microbatches for 32 stages",
        "idle for 89 % of the time at batch size 16\n",
        "1F1B, 512 microbatches for 32 stages",
        "idle for 6 % of the time at batch size 2048\n",
        "32 microbatches in flight",
    ):
        assert part in text
    first, final = as_json(capsys, "--world-size", world, *arguments)["pipeline"]
    assert first["batch_size"] == 16
    assert first["microbatches"] == 4
    assert first["schedule"] == "GPipe"
    assert final["batch_size"] == 2048
    assert final["schedule"] == "1F1B"
    assert final["idle"] == pytest.approx(31 / 543)
    assert plan.main(["--world-size", "1", *SMALL]) == 0
    assert "stage" not in capsys.readouterr().out


def test_report_has_the_virtual_stages(capsys):
    virtual = [
        *SMALL,
        "--pipeline-model-parallel-size",
        "2",
        "--num-layers-per-virtual-pipeline-stage",
        "1",
    ]
    assert plan.main(["--world-size", "2", *virtual]) == 0
    text = capsys.readouterr().out
    assert "layers by stage       4 x 1, in 2 virtual stages on each rank" in text
    assert "interleaved 1F1B, 8 microbatches for 2 ranks of 2 virtual stages" in text
    assert "idle for 6 % of the time" in text
    assert "5 virtual stages in flight" in text
    result = as_json(capsys, "--world-size", "2", *virtual)
    assert result["layers_per_stage"] == [1, 1, 1, 1]
    assert len(result["parameters_by_pipeline_rank"]) == 2


def test_activation_memory_depends_on_pipeline_and_recomputation(capsys):
    def activations(*flags: str) -> tuple[int, int, int]:
        """Return (rank with the most memory, its activation bytes, those with scores)."""
        memory = as_json(
            capsys, "--world-size", "2", *SMALL, "--pipeline-model-parallel-size", "2", *flags
        )["memory_bytes"]
        return memory["pipeline_rank"], memory["activations"], memory["activations_with_scores"]

    shape = ModelShape(
        ModelConfig(4, hidden_size=256, num_attention_heads=4, seq_length=128), 1000, 1024
    )
    layer = plan_estimates.PaperActivations(shape, 2, half=False).layer
    kept = plan_estimates.PaperActivations(shape, 2, half=False).layer_input
    assert activations()[:2] == (0, 4 * layer)  # 2 layers, 2 microbatches in flight
    assert activations("--num-layers-per-virtual-pipeline-stage", "1")[:2] == (0, 5 * layer)
    # Recomputation keeps little, so the last rank needs the most memory because of its logits.
    logits = plan_estimates.PaperActivations(shape, 2).logits
    assert activations("--checkpoint-activations")[:2] == (1, 2 * kept + layer + logits)
    assert activations("--checkpoint-activations", "--checkpoint-fraction", "1/2")[:2] == (
        0,
        2 * (kept + layer) + layer,
    )
    rank, plain, scores = activations("--recompute-attention-core")
    assert rank == 0
    assert plain == scores
    assert activations()[2] > scores


def test_errors_are_printed_and_counted(capsys):
    argv = [
        "--world-size",
        "6",
        *SMALL,
        "--tensor-model-parallel-size",
        "3",
        "--skip-train-iteration-range",
        "5",
    ]
    assert plan.main(argv) == 2
    text = capsys.readouterr().out
    assert "error: --tensor-model-parallel-size 3 must divide" in text
    assert "use 1, 2 or 4" in text
    assert "error: --skip-train-iteration-range '5'" in text
    result = as_json(capsys, *argv, code=2)
    assert len(result["errors"]) >= 3


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 0",
        "--micro-batch-size 0",
        "--position-embedding-type rotary --no-rope-layers 4::4",
        "--sliding-window 64 --full-attention-layers 9",
    ],
)
def test_the_plan_is_shown_with_values_from_which_nothing_can_be_derived(capsys, flags):
    assert plan.main([*SMALL, *flags.split()]) == 2
    text = capsys.readouterr().out
    assert f"error: {' '.join(flags.split()[-2:])}" in text
    assert "FLOPs of the run" in text
    assert as_json(capsys, *SMALL, *flags.split(), code=2)["train_iters"] == 100


def test_unknown_flags_are_errors(capsys):
    assert plan.main([*SMALL, "--num-layerz", "3"]) == 2
    assert "--num-layerz" in capsys.readouterr().err
    result = as_json(capsys, *SMALL, "--num-layerz", "3", "--sedd", "1", code=2)
    assert len(result["errors"]) == 2
    assert result["parameters"] is None


def test_flags_override_a_yaml_file(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {num_layers: 4, hidden_size: 256, num_attention_heads: 4, seq_length: 128}\n"
        "batch: {micro_batch_size: 2, global_batch_size: 16, train_iters: 100}\n"
        "optimizer: {lr: 1e-3}\n"
        "tokenizer: {vocab_size: 1000}\n"
        "parallel:\n"
        "  tensor_model_parallel_size: 3\n"
    )
    result = as_json(capsys, "--world-size", "3", "--config", str(path), code=2)
    error = result["errors"][0].replace(f"{tmp_path}/", "")
    assert "--tensor-model-parallel-size 3 (run.yaml:6) must divide" in error
    for argv in (["--config", str(path)], [str(path)]):
        result = as_json(capsys, *argv, "--tensor-model-parallel-size", "2", "--world-size", "4")
        assert result["errors"] == []
        assert result["data_parallel_size"] == 2


def test_plan_reads_a_slurm_script(capsys):
    script = str(ROOT / "tests" / "fixtures" / "slurm" / "gpt-350M.slurm")
    result = as_json(capsys, script, "--at", "1000")
    assert result["errors"] == []
    assert result["world_size"] == 32
    assert result["data_parallel_size"] == 4
    assert any("$SCRATCH" in warning for warning in result["warnings"])
    assert as_json(capsys, script, "--world-size", "64")["data_parallel_size"] == 8
    assert (
        as_json(capsys, script, "--pipeline-model-parallel-size", "1")["data_parallel_size"] == 16
    )


def test_world_size_is_that_of_the_launcher_or_one_replica(capsys):
    launched = as_json(capsys, "torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *SMALL)
    assert launched["data_parallel_size"] == 4
    result = as_json(capsys, *SMALL, "--tensor-model-parallel-size", "2")
    assert result["world_size"] == 2
    assert result["data_parallel_size"] == 1
    assert any("--world-size is not given" in warning for warning in result["warnings"])


def test_flags_without_effect_are_a_list_of_their_own(capsys):
    flags = [*SMALL, "--manual-gc", "--ckpt-format", "torch_dist"]
    result = as_json(capsys, "--world-size", "1", "--", *flags)
    assert [text.split()[0] for text in result["flags_without_effect"]] == [
        "--manual-gc",
        "--ckpt-format",
    ]
    assert plan.main(["--world-size", "1", "--", *flags]) == 0
    _, _, listed = capsys.readouterr().out.partition("flags without effect:\n")
    assert listed.startswith("  --manual-gc has no effect here: ")


def test_an_iteration_after_the_end_is_a_warning(capsys):
    result = as_json(capsys, "--world-size", "1", "--at", "0", "101", "--", *SMALL)
    assert [state["consumed_samples"] for state in result["at"]] == [0, 1616]
    assert any("training has iterations 1 to 100" in warning for warning in result["warnings"])


@pytest.mark.parametrize("at", [["--at=-5"], ["--at", "10", "-5"]], ids=" ".join)
def test_negative_iteration_is_an_error(capsys, at: list[str]):
    result = as_json(capsys, "--world-size", "1", *at, "--", *SMALL, code=2)
    (error,) = result["errors"]
    assert "--at -5" in error
    assert "must be at least 0" in error


def test_plan_reads_the_curriculum_of_a_deepspeed_configuration(capsys, tmp_path):
    schedule = {"total_curriculum_step": 50, "difficulty_step": 8}
    block = {
        "enabled": True,
        "schedule_type": "fixed_linear",
        "min_difficulty": 16,
        "max_difficulty": 128,
        "schedule_config": schedule,
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"curriculum_learning": block}))
    more = [
        "--deepspeed",
        "--deepspeed_config",
        str(path),
        "--train-tokens",
        "150_000",
        "--lr-decay-tokens",
        "150_000",
    ]
    result = as_json(capsys, "--world-size", "1", "--at", "1", "50", "--", *SMALL, *more)
    assert result["errors"] == []
    assert result["at"][0]["consumed_tokens"] == 16 * 16
    assert result["at"][1]["consumed_tokens"] < 50 * 16 * 128
    assert plan.main(["--world-size", "1", "--", *SMALL, *more]) == 0
    out = capsys.readouterr().out
    assert "ends by tokens" in out
    assert re.search(
        r"^sequence length +fixed_linear from 16 to 128 tokens over 50 iterations in steps of 8$",
        out,
        re.MULTILINE,
    )
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "object, as in {...}, not list"),
    ):
        path.write_text(content)
        result = as_json(capsys, "--world-size", "1", "--", *SMALL, *more, code=2)
        assert message in result["errors"][0]


def test_plan_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, "tools/plan.py", "--world-size", "2", "--json", *SMALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data_parallel_size"] == 2


def test_report_has_the_epochs_of_the_training_data(capsys, corpus: str):
    # 100 iterations of 16 samples of 128 tokens.
    flags = [*SMALL, "--data-path", corpus, "--split", "1"]
    (use,) = as_json(capsys, "--", *flags)["training_data"]
    assert use["epochs"] == pytest.approx(100 * 16 * 128 / use["tokens"])
    more = as_json(capsys, "--", *flags, "--train-iters", "1000")
    assert "epochs. More than 4" in "".join(more["warnings"])
    plan.main(["--", *flags])
    assert f"{use['epochs']:.3g} epochs: 204,800 tokens asked" in capsys.readouterr().out


def test_data_that_are_not_on_this_machine_have_no_epochs(capsys):
    planned = as_json(capsys, "--", *SMALL, "--data-path", "/nowhere/corpus")
    assert planned["training_data"] == []
    assert "is not on this machine" in "".join(planned["warnings"])


SCRIPT = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:2
case $1 in
    small) LAYERS=4 ;;
    *) LAYERS=8 ;;
esac
cat <<EOT > "ds.$SLURM_JOB_ID.json"
{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
EOT
SAVE=$(mktemp -d)
srun python pretrain_gpt.py --num-layers $LAYERS --hidden-size 256 --num-attention-heads 4 \\
    --seq-length 128 --micro-batch-size 2 --global-batch-size 16 --train-iters $((10 * 10)) \\
    --lr $RATE --vocab-size 1000 --save $SAVE --deepspeed \\
    --deepspeed_config "ds.$SLURM_JOB_ID.json" 2>&1 | tee log
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    for name in ("RATE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.slurm"
    path.write_text(SCRIPT)
    return path


def test_branches_of_a_script_are_followed(capsys, script):
    large = as_json(capsys, str(script), "RATE=1e-3")
    assert large["train_iters"] == 100
    assert large["world_size"] == 2
    warnings = "\n".join(large["warnings"])
    assert "these need execution and stay as they are written: $(mktemp -d)" in warnings
    assert "ds." not in "\n".join(large["errors"])
    assert "is read with its branches and loops" in large["notes"][0]
    small = as_json(capsys, str(script), "RATE=1e-3", "small", "--train-iters", "50")
    assert small["parameters"] < large["parameters"]
    assert small["train_iters"] == 50
    assert list(script.parent.iterdir()) == [script]


def test_values_that_a_script_lacks_are_named_once_with_the_way_out(capsys, script):
    script.write_text(SCRIPT.replace("LAYERS=8", "LAYERS=$2"))
    assert plan.main([str(script), "--lr", "1e-3", "--num-layers", "4"]) == 0
    output = capsys.readouterr().out
    assert output.count("variables without a value here stay as they are written") == 1
    assert f"as in megatron-plan {script} --script-args 'RATE=VALUE'" in output
    assert "the script needs arguments: $1 (line 4), LAYERS ($2, line " in output
    # A script with its arguments has all of them.
    assert plan.main([str(script), "large", "8", "--lr", "1e-3"]) == 0
    assert "the script needs arguments" not in capsys.readouterr().out


def test_document_of_a_script_is_the_deepspeed_configuration(capsys, script):
    """The document's clipping contradicts the flag, so it was read."""
    assert plan.main([str(script), "--lr", "1e-3", "--clip-grad", "0.25"]) == 2
    assert "gradient_clipping" in capsys.readouterr().err


def test_a_script_that_cannot_be_followed_is_refused(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"f,g() {{ :; }}\npython pretrain_gpt.py {shlex.join(SMALL)}\n")
    assert plan.main([str(script)]) == 2
    assert "calls of the function 'f,g' cannot be followed; rename it" in capsys.readouterr().err


def test_a_script_that_ends_early_names_the_reason(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f": ${{NOWHERE:?}}\npython pretrain_gpt.py {shlex.join(SMALL)}\n")
    assert plan.main([str(script)]) == 0
    script.write_text(f": ${{NOWHERE[0]:?}}\npython pretrain_gpt.py {shlex.join(SMALL)}\n")
    assert plan.main([str(script)]) == 2
    assert "It checks a variable that is not set, as in ${NAME:?}" in capsys.readouterr().err


def test_a_negative_rate_is_one_error(capsys):
    assert as_json(capsys, *SMALL, "--lr", "-1e-3", code=2)["errors"] == [
        "--lr -0.001 must be above 0, and finite."
    ]


def test_script_arguments_need_a_script(capsys):
    assert plan.main(["--script-args", "-z 1", *SMALL]) == 2
    assert "--script-args needs a script" in capsys.readouterr().err


NEEDY = """#!/bin/bash
MODEL=$1
# $2 in a comment is no use
if [ $MODEL = large ]; then LAYERS=8; else LAYERS=4; fi
RATE=${2}
python pretrain_gpt.py --num-layers $LAYERS --hidden-size 256 --num-attention-heads 4 \\
    --seq-length 128 --micro-batch-size 2 --global-batch-size 16 --train-iters 100 \\
    --lr $RATE --vocab-size 1000 --save $3 ${4:-}
"""


def test_missing_arguments_of_a_script_are_one_error(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(NEEDY)
    report = as_json(capsys, str(script), code=2)
    errors = report["errors"]
    assert len(errors) == 1
    assert not any("needs arguments" in warning for warning in report["warnings"])
    assert "needs arguments: MODEL ($1, line 2), RATE ($2, line 5), $3 (line 8). Give" in errors[0]
    # Those that are given are not named.
    second = as_json(capsys, str(script), "--script-args", "small", code=2)["errors"]
    assert "the script needs arguments: RATE ($2, line 5), $3 (line 8). Give" in second[0]
    small = as_json(capsys, str(script), "--script-args", "small 1e-3 out")
    large = as_json(capsys, str(script), "large", "--script-args=1e-3 'out'")
    assert small["parameters"] < large["parameters"]
    # An argument that only names a file is no reason to refuse the plan.
    partly = as_json(capsys, str(script), "small", "1e-3")
    assert partly["parameters"] == small["parameters"]
    assert "$3 (line 8). Give all arguments" in "".join(partly["warnings"])


def test_arguments_that_a_script_counts_are_not_needed(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "STAGE=1\nif [ $# -gt 1 ]; then STAGE=$2; shift 2; fi\n"
        f"python pretrain_gpt.py {shlex.join(SMALL)} --zero-stage $STAGE $@\n"
    )
    plain = as_json(capsys, "--world-size", "2", str(script))
    assert plain["errors"] == []
    given = as_json(capsys, "--world-size", "2", str(script), "--script-args", "-z 3")
    assert given["memory_bytes"] != plain["memory_bytes"]


def test_missing_variables_of_a_script_are_one_error(capsys, tmp_path, monkeypatch):
    script = tmp_path / "run.sh"
    script.write_text(
        "if [ $SIZE = large ]; then LAYERS=8; elif [ $SIZE = small ]; then LAYERS=4; fi\n"
        "python pretrain_gpt.py --num-layers $LAYERS --hidden-size 256 --num-attention-heads 4 "
        "--seq-length 128 --micro-batch-size 2 --global-batch-size 16 --train-iters 100 "
        "--lr $RATE --vocab-size 1000 --save $OUT/x\n"
    )
    for name in ("SIZE", "RATE", "OUT"):
        monkeypatch.delenv(name, raising=False)
    errors = as_json(capsys, str(script), code=2)["errors"]
    assert len(errors) == 1
    assert "the script needs variables: $RATE, $SIZE. Give them" in errors[0]
    given = ["--script-args", "RATE=1e-3 SIZE=small"]
    assert as_json(capsys, str(script), *given)["errors"] == []


def test_only_variables_of_a_scheduler_are_shown_with_their_values(capsys, tmp_path, monkeypatch):
    script = tmp_path / "run.sh"
    script.write_text(
        f"python pretrain_gpt.py {shlex.join(SMALL)} --save $HF_TOKEN/x --load x/$SLURM_JOB_NAME "
        "--tensorboard-dir tb/$SLURM_JWT --wandb-exp-name ${WANDB_KEY:-none}\n"
    )
    for name in ("HF_TOKEN", "SLURM_JWT", "WANDB_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("SLURM_JOB_NAME", "gpt")
    target = tmp_path / "run.yaml"
    assert plan.main([str(script), "--write-config", str(target)]) == 0
    printed = capsys.readouterr()
    assert "secret" not in printed.out + printed.err + target.read_text()
    assert "$HF_TOKEN/x" in target.read_text()
    assert "x/gpt" in target.read_text()


def test_a_file_that_is_not_read_is_named_beside_the_missing_flags(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('source "$HOME/flags.sh"\npython pretrain_gpt.py $FLAGS --lr 1e-3\n')
    errors = as_json(capsys, str(script), code=2)["errors"]
    assert "--num-layers is required" in errors[0]
    assert 'not read: run.sh:1: source "$HOME/flags.sh". A file is read if' in errors[-1]
    (tmp_path / "flags.sh").write_text(f"FLAGS='{shlex.join(SMALL)}'\n")
    planned = as_json(capsys, str(script))
    assert planned["errors"] == []
    assert f"files that it sources: {tmp_path}/flags.sh." in planned["notes"][1]


def test_lists_of_any_length_give_short_messages(capsys, tmp_path):
    """The messages had 11,545 characters for a mixture of 110 commands."""
    script = tmp_path / "run.sh"
    many = range(300)
    script.write_text(
        f"for x in {' '.join(f'size{n}' for n in many)}; do\n"
        f"MIX=({' '.join(f'$(calc {n} ${{ROOT}}/en_web-{n}) ${{V{n}}}' for n in many)})\n"
        f"{' '.join(f'[ -f /data/{n} ] || exit 1;' for n in many)}\n"
        f"{' '.join(f'source /opt/{n}.sh;' for n in many)}\n"
        f"python pretrain_gpt.py {shlex.join(SMALL)} --data-path ${{MIX[@]}} "
        f"--timing-log-option {'x' * 5000} {' '.join(f'--wandb-{n} <path {n}>' for n in many)}\n"
        "done\n"
    )
    assert plan.main([str(script)]) == 2
    printed = capsys.readouterr()
    lines = (printed.out + printed.err).splitlines()
    assert max(map(len, lines)) <= 1300
    assert plan.main([*SMALL, "--valid-data-path", *(f"/data/corpus{n}" for n in many)]) == 2
    error = capsys.readouterr().err
    assert len(error) <= 1300
    assert "/data/corpus0 " in error
    assert "use --train-weighted-split-paths" in error


def test_the_name_of_a_script_gives_the_vocabulary_of_a_nameless_file(capsys, tmp_path):
    script = tmp_path / "pretrain_llama2_distributed.sh"
    flags = shlex.join(SMALL[: SMALL.index("--vocab-size")])
    script.write_text(
        f"python pretrain_gpt.py {flags} --tokenizer-type GPTSentencePieceTokenizer "
        "--tokenizer-model ./tmp/tokenizer.model\n"
    )
    planned = as_json(capsys, str(script))
    assert planned["assumed"][0] == "a vocabulary of 32,000 (--vocab-size)"
    assert "published vocabulary of 32000 (meta-llama/Llama-2-7b-hf" in "".join(planned["warnings"])
    other = script.rename(tmp_path / "pretrain_gpt_distributed.sh")
    assert "size of the vocabulary is not known" in as_json(capsys, str(other), code=2)["errors"][0]


def test_value_of_a_command_is_asked_for_with_its_flag(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        'N=100\npython pretrain_gpt.py --lr-decay-iters $(perl -e "print $N*2") '
        f"{shlex.join(SMALL)}\n"
    )
    errors = as_json(capsys, str(script), code=2)["errors"]
    assert len(errors) == 1
    assert "values of --lr-decay-iters need commands" in errors[0]
    assert f"megatron-plan {script} --lr-decay-iters VALUE" in errors[0]
    assert as_json(capsys, str(script), "--lr-decay-iters", "200")["errors"] == []


def test_notes_on_what_a_script_is_assumed_to_find_and_on_its_loop(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        'PROGRAM=/opt/pretrain_gpt.py\nif [ ! -f "$PROGRAM" ]; then echo none; exit 1; fi\n'
        "for length in {128..512..128}; do\n"
        f"  python $PROGRAM {shlex.join(SMALL)} --seq-length $length --save <path to the runs>/a\n"
        "done\n"
    )
    planned = as_json(capsys, str(script))
    notes = "\n".join(planned["notes"])
    assert '"$PROGRAM": assumed to exist' in notes
    assert "in the loop `for length in {128..512..128}`. This plan is of its first pass" in notes
    assert planned["world_size"] == 1
    assert "placeholders stay as they are written: <path to the runs>" in str(planned["warnings"])


@pytest.mark.parametrize("name", ["..", "ds/..", "$'a\\xff'.json", "x" * 300])
def test_document_may_have_any_name(capsys, tmp_path, name):
    script = tmp_path / "run.sh"
    script.write_text(
        f'cat > {name} <<E\n{{"gradient_clipping": 0.5}}\nE\n'
        f"python pretrain_gpt.py {shlex.join(SMALL)} --deepspeed --deepspeed_config {name}\n"
    )
    assert as_json(capsys, str(script))["errors"] == []


def test_messages_name_a_document_as_the_script_does(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        'cat > "$JOB/ds.json" <<E\n{"gradient_clipping": "x"}\nE\n'
        f"python pretrain_gpt.py {shlex.join(SMALL)} --deepspeed --deepspeed_config $JOB/ds.json\n"
    )
    assert plan.main([str(script), "JOB=/scratch/job"]) == 2
    errors = capsys.readouterr().err
    assert "/scratch/job/ds.json: gradient_clipping" in errors
    assert "plan-" not in errors


def test_data_that_cannot_be_read_are_no_error(capsys, monkeypatch):
    def refuse(*arguments, **named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(plan, "measure_training_data", refuse)
    assert as_json(capsys, "--", *SMALL, "--data-path", "corpus")["errors"] == []


THOUSAND = shlex.split(
    "--world-size 1024 --preset llama2-7b --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 1024 --train-iters 1000 --lr 3e-4 --bf16"
)


def test_on_1024_devices_hsdp_hides_its_communication_and_fsdp_does_not(capsys):
    """The numbers of docs/sharding.md."""
    found = as_json(capsys, *THOUSAND, "--grad-reduce-in-bf16")["communication"]
    assert found["compute_seconds"] == pytest.approx(0.27, abs=0.005)
    seconds = {name: times["seconds"] for name, times in found["strategies"].items()}
    assert list(seconds) == ["fsdp", "hsdp 8", "ddp", "ZeRO 1"]
    assert seconds["fsdp"] == pytest.approx(0.76, abs=0.005)
    assert seconds["hsdp 8"] == pytest.approx(0.21, abs=0.005)
    assert found["strategies"]["fsdp"]["inside_nodes"] == 0
    assert found["strategies"]["ddp"]["verdict"] == "does not fit"
    assert found["recommended"] == "--sharding-strategy hsdp --hsdp-shard-size 8"


def test_the_configured_groups_are_estimated(capsys):
    flags = "--sharding-strategy hsdp --hsdp-shard-size 16 --tensor-model-parallel-size 2"
    found = as_json(capsys, *THOUSAND, *flags.split())["communication"]
    assert list(found["strategies"]) == ["fsdp", "hsdp 16", "ddp", "ZeRO 1"]
    # A group of 16 data-parallel and 2 tensor-parallel ranks is on 4 nodes.
    assert found["strategies"]["hsdp 16"]["inside_nodes"] == 0


def test_a_script_says_how_many_ranks_a_node_has(capsys, tmp_path: Path):
    script = tmp_path / "run.sh"
    flags = "--global-batch-size 64 --sharding-strategy hsdp"
    script.write_text(
        f"torchrun --nnodes 4 --nproc-per-node 4 pretrain_gpt.py {shlex.join(SMALL)} {flags}\n"
    )
    assert as_json(capsys, str(script))["shard_size"] == 4
    assert as_json(capsys, "--ranks-per-node", "2", str(script))["shard_size"] == 2


def test_text_of_the_strategies(capsys):
    assert plan.main([*THOUSAND, "--sharding-strategy", "hsdp"]) == 0
    text = capsys.readouterr().out
    assert "ZeRO 3 in 128 copies of the model, each on 8 data-parallel ranks" in text
    assert re.search(r"recommended +--sharding-strategy hsdp --hsdp-shard-size 8", text)
    # One data-parallel rank sends nothing.
    assert plan.main(["--world-size", "1", *SMALL]) == 0
    assert "communication" not in capsys.readouterr().out


def test_the_recommended_strategy_has_a_short_step(capsys):
    """With many microbatches, stages 1 and 3 differ by more than what overlaps in one of them."""
    flags = shlex.split(
        "--world-size 64 --preset llama2-7b --micro-batch-size 1 --global-batch-size 1024 "
        "--train-iters 1000 --lr 3e-4 --bf16"
    )
    found = as_json(capsys, *flags)["communication"]
    assert found["recommended"] == "--zero-stage 1"
    seconds = {name: each["step_seconds"] for name, each in found["strategies"].items()}
    assert seconds["ZeRO 1"] < seconds["hsdp 8"] < seconds["fsdp"]
    # The search of all layouts agrees. It also finds faster ones with larger microbatches.
    searched = as_json(capsys, "--search", *flags)["search"]["fastest"]
    same = [each for each in searched if each["flags"].startswith("--micro-batch-size 1 --zero")]
    assert same[0]["flags"].endswith("--zero-stage 1")
    assert same[0]["seconds"] == pytest.approx(seconds["ZeRO 1"])


def test_few_nodes_need_no_copies(capsys):
    """ZeRO 1 fits, and its communication overlaps better than the all-reduce between copies."""
    flags = ["--seq-length", "4096", "--global-batch-size", "512", "--hardware", "h100"]
    found = as_json(capsys, *THOUSAND, "--world-size", "16", *flags)["communication"]
    assert found["recommended"] == "--zero-stage 1"
    # With less memory, the strategies of stage 3 are left.
    less = [*flags, "--device-memory-gib", "48"]
    found = as_json(capsys, *THOUSAND, "--world-size", "16", *less, code=4)["communication"]
    assert found["recommended"] == "--sharding-strategy hsdp --hsdp-shard-size 8"
    # HSDP would be faster, but it only may fit. In the end, FSDP is the only one that may.
    for gib, hsdp, fsdp in (("34", "may fit", "fits"), ("27", "does not fit", "may fit")):
        less[-1] = gib
        found = as_json(capsys, *THOUSAND, "--world-size", "16", *less, code=4)["communication"]
        assert found["recommended"] == "--sharding-strategy fsdp"
        assert found["strategies"]["hsdp 8"]["verdict"] == hsdp
        assert found["strategies"]["fsdp"]["verdict"] == fsdp


def test_a_node_without_ranks_is_refused(capsys):
    assert plan.main([*THOUSAND, "--ranks-per-node", "0"]) == 2
    assert "--ranks-per-node 0 must be from 1" in capsys.readouterr().err


SEVEN = shlex.split(
    "--preset llama2-7b --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 "
    "--bf16 --checkpoint-activations --data-path none"
)


@pytest.mark.parametrize(
    ("world", "flags", "gib", "verdict"),
    [
        # 18 bytes for each of 6.7 billion parameters.
        (1, "", 80, "does not fit"),
        (1, "", 125, "may fit"),
        (1, "", 180, "fits"),
        (8, "--zero-stage 3", 40, "fits"),
        (8, "--zero-stage 3", 16, "does not fit"),
    ],
)
def test_the_plan_says_whether_a_rank_fits_on_a_device(
    world: int, flags: str, gib: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--world-size", str(world), "--device-memory-gib", str(gib)]
    code = exit_codes.DOES_NOT_FIT if verdict == "does not fit" else exit_codes.SUCCESS
    assert plan.main([*argv, "--", *SEVEN, *flags.split()]) == code
    shown = capsys.readouterr().out
    shouted = verdict if verdict == "fits" else verdict.upper()
    assert f"of {gib:.1f} GiB, of which 90 % may be used: {shouted} (" in shown
    # What does not fit has no cost.
    assert ("predicted run         none, because" in shown) == (verdict == "does not fit")
    assert (" CO2e" in shown) == (verdict != "does not fit")
    assert plan.main(["--json", *argv, "--", *SEVEN, *flags.split()]) == code
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["verdict"] == verdict
    needed = cost["memory_bytes_by_pipeline_rank"][0]
    if world == 1:
        assert 18 * 6.7e9 < needed < 18 * 7.5e9
    assert cost["peak_bytes"] == needed
    assert cost["usable_bytes"] == 0.9 * gib * 2**30
    assert (cost["run"] is None) == (verdict == "does not fit")


def test_a_device_without_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--device-memory-gib", "0", "--", *SEVEN]) == 2
    assert "--device-memory-gib 0.0 must be from" in capsys.readouterr().err


TR11_LIKE = shlex.split(
    "--world-size 384 --hardware jean-zay-a100 --num-layers 70 --hidden-size 14336 "
    "--num-attention-heads 112 --seq-length 2048 --vocab-size 250880 --bf16 "
    "--position-embedding-type alibi --global-batch-size 2048 --micro-batch-size 2 --lr 6e-5 "
    "--train-samples 220_000_000 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 "
    "--pp-partition-method type:transformer|embedding --checkpoint-activations --zero-stage 1"
)


def test_the_predicted_cost_of_a_run(capsys):
    cost = as_json(capsys, *TR11_LIKE)["cost"]
    assert cost["hardware"] == "jean-zay-a100"
    assert 60 < cost["seconds_per_iteration"] < 105
    parts = cost["breakdown_seconds"]
    assert sum(parts.values()) == pytest.approx(cost["seconds_per_iteration"])
    assert parts["matrix products"] == max(parts.values())
    assert cost["verdict"] == "fits"
    assert len(cost["memory_bytes_by_pipeline_rank"]) == 12
    assert cost["mfu_causal"] < cost["mfu"] < 1
    run = cost["run"]
    assert run["days"] < run["days_with_failures"]
    assert run["device_hours"] == pytest.approx(24 * 384 * run["days_with_failures"])
    # A worse cluster needs longer, and a better grid emits less.
    worse = as_json(capsys, "--failures-per-1000-node-days", "65", *TR11_LIKE)["cost"]
    assert worse["goodput"]["useful"] < cost["goodput"]["useful"]
    assert worse["run"]["days_with_failures"] > run["days_with_failures"]
    clean = as_json(capsys, "--carbon-intensity", "30", *TR11_LIKE)["cost"]
    assert clean["run"]["tonnes"] == pytest.approx(run["tonnes"] / 10)


def test_the_text_of_the_predicted_cost(capsys):
    assert plan.main(TR11_LIKE) == 0
    text = capsys.readouterr().out
    assert re.search(r"predicted step +[\d.]+ s on jean-zay-a100", text)
    assert "is the default" not in text
    assert re.search(r"matrix products +[\d.]+ s +[\d.]+ % #{20,}", text)
    assert re.search(r"peak memory +[\d.]+ of 79.0 GiB, of which 90 % may be used: fits", text)
    assert "% with causal attention" in text
    assert "unused speed" not in text
    assert plan.main([*TR11_LIKE, "--no-gradient-accumulation-fusion"]) == 0
    assert "leave out --no-gradient-accumulation-fusion" in capsys.readouterr().out
    # One node fails rarely, and large numbers are whole.
    assert plan.main(["--world-size", "8", *SEVEN, "--train-iters", "100000"]) == 0
    assert "a failure every 3,692 hours" in capsys.readouterr().out


def test_one_stage_waits_for_no_other(tmp_path, capsys):
    """The seconds are sums in different orders, so they differ in the last bit."""
    mine = tmp_path / "mine.yaml"
    for share in ("0.7349", "0.7", "0.61"):
        mine.write_text(f"base: a100-80g\ngemm_share: {share}\n")
        words = ["--world-size", "64", "--hardware", str(mine), *SEVEN]
        parts = as_json(capsys, *words, "--global-batch-size", "1024")["cost"]["breakdown_seconds"]
        assert "pipeline" not in parts


LAPTOP = shlex.split(
    "--world-size 1 --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 "
    "--vocab-size 1000 --micro-batch-size 8 --global-batch-size 8 --train-iters 100 --lr 2e-3"
)


def test_a_plan_without_gpus_says_so_and_leaves_out_what_is_zero(capsys):
    for flags in (["--hardware", "cpu"], ["--distributed-backend", "gloo"]):
        assert plan.main([*LAPTOP, *flags]) == 0
        text = capsys.readouterr().out
        assert "on cpu, at batch size 8" in text
        assert "CPUs. The run has no GPU" in text
        for absent in ("a100", "GPU-hours", "e-0", "MWh", "CO2e", "goodput", "  0.0 %"):
            assert absent not in text
        assert re.search(r"predicted run +[\d.]+ seconds$", text, re.MULTILINE)
    assert plan.main(LAPTOP) == 0
    assert "no GPU" not in capsys.readouterr().out
    # A longer run has small costs, in small units.
    assert plan.main([*LAPTOP, "--hardware", "cpu", "--train-iters", "300000"]) == 0
    assert re.search(
        r"1\.\d+ hours, [\d.]+ Wh, [\d.]+ g CO2e$", capsys.readouterr().out, re.MULTILINE
    )


def test_flag_of_the_tool_after_the_training_command_is_explained(capsys):
    assert plan.main(["--", *SMALL, "--write_config", "x.yaml", "--at", "50", "--hiden", "3"]) == 2
    error = capsys.readouterr().err
    assert (
        "unknown flag --write_config; it is a flag of this tool, so write it before '--'." in error
    )
    assert "unknown flag --at; it is a flag of this tool, so write it before '--'." in error
    assert "unknown flag --hiden; perhaps you meant --hidden-size" in error


def test_fp32_needs_a_peak_of_its_own(tmp_path, capsys):
    assert plan.main(["--world-size", "1", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "predicted step" in printed
    assert "a100-80g is the default. Without a GPU, give --hardware cpu\n" in printed
    # A complete file of a user may lack the value.
    mine = tmp_path / "mine.yaml"
    known = vars(load_hardware("a100-80g"))
    kept = {key: known[key] for key in known if key != "fp32_tflops" and known[key] is not None}
    mine.write_text(yaml.safe_dump(kept))
    own = ["--world-size", "1", "--hardware", str(mine)]
    assert plan.main([*own, *SMALL]) == 0
    assert "no prediction: a100-80g has no fp32_tflops" in capsys.readouterr().out
    assert plan.main([*own, "--search", *SMALL]) == 2
    assert "has no fp32_tflops, which the prediction of a run in fp32" in capsys.readouterr().err


def test_a_model_that_is_too_large_does_not_fit(capsys):
    words = shlex.split(
        "--world-size 8 --preset llama2-70b --bf16 --train-iters 9 --lr 1e-4 --seq-length 4096 "
        "--global-batch-size 8 --micro-batch-size 1"
    )
    assert plan.main(words) == exit_codes.DOES_NOT_FIT
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_search_of_a_plan(capsys):
    found = as_json(capsys, "--search", *TR11_LIKE)["search"]
    best = found["fastest"][0]
    assert best["verdict"] == "fits"
    assert best["seconds"] <= found["configured"]["seconds"]
    # The flags choose the layout that was found: the plan of it has the predicted time. They undo
    # those of the command.
    again = as_json(capsys, *TR11_LIKE, *shlex.split(best["flags"]))["cost"]
    assert again["seconds_per_iteration"] == pytest.approx(best["seconds"])
    assert max(again["memory_bytes_by_pipeline_rank"]) == pytest.approx(best["peak_bytes"])


def test_layouts_that_only_may_fit_are_marked(capsys):
    # The layout of the command needs 40.3 GiB, and that of --explain 33.5, which is 93 % of 36.
    words = ["--world-size", "8", *SEVEN, "--no-checkpoint-activations", "--sequence-parallel"]
    words += ["--device-memory-gib", "36"]
    assert plan.main(["--explain", "tp=2,micro-batch=2", *words]) == 0
    text = capsys.readouterr().out
    assert re.search(r"[\d,]+ layouts on 8 devices with 36 GiB", text)
    assert re.search(r" \d+ fit: at most 32.4 GiB, which is 90 % \(--usable-share\)", text)
    found = text[text.index("s/iteration") : text.index("flags of the first")].splitlines()
    rows = [line for line in found if re.match(r" +[\d.]+ +[\d.]+ \w+ +[\d.]+ +\d+ % ", line)]
    marked = [row.endswith("MAY FIT") for row in rows]
    # Those that fit come first.
    assert marked == sorted(marked)
    assert not marked[0]
    assert marked[-1]
    # The others tell what they gain.
    assert re.search(r"MAY FIT\n +[\d.]+ s faster", text)
    for heading, mark in (("the layout that is given:", "DOES NOT FIT"), ("explained:", "MAY FIT")):
        assert text[text.index(heading) :].splitlines()[1].endswith(mark)
    # With all of the memory, nothing is left outside of the margin.
    assert plan.main(["--search", "--usable-share", "1", *words]) == 0
    assert "\n  0 may fit" in capsys.readouterr().out


def test_a_search_without_a_fit_names_the_need_and_enough_devices(capsys):
    words = ["--search", "--world-size", "8", *SEVEN, "--global-batch-size", "96"]
    words += ["--device-memory-gib", "8"]
    assert plan.main(words) == exit_codes.DOES_NOT_FIT
    text = capsys.readouterr().out
    found = re.search(
        r"none fits: the smallest need is ([\d.]+) GiB, ([\d.]+) too much. (\d+) devices would do",
        text,
    )
    assert found is not None
    assert float(found[1]) - float(found[2]) == pytest.approx(0.9 * 8, abs=0.06)
    least = text[text.index("the layout that needs least") :].splitlines()[1]
    # The columns are seconds, days, GiB. A layout that does not fit has no days.
    assert least.split()[1:3] == ["-", found[1]]
    assert re.search(r"DOES NOT FIT$", text, re.MULTILINE)
    words[words.index("8")] = found[3]
    larger = as_json(capsys, *words)["search"]
    assert larger["fastest"][0]["verdict"] == "fits"
    assert larger["enough_devices"] is None


@pytest.mark.full
def test_a_search_without_a_fit_on_any_number_of_devices(capsys):
    words = ["--search", "--world-size", "8", *SEVEN, "--global-batch-size", "96"]
    words += ["--device-memory-gib", "0.1"]
    # No number of devices shards the 7B to a tenth of a GiB.
    assert plan.main(words) == exit_codes.DOES_NOT_FIT
    assert "No number of devices was found that helps" in capsys.readouterr().out


def test_a_search_has_the_days_of_its_layouts(capsys):
    report = as_json(capsys, "--search", *TR11_LIKE)
    found = report["search"]
    for each in (*found["fastest"], found["configured"]):
        assert each["days"] == pytest.approx(
            each["seconds"] * report["train_iters"] / 86400, rel=1e-3
        )
    assert found["configured"]["days"] == pytest.approx(report["cost"]["run"]["days"])


def test_virtual_stages_are_one_entry(capsys):
    words = shlex.split(
        "--search --world-size 8 --hardware h100 --preset llama3-8b --bf16 --train-samples 250000 "
        "--lr 1e-4 --micro-batch-size 1 --global-batch-size 128 --pipeline-model-parallel-size 2"
    )
    found = as_json(capsys, *words)["search"]
    layouts = [re.sub(r" \d+ virtual stages", "", each["layout"]) for each in found["fastest"]]
    # After ten that fit, there may be others that may fit.
    assert len(set(layouts)) == len(layouts) >= 10
    assert any(len(each["other_virtual_stages"]) > 2 for each in found["fastest"])
    assert plan.main(words) == 0
    assert re.search(r"\(or [\d, ]+ virtual stages\)", capsys.readouterr().out)


def test_deepspeed_is_predicted_with_the_stage_that_it_runs(capsys):
    """DeepSpeed runs stage 0 as stage 1, so the optimizer states are sharded."""
    arguments, world = published("tr11-176B-ml")
    words = ["--world-size", world, "--hardware", "jean-zay-a100", *arguments]
    asked = as_json(capsys, *words)
    sharded = as_json(capsys, *words, "--zero-stage", "1")
    assert asked["memory_bytes"] == sharded["memory_bytes"]
    assert asked["cost"] == sharded["cost"]
    assert plan.main(words) == 0
    assert "8 data; ZeRO 1" in capsys.readouterr().out


def test_the_flags_of_the_search_undo_kept_operators(capsys):
    """They are kept in the recomputation of layers only, and are an error without it."""
    words = [*TR11_LIKE, "--checkpoint-activations", "--checkpoint-keep-operators", "matmul"]
    found = as_json(capsys, "--search", *words)["search"]["fastest"]
    plain = next(each for each in found if "--no-checkpoint-activations" in each["flags"])
    again = as_json(capsys, *words, *shlex.split(plain["flags"]))["cost"]
    assert again["seconds_per_iteration"] == pytest.approx(plain["seconds"])


def test_json_of_explain_has_the_parts_of_both_steps(capsys):
    found = as_json(capsys, "--explain", "tp=8,pp=6,micro-batch=2,recompute=full", *TR11_LIKE)
    search = found["search"]
    assert "TP 8 PP 6 DP 8 micro-batch 2 full" in search["explained"]["layout"]
    parts = search["seconds_by_part"]
    assert sum(parts["explained"].values()) == pytest.approx(search["explained"]["seconds"])
    assert sum(parts["fastest"].values()) == pytest.approx(search["fastest"][0]["seconds"])
    assert parts["explained"].keys() == parts["fastest"].keys()
    assert parts["explained"]["recomputation"] > parts["fastest"]["recomputation"]
    # The command has no sequence parallelism, and every layout of the search with TP has it.
    assert "--sequence-parallel" not in search["configured"]["flags"]
    assert "--sequence-parallel" in search["fastest"][0]["flags"]
    assert as_json(capsys, "--explain", "tp=x", *TR11_LIKE, code=2)["errors"]
    # The text explains why the two differ.
    assert plan.main(["--explain", "micro-batch=4", *TR11_LIKE]) == 0
    assert "Add it to the command" in capsys.readouterr().out
    assert plan.main(["--explain", "tp=1", *TR11_LIKE]) == 0
    assert "Add it to the command" not in capsys.readouterr().out


def test_explain_keeps_the_groups_of_hsdp(capsys):
    words = ["--json", *THOUSAND, "--sharding-strategy", "hsdp"]
    fewer = ["--world-size", "128", "--global-batch-size", "512", "--explain", "micro-batch=2"]
    assert plan.main([*words, *fewer]) == 0
    search = json.loads(capsys.readouterr().out)["search"]
    assert search["explained"]["layout"].endswith("DP 128 micro-batch 2 ZeRO 3 on 8")
    # 8 ranks cannot divide 4 data-parallel ones.
    assert plan.main([*words, "--explain", "tp=16,pp=16"]) == 0
    search = json.loads(capsys.readouterr().out)["search"]
    assert search["explained"]["layout"] == "TP 16 PP 16 DP 4 micro-batch 1 ZeRO 3"


def test_json_of_a_trace_that_is_too_long_is_one_document(capsys):
    words = [*TR11_LIKE, "--global-batch-size", "20480", "--trace", "t.json"]
    assert "use a smaller" in as_json(capsys, *words, code=2)["errors"][0]


def test_mfu_of_the_search_is_that_of_the_plan(capsys):
    """In fp32 it refers to the peak of fp32."""
    words = ["--world-size", "8", "--hardware", "a100", *SMALL]
    assert plan.main(["--search", *words]) == 0
    text = capsys.readouterr().out
    mfu = re.search(r"MFU +([\d.]+) % with full", text)
    candidate = text[text.index("the layout that is given:") :].splitlines()[1].split()
    assert mfu is not None
    assert candidate[6] == mfu[1]


def test_bf16_on_a_device_without_it_is_reported(capsys, tmp_path):
    for name, reported in (("v100-32g", True), ("a100", False)):
        for precision in ("--bf16", "--fp16"):
            assert plan.main(["--world-size", "8", "--hardware", name, *SMALL, precision]) == 0
            printed = "does not compute in bf16" in capsys.readouterr().out
            assert printed == (reported and precision == "--bf16")
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: v100-32g\nhas_bf16: true\n")
    assert plan.main(["--world-size", "8", "--hardware", str(mine), *SMALL, "--bf16"]) == 0
    assert "does not compute in bf16" not in capsys.readouterr().out
    mine.write_text("base: v100-32g\nhas_bf16: 1\n")
    assert plan.main(["--world-size", "8", "--hardware", str(mine), *SMALL, "--bf16"]) == 2
    assert "has_bf16 is '1'; it must be true or false" in capsys.readouterr().err


def test_flags_of_tensor_ranks_change_nothing_for_one(capsys):
    """They shard over the tensor-parallel ranks."""
    words = ["--world-size", "8", "--bf16", "--checkpoint-activations", *SMALL]
    alone = as_json(capsys, *words)["cost"]
    for flag in ("--sequence-parallel", "--partition-activations"):
        changed = as_json(capsys, *words, flag)["cost"]
        assert changed["memory_bytes_by_kind"] == alone["memory_bytes_by_kind"]
        assert changed["seconds_per_iteration"] == alone["seconds_per_iteration"]


def test_explain_keeps_sequence_parallelism_of_a_command_without_tp(capsys):
    words = ["--world-size", "8", "--bf16", *SMALL, "--sequence-parallel"]
    assert plan.main([*words, "--explain", "tp=2"]) == 0
    text = capsys.readouterr().out
    explained = text[text.index("explained:") :].splitlines()[1]
    assert "TP 2" in explained
    assert "sequence-parallel" in explained
    assert "Add it to the command" not in text


def test_explain_says_why_a_layout_loses(capsys):
    assert plan.main(["--explain", "tp=8,pp=6,micro-batch=2,recompute=full", *TR11_LIKE]) == 0
    text = capsys.readouterr().out
    assert "TP 8 PP 6 DP 8 micro-batch 2 full recomputation" in text
    assert re.search(r"recomputation +[\d.]+ +[\d.]+ +\+[\d.]+", text)
    assert re.search(r"tensor-parallel communication \+[\d.]+ s", text)
    assert plan.main(["--explain", "tp=2,pp=3,micro-batch=4,recompute=none", *TR11_LIKE]) == 0
    assert re.search(r"does not fit: [\d,.]+ GiB too much", capsys.readouterr().out)


def test_an_explained_layout_keeps_the_groups_of_the_command(capsys):
    words = ["--world-size", "16", *SMALL, "--bf16", "--micro-batch-size", "1"]
    words += ["--sharding-strategy", "hsdp", "--hsdp-shard-size", "4"]
    for text, expected in (("recompute=full", "on 4"), ("tp=2", "on 4"), ("pp=4,tp=2", "ZeRO 3")):
        explained = as_json(capsys, "--explain", text, *words)["search"]["explained"]
        assert explained["layout"].endswith(expected)


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--explain", "tp=5"], "must divide the number of processes, 384"),
        (["--explain", "tp=3,pp=1"], "must divide --num-attention-heads 112"),
        (["--explain", "tp=4,pp=12,tp=8"], "tp is given twice"),
        (["--explain", "pp=2,virtual=17"], "pp x virtual = 34 must divide"),
        (["--explain", "pp=1,virtual=2"], "need a pipeline"),
        (["--explain", "tp=1" + 5000 * "0"], "must be a whole number from 1 to 999,999,999"),
        (["--json", "--explain", "tp=5"], "must divide the number of processes, 384"),
        (["--explain", "zero=3", "--deepspeed"], "DeepSpeed's PipelineModule"),
        (["--explain", "tp=1,pp=96"], "must not exceed --num-layers"),
        (["--explain", "dp=5"], "'dp' is not a part of a layout"),
        (["--explain", "tp=x"], "tp is 'x'"),
        (["--explain", "recompute=1/0"], "recompute is '1/0'"),
        (["--explain", "micro-batch=3"], "must be divisible by"),
        (["--explain", "zero=4"], "ZeRO has the stages 0 to 3"),
        (["--hardware", "h101"], "neither a known name nor a file"),
        (["--pue", "nan"], "--pue nan must be from"),
        (["--restart-minutes", "1e300"], "--restart-minutes 1e+300 must be from"),
        (["--restart-minutes", "1e9"], "makes no progress"),
        (["--device-memory-gib", "1e300"], "--device-memory-gib 1e+300 must be from"),
        (["--usable-share", "1.1"], "--usable-share 1.1 must be from 1e-09 to 1"),
        (["--ranks-per-node", "10000000000"], "--ranks-per-node 10000000000 must be from"),
        (["--at", "10000000000000"], "at most 10,000,000 iterations are forecast"),
        (["--trace", "t.json"], "use a smaller --global-batch-size"),
    ],
)
def test_what_is_wrong_with_a_question_about_cost(capsys, words, phrase):
    small = [*TR11_LIKE, "--global-batch-size", "20480"] if "--trace" in words else TR11_LIKE
    assert plan.main([*small, *words]) == 2
    assert phrase in capsys.readouterr().err


def test_the_trace_of_a_step(capsys, tmp_path: Path):
    trace = tmp_path / "folder" / "out.json"
    words = ["--global-batch-size", "256", "--trace", str(trace)]
    cost = as_json(capsys, *TR11_LIKE, *words)["cost"]
    found = json.loads(trace.read_text())
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    # 16 microbatches, forward and backward, on 12 ranks, and the two parts after them.
    assert len([span for span in spans if span["cat"] in ("forward", "backward")]) == 2 * 16 * 12
    end = max(span["ts"] + span["dur"] for span in spans)
    assert end / 1e6 == pytest.approx(cost["seconds_per_iteration"])
    for rank in range(12):
        row = sorted(
            (span["ts"], span["ts"] + span["dur"]) for span in spans if span["tid"] == rank
        )
        # Spans of a row must not overlap, or Perfetto nests them.
        assert all(later[0] >= earlier[1] - 1e-3 for earlier, later in pairwise(row))


def test_a_trace_that_cannot_be_written_leaves_nothing(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = [*SMALL, "--world-size", "2", "--bf16"]
    (tmp_path / "file").write_text("old")
    for path in (tmp_path / "file" / "out.json", Path("/dev/null"), tmp_path):
        assert plan.main([*words, "--trace", str(path)]) == 2
        assert f"--trace {path}: " in capsys.readouterr().err
    # A full disk is noticed when the bytes are synced. What was there stays.
    out = tmp_path / "out.json"
    out.write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megatron.base.durable.os.fsync", fail)
    assert plan.main([*words, "--trace", str(out)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out.json"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--vocab-size", "1" + 400 * "0"),
        ("--seq-length", "1" + 400 * "0"),
        ("--micro-batch-size", "1" + 400 * "0"),
        ("--hidden-size", "4" + 200 * "0"),
        ("--num-layers", "1" + 20 * "0"),
        ("--checkpoint-fraction", "1e400"),
    ],
)
def test_a_wild_size_is_an_error_of_the_plan(capsys, flag, value):
    words = ["--world-size", "1", *SMALL, "--bf16", "--checkpoint-activations", flag, value]
    assert plan.main(words) == 2
    assert re.search(rf"error: .*{flag} .* must be", capsys.readouterr().out)


PLANNED = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:2
cat <<EOT > ds.json
{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
EOT
srun python pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --swiglu \\
    --seq-length 128 --batch-size 2 --global-batch-size 16 --train-iters 100 --lr 1e-3 \\
    --vocab-size 1000 --clip-grad 0.5 --save $OUT/run --deepspeed --deepspeed_config ds.json
"""


def test_written_configuration_is_the_planned_one(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    script = tmp_path / "run.sh"
    script.write_text(PLANNED)
    file = tmp_path / "run.yaml"
    notes = as_json(capsys, str(script), "--write-config", str(file))["notes"]
    loaded = load_config(["--config", str(file)])
    assert f"has the digest {compute_config_digest(loaded.config)}." in notes[-1]
    assert loaded.config.model.ffn_hidden_size == 640
    assert loaded.config.parallel.deepspeed_config == str(tmp_path / "run.deepspeed.json")
    document = json.loads((tmp_path / "run.deepspeed.json").read_text())
    assert document["gradient_clipping"] == 0.5
    text = file.read_text()
    assert "# Replace before training: $OUT" in text
    assert "  micro_batch_size: 2  # --batch-size" in text
    # Each value differs from its default, and the comment has its origin.
    fields = {field.dotted: field for field in all_fields().values()}
    written = {
        f"{group}.{name}": value
        for group, values in yaml.safe_load(text).items()
        for name, value in values.items()
    }
    assert len(written) > 12
    assert [d for d in written if getattr_dotted(loaded.config, d) == fields[d].default] == []
    assert text.count("  # ") == len(written)
    # An existing file is kept.
    assert plan.main([str(script), "--write-config", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text() == text


def getattr_dotted(config, dotted: str):
    group, _, name = dotted.partition(".")
    return getattr(getattr(config, group), name)


def test_default_that_other_values_would_change_is_written(capsys, tmp_path):
    """--use-bnb-optimizer turns the norm of the embedding on, unless a value is given."""
    file = tmp_path / "run.yaml"
    as_json(
        capsys,
        *("--write-config", str(file), "--", *SMALL, "--use-bnb-optimizer"),
        *("--deepspeed", "--no-embed-layernorm"),
    )
    assert "embed_layernorm: false  # --no-embed-layernorm" in file.read_text()
    assert not load_config(["--config", str(file)]).config.model.embed_layernorm


def test_plan_with_errors_is_not_written(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    assert plan.main(["--world-size", "3", "--write-config", str(file), *SMALL]) == 2
    assert not file.exists()


def test_a_dry_run_of_fused_gradients_needs_a_newer_torch(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.12.1+cpu")
    words = ["--dry-run", "--world-size", "1", *SMALL, "--bf16", "--gradient-accumulation-fusion"]
    assert plan.main(words) == 2
    assert "needs torch 2.13 or newer, and this is 2.12.1+cpu" in capsys.readouterr().err


def test_goodput_is_that_of_the_interval_of_saves(capsys):
    """A long interval repeats more steps after a failure, and the report warns about it."""
    found = {}
    for flags in ((), ("--save-interval", "20000"), ("--save-interval-time", "90m")):
        often = ["--world-size", "8", "--failures-per-1000-node-days", "800"]
        arguments = [*often, *SEVEN, "--train-iters", "100000", *flags]
        cost = as_json(capsys, *arguments)["cost"]
        assert plan.main(arguments) == 0
        found[flags] = cost, capsys.readouterr().out
    free, long, timed = found.values()
    best = free[0]["best_goodput"]
    assert free[0]["goodput"] == best
    assert all(cost["best_goodput"] == best for cost, _ in found.values())
    seconds = long[0]["goodput"]["save_interval_seconds"]
    assert seconds == pytest.approx(20000 * long[0]["seconds_per_iteration"])
    assert timed[0]["goodput"]["save_interval_seconds"] == 5400
    assert long[0]["goodput"]["useful"] < timed[0]["goodput"]["useful"] < best["useful"]
    run = long[0]["run"]
    useful = long[0]["goodput"]["useful"]
    assert run["days_with_failures"] == pytest.approx(run["days"] / useful)
    assert "more time than the best one. Give --save-interval" in long[1]
    assert "save every 20,000 iterations" in long[1]
    assert "best one" not in free[1]


def test_goodput_under_replayed_failures(capsys):
    """The formula has the same rate of failures. Lost nodes cost more than a restart."""
    run = ["--world-size", "512", "--hardware", "h100", *SEVEN, "--global-batch-size", "512"]
    run += ["--train-iters", "1000000", "--save-interval", "10000", "--failures", "llama3"]
    cost = as_json(capsys, *run)["cost"]
    shares = cost["replay_of_failures"]["shares"]
    assert shares["useful"] == pytest.approx(cost["goodput"]["useful"], abs=0.01)
    assert cost["best_goodput"]["useful"] > cost["goodput"]["useful"]
    spare = as_json(capsys, *run, "--spare-nodes", "4")["cost"]["replay_of_failures"]
    assert spare["shares"]["waiting"] > 0
    others = spare["other_policies"]
    assert others["one more spare"] > spare["shares"]["useful"]
    assert others["fewer nodes"] > spare["shares"]["useful"]
    assert plan.main([*run, "--spare-nodes", "4", "--detection-minutes", "5"]) == 0
    text = capsys.readouterr().out
    assert "  causes              faulty GPU 3" in text
    assert "  detection in half   " in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--spare-nodes", "2"], "need --failures"),
        (["--failures", "llama3", "--fewer-nodes", "1"], "needs --spare-nodes"),
        (["--failures", "llama3", "--spare-nodes", "1", "--fewer-nodes", "9"], "the 1 nodes"),
        (["--failures", "llama3", "--spare-nodes", "1000000"], "at most 1,000,000 nodes"),
        (["--failures", "llama9"], "give llama3, or a JSON file"),
    ],
)
def test_replays_that_are_refused(capsys, flags, message):
    assert plan.main([*flags, "--world-size", "8", *SEVEN]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["150000", "2000000"])
def test_a_run_that_hardly_reaches_a_save_has_no_days(capsys, interval):
    """The other numbers of the plan are still printed."""
    often = ["--world-size", "8", "--failures-per-1000-node-days", "8000"]
    arguments = [*often, *SEVEN, "--train-iters", "2000000", "--save-interval", interval]
    cost = as_json(capsys, *arguments)["cost"]
    assert cost["goodput"] is None
    assert cost["run"] is None
    assert 0.5 < cost["best_goodput"]["useful"] < 1
    assert plan.main(arguments) == 0
    text = capsys.readouterr().out
    assert "goodput               0.0 %" in text
    assert f"save every {int(interval):,} iterations" in text
    assert "hardly a save comes before a failure, and the run does not end. Give" in text
    assert "days with failures" not in text
