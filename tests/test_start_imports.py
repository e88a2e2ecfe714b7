"""Tests of what a process imports, because some imports take seconds on every rank."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_corpus import MERGES, VOCAB, command
from training.runs import SIZES

from megatron.commands.pretrain import _choose_allocator

COMPILER_AND_FSDP = (
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "sympy",
)
# `leave_with_error` ends the process with os._exit, so the modules are printed there.
PROGRAM = """
import gc, json, os, sys
import megatron.plan.resolve as module

resolve = module.resolve
positions = []

def resolve_and_record(*args, consumed_samples=0, **options):
    positions.append(consumed_samples)
    return resolve(*args, consumed_samples=consumed_samples, **options)

module.resolve = resolve_and_record
allocators = []

class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            allocators.append(os.environ.get("PYTORCH_ALLOC_CONF"))

sys.meta_path.insert(0, Watch)
from megatron.commands.pretrain import main

def print_modules(code=0):
    collector = [gc.isenabled(), gc.get_freeze_count()]
    print(json.dumps([code, sorted(sys.modules), positions, allocators, collector]), flush=True)
    end(code)

end = os._exit
os._exit = print_modules
try:
    main(sys.argv[1:])
except SystemExit as leaving:
    print_modules(leaving.code)
print_modules()
"""
# The first call of `fully_shard` imports what FSDP2 needs besides its own modules.
RANK = """
import gc, json, sys
from megatron.run.start.launch import import_training
from megatron.config.parallel import ParallelConfig

parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
import_training(parallel, 8)
before = set(sys.modules)
collector = [gc.isenabled(), gc.get_freeze_count()]
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layer = torch.nn.Linear(4, 4)
fully_shard(layer)
stage = PipelineStage(layer, 0, 1, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
dist.destroy_process_group()
print(json.dumps([sorted(set(sys.modules) - before), *collector]))
"""
HEAVY = ("torch._dynamo", "torch.distributed", "torch._inductor", "sympy", "triton")
OBJECTS_OF_TORCH = 100_000
TINY = SIZES.replace("--vocab-size 5000", "")


def run_and_record(*arguments: str) -> tuple[int, set[str], list[list[Any]], str]:
    """Run a command line.

    Returns:
        Its exit code, the modules that it imported, three lists, and what it printed. The lists are
        the position in samples from which it resolved each plan, the settings of the allocator when
        torch was imported, and whether the garbage collector is on and how many objects it never
        visits.
    """
    process = command("-c", PROGRAM, *arguments)
    output, errors = process.communicate()
    printed, _, last = output.rstrip().rpartition("\n")
    code, modules, *lists = json.loads(last)
    return code, set(modules), lists, printed + errors


def run_and_list_modules(*arguments: str) -> tuple[int, set[str], str]:
    """Run a command line, and return its exit code, the modules it imported and what it printed."""
    code, modules, _, printed = run_and_record(*arguments)
    return code, modules, printed


def test_start_on_one_device_resolves_once_and_imports_no_compiler_and_no_fsdp(
    corpus: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    paths = ["--data-path", corpus, "--data-cache-path", str(tmp_path)]
    paths += ["--save", folder, "--load", folder, "--exit-interval", "1"]
    # The second launch continues from the checkpoint of the first, after 4 samples.
    for position in (0, 4):
        code, modules, lists, printed = run_and_record(*SIZES.split(), *paths)
        assert code == 0, printed
        assert "torch" in modules
        assert modules.isdisjoint(COMPILER_AND_FSDP)
        assert "numpy.ma" not in modules
        *records, (collects, hidden) = lists
        assert records == [[position], ["expandable_segments:True"]]
        assert collects
        assert hidden > OBJECTS_OF_TORCH


def test_rank_with_shards_and_a_pipeline_imports_everything_before_it_joins() -> None:
    process = command("-c", RANK)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    late, collects, hidden = json.loads(output)
    # FSDP2 and the schedule import a few modules at their first use.
    assert not [name for name in late if name.startswith(HEAVY)]
    assert len(late) < 20
    assert collects
    assert hidden > OBJECTS_OF_TORCH
    # Triton would print what the collector has not collected at the end of the process.
    assert "leaked" not in errors


def test_the_settings_of_a_user_decide_about_the_allocator() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    environment = dict(given)
    _choose_allocator(environment)
    assert environment == given


def test_list_of_presets_imports_no_torch() -> None:
    code, modules, printed = run_and_list_modules("--list-presets")
    assert code == 0, printed
    assert "llama2-7b" in printed
    assert "torch" not in modules


def test_help_imports_no_torch() -> None:
    code, modules, printed = run_and_list_modules("--help", "precision")
    assert code == 0, printed
    assert "--fp16, --no-fp16" in printed
    assert "torch" not in modules


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{SIZES} --no-such-flag 3", "unknown flag --no-such-flag"),
        ("--num-layers 2", "--hidden-size"),
        (f"{SIZES} --help nothing", "the groups are model, batch"),
        (f"{SIZES} --num-attention-heads 3", "--num-attention-heads 3"),
        (f"{SIZES} --global-batch-size 5 --data-path x", "--global-batch-size 5 must be divisible"),
        (f"{SIZES} --fp16 --bf16 --load .", "--bf16"),
        (f"{SIZES} --deepspeed --data-path x --deepspeed-config /nowhere.json", "does not exist"),
        (SIZES, "--data-path"),
        (f"{TINY} --data-path x --vocab-file /nowhere/v.json", "/nowhere/v.json does not exist"),
        (
            f"{SIZES} --data-path x --vocab-file {VOCAB} --merge-file /nowhere/m.txt",
            "/nowhere/m.txt does not exist",
        ),
        (f"{SIZES} --data-path x --merge-file {MERGES} --vocab-file v", "v does not exist"),
        (
            f"{SIZES} --data-path x --tokenizer-type PretrainedFromHF --tokenizer-name-or-path /no",
            "--tokenizer-name-or-path /no does not exist",
        ),
        (
            f"{TINY} --data-path x --pad-vocab-size-to 5120 --tokenizer-type PretrainedFromHF "
            "--tokenizer-name-or-path ./a/b",
            "--tokenizer-name-or-path ./a/b does not exist",
        ),
        (
            f"{TINY} --data-path x",
            "the size of the vocabulary is unknown: give --vocab-file and --merge-file",
        ),
    ],
)
def test_wrong_configuration_is_refused_without_torch(flags: str, message: str) -> None:
    code, modules, printed = run_and_list_modules(*flags.split())
    assert message in printed
    assert code == 2
    assert "torch" not in modules


def test_rank_of_several_is_refused_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    flags = f"{SIZES} --data-path x --tensor-model-parallel-size 3"
    code, modules, printed = run_and_list_modules(*flags.split())
    assert "must divide the number of processes, 2" in printed
    assert code == 2
    assert "torch" not in modules


def test_published_name_of_a_tokenizer_is_enough_with_a_stated_size(
    corpus: str, tmp_path: Path
) -> None:
    paths = ["--data-path", corpus, "--data-cache-path", str(tmp_path)]
    name = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", "nobody/nothing"]
    code, _, printed = run_and_list_modules(*SIZES.split(), *paths, *name, "--exit-interval", "1")
    assert code == 0, printed
