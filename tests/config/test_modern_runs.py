"""Published runs of 2024 and 2025 resolve with their published numbers.

Apertus 8B is a command line of its trainer. The others are the files of `examples/published`.
"""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.base import exit_codes
from megatron.commands.plan import main
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

ROOT = Path(__file__).resolve().parents[2]
RUNS = json.loads((ROOT / "tests" / "fixtures" / "published_runs" / "modern.json").read_text())
APERTUS = RUNS["apertus-8b"]
# The tokenizer is not on this machine. It has this many ids.
APERTUS_COMMAND = [*APERTUS["arguments"], "--vocab-size", "131072"]


def resolve_command(argv: list[str], world_size: int) -> Plan:
    loaded = load_config(argv)
    plan = resolve(loaded.config, world_size, loaded.origin, consumed_samples=None)
    assert plan.errors == ()
    return plan


def resolve_file(name: str, world_size: int, *flags: str) -> Plan:
    """Return the plan of a file in `examples/published`, with further flags."""
    file = ROOT / "examples" / "published" / f"{name}.yaml"
    return resolve_command(["--config", str(file), *flags], world_size)


def check_rates(plan: Plan, formula: Callable[[int], float], *iterations: int) -> None:
    """Check the rates that the log lines of iterations show, with a constant batch size."""
    # A forecast would give the same, but it counts every iteration up to the last one.
    rates = {i: plan.lr_schedule.get_lr(i * plan.batch_size.get_size(0, 0)) for i in iterations}
    assert rates == pytest.approx({i: formula(i) for i in iterations}, rel=1e-12)


# ---- Apertus 8B ----


@pytest.fixture(scope="module")
def apertus() -> Plan:
    return resolve_command(APERTUS_COMMAND, APERTUS["world_size"])


def test_apertus_has_the_published_size_and_length(apertus: Plan) -> None:
    layers = 32
    head = 128
    qk_norm = 2 * head * layers
    xielu = 2 * layers
    without = apertus.parameters - qk_norm - xielu
    assert without == APERTUS["parameters_without_qk_norm_and_xielu"]
    assert apertus.train_iters == APERTUS["milestones"]["train_iters"]
    assert apertus.data_parallel_size == 512
    # 256 nodes with microbatches of 4 samples cannot divide the first batch size of 1,024.
    assert [
        text for text in apertus.warnings if "can only be a resume past batch size 1024" in text
    ]


def test_apertus_has_the_published_milestones(apertus: Plan) -> None:
    milestones = APERTUS["milestones"]
    last_small = milestones["last_step_at_batch_1024"]
    first_decayed = milestones["first_decayed_step"]
    end = milestones["train_iters"]
    wanted = (2000, 4000, 4001, last_small, last_small + 1, first_decayed - 1, first_decayed, end)
    points = dict(zip(wanted, apertus.forecast().predict(wanted), strict=True))
    assert points[last_small].consumed_tokens == milestones["tokens_there"]
    assert points[last_small].global_batch_size == 1024
    assert points[last_small + 1].global_batch_size == 2048
    # Warm-up: 4,096,000 samples are 4,000 batches of 1,024.
    assert points[2000].lr == pytest.approx(0.5 * 1.1e-4)
    assert points[4000].lr == points[4001].lr == points[first_decayed - 1].lr == 1.1e-4
    # The final decay: 1 - sqrt of its finished fraction, over the last 403,905,806 samples.
    for step in (first_decayed, end):
        into = points[step].consumed_samples - (3_662_109_375 - 403_905_806)
        assert into > 0
        left = 1 - math.sqrt(into / 403_905_806)
        assert points[step].lr == pytest.approx(1.1e-5 + left * (1.1e-4 - 1.1e-5), rel=1e-12)
    assert points[first_decayed].lr < 1.1e-4
    assert points[end].lr == pytest.approx(1.1e-5, rel=1e-5)


APERTUS_WITHOUT_EFFECT = [
    "--main-grads-dtype fp32",
    "--group-query-attention",
    "--max-position-embeddings 4096",
    "--qknorm-impl apex",
    "--log-throughput",
    "--no-log-loss-scale-to-tensorboard",
    "--log-memory-to-tensorboard",
    "--no-check-for-nan-in-loss-and-grad",
    "--dataloader-type single",
    "--manual-gc",
    "--manual-gc-interval 500",
    "--exit-signal-handler",
    "--trigger-path triggers",
    "--ckpt-format torch_dist",
    "--ckpt-fully-parallel-load",
    "--dist-ckpt-strictness assume_ok_unexpected",
    "--use-distributed-optimizer is read as --zero-stage 1: this is the default, so the flag",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--num-dataset-builder-threads 4",
]


