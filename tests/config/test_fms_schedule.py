"""Command lines of fms-fsdp train with the learning rates of its main_training_llama.py.

Its schedule there, for x finished steps of N, with a warm-up of w = min(2000, N // 20) steps:

    initial    min(1 - (1 - min(x, w) / w)^2, 0.1 + 0.5 (1 - 0.1) (1 + cos(pi min(x, N) / N)))
    annealing  1 - x / N
"""

import json
import math
import shlex
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.commands.plan import main
from megatron.config.fields import LoadedConfig
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

COMPLETE = (
    "--model_variant=llama3_194m_4k --ckpt_load_path=runs/a --ckpt_save_path=runs/a "
    "--data_path=data --seq_length=4096 --batch_size=2 --num_steps=1000 --learning_rate=3e-4 "
    "--sharding_strategy=fsdp --training_stage=initial"
)

BY_HAND = {
    0: 0.0,
    1: 0.0396,  # 1 - 0.98^2
    10: 0.36,  # 1 - 0.8^2
    25: 0.75,  # 1 - 0.5^2
    46: 0.9936,  # 1 - 0.08^2
    # The cosine is below the warm-up from here on, although the warm-up ends at 50.
    47: 0.9951034657,  # 0.1 + 0.45 (1 + cos(0.047 pi)); the warm-up has 0.9964
    50: 0.9944597533,  # 0.1 + 0.45 (1 + cos(0.05 pi))
    250: 0.8681980515,  # 0.1 + 0.45 (1 + 1 / sqrt(2))
    500: 0.55,
    750: 0.2318019485,  # 0.1 + 0.45 (1 - 1 / sqrt(2))
    1000: 0.1,
}
"""Finished steps of 1,000 -> part of the peak rate."""


def compute_part(x: int, steps: int) -> float:
    """Return the part of the peak rate after x steps, by the formula of fms-fsdp."""
    warmup = min(2000, steps // 20)
    rise = 1.0
    if warmup:
        rise = 1 - (1 - min(x, warmup) / warmup) ** 2
    return min(rise, 0.1 + 0.5 * (1 - 0.1) * (1 + math.cos(min(x, steps) / steps * math.pi)))


def load(words: str) -> LoadedConfig:
    return load_config(shlex.split(words))


def plan_run(loaded: LoadedConfig, world_size: int = 4) -> Plan:
    plan = resolve(loaded.config, world_size, loaded.origin)
    assert plan.errors == ()
    return plan


def list_rates(plan: Plan, steps: list[int]) -> list[float]:
    """Return the rates after these steps. They are those of the next step, as in fms-fsdp."""
    return [point.lr for point in plan.forecast().predict(steps)]


@pytest.mark.parametrize("words", [COMPLETE, "--num_steps=1000 --training_stage=initial"])
def test_rates_are_those_computed_by_hand(words: str) -> None:
    rates = list_rates(plan_run(load(words)), list(BY_HAND))
    assert rates == pytest.approx([3e-4 * part for part in BY_HAND.values()], rel=1e-9)


# With 19 steps there is no warm-up, and fms-fsdp itself would divide by zero.
@pytest.mark.parametrize("steps", [19, 20, 40, 999])
def test_every_step_has_the_rate_of_the_formula(steps: int) -> None:
    plan = plan_run(load(f"{COMPLETE} --num_steps={steps}"))
    assert plan.train_iters == steps
    rates = list_rates(plan, list(range(steps + 1)))
    wanted = [3e-4 * compute_part(x, steps) for x in range(steps + 1)]
    assert rates == pytest.approx(wanted, rel=1e-12, abs=1e-20)


def test_the_warm_up_is_at_most_2000_steps() -> None:
    schedule = plan_run(load("--num_steps=1000000")).lr_schedule
    batch = 2 * 4
    steps = [1, 1000, 1999, 2000, 2001, 500_000, 999_999, 1_000_000]
    rates = [schedule.get_lr(step * batch) for step in steps]
    assert rates == pytest.approx([3e-4 * compute_part(x, 1_000_000) for x in steps], rel=1e-12)


def test_annealing_falls_from_the_peak_to_zero() -> None:
    words = COMPLETE.replace("initial", "annealing").replace("runs/a", "runs/b", 1)
    loaded = load(words)
    rates = list_rates(plan_run(loaded), [0, 1, 250, 999, 1000])
    assert rates == pytest.approx([3e-4, 2.997e-4, 2.25e-4, 3e-7, 0.0], abs=1e-18)
    # It starts at step 0 with the weights of another run.
    assert loaded.config.checkpoint.finetune
    assert any("without the optimizer's moments" in text for text in loaded.warnings)


def test_a_resumed_annealing_keeps_its_counters() -> None:
    assert not load(COMPLETE.replace("initial", "annealing")).config.checkpoint.finetune


def test_a_complete_command_line_has_the_constants_of_fms_fsdp() -> None:
    loaded = load(COMPLETE)
    optimizer = loaded.config.optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.9, 0.95)
    assert (optimizer.weight_decay, optimizer.clip_grad) == (0.1, 1.0)
    assert loaded.config.precision.bf16
    assert loaded.config.batch.seed == 2023
    (warning,) = [text for text in loaded.warnings if "the defaults of fms-fsdp" in text]
    # No value of the command line is replaced by a default.
    assert "--seq-length" not in warning
    assert "--train-iters" not in warning


