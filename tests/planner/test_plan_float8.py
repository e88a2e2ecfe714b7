"""tools/plan.py with float8, and with ranks that share a sequence."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.commands import plan

SMALL = shlex.split(
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-3 --vocab-size 1000 "
    "--bf16 --tensor-model-parallel-size 2"
)
FLOAT8 = shlex.split("--fp8-format hybrid --fp8-recipe tensorwise")
OWN = ["--world-size", "4", "--hardware", "h100"]


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert plan.main(["--json", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_command_a_yaml_file_and_a_script_have_the_same_prediction(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cost = as_json(capsys, *OWN, "--", *SMALL, *FLOAT8)["cost"]
    parts = cost["breakdown_seconds"]
    assert parts["float8: rounding"] > parts["float8: messages"] > 0
    assert sum(parts.values()) == pytest.approx(cost["seconds_per_iteration"])
    text = tmp_path / "run.yaml"
    assert plan.main([*OWN, "--write-config", str(text), "--", *SMALL, *FLOAT8]) == 0
    report = capsys.readouterr().out
    assert "tensorwise, transformer layers 1 to 4" in report
    assert "are those of bf16" not in report
    assert as_json(capsys, *OWN, str(text))["cost"] == cost
    script = tmp_path / "run.slurm"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\n"
        f"srun torchrun --nproc-per-node 4 pretrain_gpt.py {shlex.join([*SMALL, *FLOAT8])}\n"
    )
    found = as_json(capsys, "--hardware", "h100", "--ranks-per-node", "8", str(script))["cost"]
    assert found == cost


def test_layers_and_matrices_that_are_left_out_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*SMALL, *FLOAT8, "--ffn-hidden-size", "8008", "--first-last-layers-bf16"]
    assert plan.main([*OWN, "--", *words]) == 0
    text = capsys.readouterr().out
    assert "tensorwise, transformer layers 2 to 3; not in float8" in text
    assert "2,048 x 8,008, 8,008 x 2,048" in text


@pytest.mark.parametrize(
    ("own", "more", "row"),
    [
        (["--hardware", "a100"], [], "a100-80g has no float8 products"),
        (["--hardware", "h100"], ["--fp8-emulate"], "emulated"),
    ],
)
def test_without_products_in_float8_the_prediction_is_that_of_bf16(
    capsys: pytest.CaptureFixture[str], own: list[str], more: list[str], row: str
) -> None:
    words = ["--world-size", "4", *own, "--", *SMALL]
    plain = as_json(capsys, *words)["cost"]
    assert as_json(capsys, *words, *FLOAT8, *more)["cost"] == plain
    assert plan.main([*words, *FLOAT8, *more]) == 0
    assert f"float8              {row}" in capsys.readouterr().out


def test_the_search_proposes_float8_if_it_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    # Long products gain more than rounding costs.
    wide = [*SMALL, "--hidden-size", "16384", "--num-attention-heads", "128", "--num-layers", "1"]
    words = [*wide, "--micro-batch-size", "2"]
    plain = as_json(capsys, *OWN, "--search", "--", *words)["search"]["fastest"]
    assert all("--fp8-format" not in each["flags"] for each in plain)
    assert plan.main([*OWN, "--allow-fp8", "--", *words]) == 0
    text = capsys.readouterr().out
    assert "--fp8-format hybrid --fp8-recipe tensorwise" in text
    assert "float8 changes the numbers of this run" in text
    best = as_json(capsys, *OWN, "--allow-fp8", "--", *words)["search"]["fastest"][0]
    again = as_json(capsys, *OWN, "--", *words, *shlex.split(best["flags"]))["cost"]
    assert again["seconds_per_iteration"] == pytest.approx(best["seconds"])
    assert best["seconds"] < plain[0]["seconds"]
    assert plan.main([*OWN, "--allow-fp8", "--hardware", "a100", "--", *words]) == 2
    assert "a100-80g has no float8 products" in capsys.readouterr().err


def explain(capsys: pytest.CaptureFixture[str], text: str, *words: str) -> dict[str, Any]:
    """Return the parts of both steps, after checking that they are the steps."""
    search = as_json(capsys, *OWN, "--explain", text, "--", *SMALL, *words)["search"]
    parts = search["seconds_by_part"]
    assert sum(parts["explained"].values()) == pytest.approx(search["explained"]["seconds"])
    assert sum(parts["fastest"].values()) == pytest.approx(search["fastest"][0]["seconds"])
    assert parts["explained"].keys() == parts["fastest"].keys()
    return parts


def test_explain_names_float8_and_the_ranks_that_send_messages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = explain(capsys, "tp=2")["explained"]
    assert "tensor-parallel communication" in plain
    assert not any(name.startswith("float8") for name in plain)
    rounded = explain(capsys, "tp=2,recompute=full", *FLOAT8)["explained"]
    assert rounded["float8: rounding"] > 0
    assert rounded["float8: messages"] > 0
    # A recomputed layer sends the messages of its forward pass again.
    once = explain(capsys, "tp=2", *FLOAT8)["explained"]
    assert rounded["float8: messages"] == pytest.approx(1.5 * once["float8: messages"], rel=0.02)
    both = explain(capsys, "tp=2,cp=2")["explained"]
    assert both["tensor- and context-parallel communication"] > 0
    shared = ["--tensor-model-parallel-size", "1", "--context-parallel-size", "4"]
    assert plan.main([*OWN, "--search", "--", *SMALL, *shared]) == 0
    text = capsys.readouterr().out
    assert "tensor-parallel communication" not in text
