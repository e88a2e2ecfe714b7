"""The argument lists of 53 published launch scripts resolve, or are refused for a clear reason.

`shared/data/migrants.json` has them with their DeepSpeed JSON and their number of processes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from shared_data import shared_dir

from megatron.base.errors import ConfigError
from megatron.config.compare import split_off_flags_without_effect
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve

COUNT = 53
COUNT_IN_SCOPE = 38

# Scripts that start one process, although the list gives all GPUs of a node.
ONE_PROCESS = {"examples/pretrain_gpt.sh"}

# What each script that is out of scope asks for, as its refusal names it. None: the arguments ask
# for nothing that is not supported. A dense model in a folder for mixtures of experts is one case.
OUT_OF_SCOPE = {
    "examples/llama/train_llama3_8b_h100_fp8.sh": "add --fp8-recipe tensorwise",
    # Nothing but the file of its tokenizer is missing.
    "examples/mixtral/train_mixtral_8x7b_distributed.sh": "does not exist on this machine",
    "run_fp16.sh": "--global-batch-size 1",
    "train/tr14-mup/tr14-2B7-grid-search-mup.slurm": "muP is not supported",
    "train/tr14-mup/tr14-2B7-mup-cluster.slurm": "muP is not supported",
    "train/tr14-mup/tr14-2B7-mup.slurm": "muP is not supported",
    "train/tr7-alibi/tr7b-extrapolation-law.slurm": None,
    "examples_deepspeed/MoE/ds_pretrain_gpt_1.3B_MoE128.sh": "would change how the experts",
    "examples_deepspeed/MoE/ds_pretrain_gpt_1.3B_dense.sh": None,
    "examples_deepspeed/MoE/ds_pretrain_gpt_350M_MoE128.sh": "would change how the experts",
    "examples_deepspeed/MoE/ds_pretrain_gpt_350M_PR-MoE32or64.sh": ("would change how the experts"),
    "examples_deepspeed/MoE/ds_pretrain_gpt_350M_dense.sh": None,
    "examples_deepspeed/compression/ds_pretrain_gpt_125M_dense_cl_kd.sh": (
        "distillation is not supported"
    ),
    "examples_deepspeed/compression/ds_pretrain_gpt_350M_dense_kd.sh": None,
    "examples_deepspeed/universal_checkpointing/megatron_gpt/run_bf16.sh": None,
}


def read_migrants() -> list[dict[str, Any]]:
    return json.loads(shared_dir("data", "migrants.json").read_text())


def build_arguments(migrant: dict[str, Any], folder: Path) -> list[str]:
    """Return the arguments, with the DeepSpeed JSON in a file of `folder`."""
    arguments = list(migrant["arguments"])
    if migrant["ds_config"] is not None:
        path = folder / "ds_config.json"
        path.write_text(json.dumps(migrant["ds_config"]))
        # The last flag wins, so the name in the script need not be found.
        arguments += ["--deepspeed_config", str(path)]
    if migrant["vocab_size_added"]:
        # The tokenizer of the script is known by name only, and is not on this machine.
        arguments += ["--vocab-size", "50257"]
    return arguments


def plan_migrant(migrant: dict[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Return the errors and the warnings about a script."""
    world_size = migrant["world_size"]
    if migrant["path"] in ONE_PROCESS:
        world_size = 1
    try:
        loaded = load_config(build_arguments(migrant, folder))
    except ConfigError as error:
        # Several errors are a list after a headline.
        headline, *listed = str(error).split("\n  - ")
        return listed or [headline], []
    plan = resolve(loaded.config, world_size, loaded.origin, consumed_samples=None)
    return list(plan.errors), [*loaded.warnings, *plan.warnings]


@pytest.mark.parametrize("index", range(COUNT))
def test_script_resolves_or_is_refused_by_name(index: int, tmp_path: Path) -> None:
    migrant = read_migrants()[index]
    errors, warnings = plan_migrant(migrant, tmp_path)
    reason = None
    if migrant["out_of_scope"]:
        reason = OUT_OF_SCOPE[migrant["path"]]
    if reason is None:
        assert errors == []
        # Each flag that does nothing is listed with a reason.
        for text in split_off_flags_without_effect(warnings)[1]:
            assert ": " in text or "without --" in text or "with --" in text, text
    else:
        assert sum(reason in error for error in errors) == 1, errors
        # Nothing is refused as unknown, since a user could not tell whether it matters.
        assert not any("unknown" in error or "is not accepted" in error for error in errors)


def test_the_table_has_every_script_out_of_scope() -> None:
    migrants = read_migrants()
    assert len(migrants) == COUNT
    assert sum(not migrant["out_of_scope"] for migrant in migrants) == COUNT_IN_SCOPE
    assert {m["path"] for m in migrants if m["out_of_scope"]} == set(OUT_OF_SCOPE)


def test_warmup_in_tokens_is_the_warmup_in_samples(tmp_path: Path) -> None:
    migrant = next(m for m in read_migrants() if "--lr-warmup-tokens" in m["arguments"])
    arguments = build_arguments(migrant, tmp_path)
    at = arguments.index("--num-experts")
    del arguments[at : at + 2]
    loaded = load_config(arguments)
    plan = resolve(loaded.config, migrant["world_size"], loaded.origin)
    assert plan.lr_schedule.warmup_steps == 375_000_000 / 2048