def test_the_report_lists_every_flag_of_apertus_without_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--rampup-batch-size", "1024", "1024", "1718272"]  # the complete ramp takes seconds
    code = main(["--json", "--world-size", "1024", "--", *APERTUS_COMMAND, *small])
    # Its devices have more memory than those of the default.
    assert code == exit_codes.DOES_NOT_FIT
    listed = json.loads(capsys.readouterr().out)["flags_without_effect"]
    assert sorted(text.partition(" has no effect")[0] for text in listed) == sorted(
        APERTUS_WITHOUT_EFFECT
    )
    # Each entry gives its reason.
    assert all(re.search(r" has no effect (here: \w|with)", text) for text in listed)


# ---- OLMo 3 7B ----


def read_second_part() -> list[str]:
    """Return the flags of the second part of OLMo 3's run, from the comment of its file."""
    text = (ROOT / "examples" / "published" / "olmo3-7b.yaml").read_text()
    lines = text.partition("#     ... ")[2].partition("#\n")[0]
    return shlex.split(lines.replace("#", " "))


def half_cos_with_warmup(step: int) -> float:
    """OLMo-core's HalfCosWithWarmup with the numbers of OLMo-3-1025-7B-pretrain-2.py."""
    first_steps = int(5e12) // 4_194_304
    warmup = first_steps // 2 + 2000 // 2
    assert warmup == 597_046
    steps = math.ceil(7e12 / 4_194_304)
    current = step - warmup + (steps - warmup)
    return 3e-5 + 2.7e-4 * (1 + math.cos(math.pi * current / (2 * (steps - warmup)))) / 2


def test_olmo3_follows_a_cosine_to_its_middle() -> None:
    run = RUNS["olmo3-7b"]
    plan = resolve_file("olmo3-7b", 512)
    assert plan.batch_size.final * plan.config.model.seq_length == run["tokens_per_step"]
    assert plan.parameters == 7_298_617_344
    assert plan.train_iters == math.ceil(5e12 / run["tokens_per_step"])
    assert plan.config.batch.exit_interval == 597_046

    def cosine(step: int) -> float:
        done = (step - run["warmup_steps"]) / (plan.train_iters - run["warmup_steps"])
        return 3e-5 + (run["lr"] - 3e-5) * (1 + math.cos(math.pi * done)) / 2

    check_rates(plan, cosine, 2000, 100_000, 596_000, 597_046)
    check_rates(plan, lambda step: run["lr"] * step / 2000, 0, 1, 1999)


def test_olmo3_is_rescheduled_in_the_middle() -> None:
    run = RUNS["olmo3-7b"]
    flags = read_second_part()
    assert flags[0] == "--override-lr-scheduler"
    plan = resolve_file("olmo3-7b", 512, *flags)
    assert plan.config.optimizer.override_lr_scheduler
    assert plan.config.batch.exit_interval is None
    check = run["check"]["step"]
    start, later = plan.forecast().predict([597_046, check])
    assert later.consumed_tokens == run["check"]["tokens"]
    assert later.lr == pytest.approx(half_cos_with_warmup(check), rel=1e-12)
    # The last line of stage 1 in the published table of checkpoints.
    assert plan.train_iters == 1_413_814
    assert plan.train_samples * plan.config.model.seq_length == 5_929_965_715_456
    check_rates(plan, half_cos_with_warmup, 597_046, 597_047, 800_000, check, 1_413_814)
    # The rate does not jump: the first part ends with nearly the same one.
    before = resolve_file("olmo3-7b", 512).lr_schedule.get_lr(597_046 * 512)
    assert before == pytest.approx(start.lr, rel=1e-5)


# ---- SmolLM3 3B ----


def test_smollm3_decays_from_its_published_step() -> None:
    run = RUNS["smollm3-3b"]
    plan = resolve_file("smollm3-3b", 384)
    parallel, micro, length = run["batch"]
    assert plan.data_parallel_size == parallel
    assert plan.config.batch.micro_batch_size == micro
    assert plan.get_num_microbatches(plan.batch_size.final) == 1
    assert parallel * micro * length == run["tokens_per_step"]
    assert plan.parameters == 3_075_098_624
    assert plan.train_iters == run["total_steps"]
    assert plan.train_samples * length == run["total_tokens"]
    start = run["decay_from_step"]

    def formula(step: int) -> float:
        if step <= 2000:
            return 2e-4 * step / 2000
        return 2e-4 * min(1.0, 1 - (step - start) / run["decay_steps"])

    check_rates(plan, formula, 0, 1000, 2000, 2001, start - 1, start, start + 1, 4_459_001)
    check_rates(plan, formula, run["total_steps"])