def test_nothing_is_evaluated_unless_it_is_asked_for() -> None:
    config = load(COMPLETE).config
    assert (config.batch.eval_iters, config.data.split) == (0, "1,0,0")
    asked = load(f"{COMPLETE} --eval-interval 500").config
    assert asked.batch.eval_iters > 0
    assert asked.data.split != "1,0,0"
    assert load(f"{COMPLETE} --split 90,10,0 --eval-iters 5").config.data.split == "90,10,0"


def test_own_flags_of_the_schedule_replace_that_of_fms_fsdp() -> None:
    optimizer = load(f"{COMPLETE} --lr-warmup-iters 100").config.optimizer
    assert optimizer.lr_warmup_style == "linear"
    assert not optimizer.lr_decay_from_start
    assert load(f"{COMPLETE} --lr-decay-style linear").config.optimizer.lr_warmup_iters == 0
    assert load(f"{COMPLETE} --min-lr 1e-6").config.optimizer.min_lr == 1e-6


def test_a_model_variant_among_other_flags_brings_no_defaults() -> None:
    words = "--model_variant=llama2_7b --seq-length 64 --micro-batch-size 1 --train-iters 9"
    loaded = load(f"{words} --lr 1e-4")
    assert loaded.config.optimizer.adam_beta2 == 0.999
    assert not any("the defaults of" in text for text in loaded.warnings)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--training_stage cooldown is not possible here"):
        load(COMPLETE.replace("initial", "cooldown"))


SCRIPT = """
export LD_LIBRARY_PATH=/opt/nccl/build/lib:$LD_LIBRARY_PATH
MODEL_ARGS="\\
--use_dummy_dataset=False
--ckpt_load_path=/data/ckpt
--ckpt_save_path=/data/ckpt
--data_path=/data/tokens
--fsdp_activation_checkpointing=False
--selective_checkpointing=1
--sharding_strategy=hsdp
--low_cpu_fsdp=False
--batch_size=2
--report_interval=200
--checkpoint_interval=20000
--use_torch_compile=False
--use_profiler=False
"
torchrun --nnodes=$SLURM_NTASKS --node_rank=$SLURM_NODEID --nproc_per_node=8 \\
    --master_addr=`scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1` \\
    --master_port="12234" main_training.py ${MODEL_ARGS}
"""
"""A launch script with the flags and the form of fms-fsdp's scripts/train.sh."""


def test_the_launch_script_is_planned_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    assert main(["--json", "--world-size", "128", "--at", "1000", "500000", "--", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 6_738_415_616
    assert report["train_iters"] == 1_000_000
    rates = [point["lr"] for point in report["at"]]
    assert rates == pytest.approx([3e-4 * 0.75, 3e-4 * 0.55])
    # Every flag is used, or one of the messages names it.
    messages = " ".join([*report["warnings"], *report["flags_without_effect"]])
    used_under_their_name = {"--data_path", "--use_torch_compile", "--sharding_strategy"}
    for line in SCRIPT.splitlines():
        if line.startswith("--"):
            flag = line.partition("=")[0]
            assert flag in messages or flag in used_under_their_name


def test_the_report_names_the_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "4", "--", *COMPLETE.split()]) == 0
    assert "quadratic warm-up 400 samples during the decay" in capsys.readouterr().out