@pytest.mark.parametrize(("name", "world_size"), [("olmo3-7b", 512), ("smollm3-3b", 384)])
def test_no_setting_of_a_file_is_without_effect(name: str, world_size: int) -> None:
    warnings: tuple[Any, ...] = resolve_file(name, world_size).warnings
    assert [text for text in warnings if "no effect" in text] == []


# ---- The models of further projects, in Megatron's flags ----

_LLAMA = (
    "--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm "
    "--group-query-attention --untie-embeddings-and-output-weights"
)
FURTHER = {
    "Pythia 6.9B": (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 "
        "--position-embedding-type rope --rotary-percent 0.25 --parallel-residual "
        "--untie-embeddings-and-output-weights --vocab-size 50277 --pad-vocab-size-to 50432",
        6_857_302_016,
    ),
    "StarCoder 15B": (
        "--num-layers 40 --hidden-size 6144 --num-attention-heads 48 --seq-length 8192 "
        "--attention-head-type multiquery --vocab-size 49152",
        15_517_456_384,
    ),
    "StarCoder2 7B": (
        "--num-layers 32 --hidden-size 4608 --num-attention-heads 36 --num-query-groups 4 "
        "--seq-length 16384 --sliding-window 4096 --position-embedding-type rope "
        "--rotary-base 1000000 --vocab-size 49152",
        7_173_923_840,
    ),
    "Qwen2.5 7B": (
        f"{_LLAMA} --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 "
        "--num-attention-heads 28 --num-query-groups 4 --seq-length 4096 --add-qkv-bias "
        "--vocab-size 152064",
        7_615_616_512,
    ),
    "TinyLlama 1.1B": (
        f"{_LLAMA} --num-layers 22 --hidden-size 2048 --ffn-hidden-size 5632 "
        "--num-attention-heads 32 --num-query-groups 4 --seq-length 2048 --vocab-size 32000",
        1_100_048_384,
    ),
    "Falcon 40B": (
        "--num-layers 60 --hidden-size 8192 --num-attention-heads 128 --num-query-groups 8 "
        "--seq-length 2048 --position-embedding-type rope --disable-bias-linear "
        "--parallel-residual --vocab-size 65024",
        41_303_293_952,
    ),
    # 3.2B parameters of embeddings and 12.5B others.
    "Nemotron-4 15B": (
        "--num-layers 32 --hidden-size 6144 --num-attention-heads 48 --group-query-attention "
        "--num-query-groups 8 --seq-length 4096 --position-embedding-type rope "
        "--rotary-percent 0.5 --squared-relu --disable-bias-linear --apply-layernorm-1p "
        "--untie-embeddings-and-output-weights --vocab-size 256000",
        2 * 256_000 * 6144
        + 32 * (2 * 6144 * 6144 + 2 * 6144 * 1024 + 2 * 6144 * 24_576 + 4 * 6144)
        + 2 * 6144,
    ),
}


@pytest.mark.parametrize("model", FURTHER)
def test_a_model_of_another_project_has_its_published_size(model: str) -> None:
    flags, parameters = FURTHER[model]
    run = "--micro-batch-size 1 --train-iters 10 --lr 1e-4 --bf16"
    assert resolve_command(f"{flags} {run}".split(), 1).parameters == parameters


def test_the_phases_of_smollm3_begin_at_the_published_tokens() -> None:
    folder = ROOT / "examples" / "published"
    loaded = load_config(
        [
            *("--config", str(folder / "smollm3-3b.yaml")),
            *("--data-phases", str(folder / "smollm3-3b.phases.yaml")),
        ]
    )
    plan = resolve(loaded.config, 192, loaded.origin, vocab_size=None)
    assert plan.errors == ()
    tokens = [each.start_sample * 4096 for each in plan.data_phases]
    step = 576 * 4096
    assert tokens[0] == 0
    for found, published in zip(tokens[1:], (8 * 10**12, 9 * 10**12), strict=True):
        assert published <= found < published + step
