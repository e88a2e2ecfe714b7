"""The argument lists of three published runs give the published world, size and length."""

import json
from pathlib import Path

import pytest
from config.minimal import published_arguments

from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve

RUNS = Path(__file__).resolve().parents[1] / "fixtures" / "published_runs"

EXPECTED = {
    "tr1-13B": {
        "world": (512, 2, 4, 64),
        "layers_per_stage": (10, 10, 10, 10),
        "padded_vocab_size": 50_432,
        # l (12 h^2 + 13 h) + V h + s h + 2 h: 40 layers, h 5120, s 2048
        "parameters": 12_854_282_240,
        "micro_and_global_batch_size": (1, 1024),
        "rampup": (16, 16, 5_000_000),
        "train_samples": 300_000_000,
        "train_iters": 311_541,
        "parsing_warns_of": ["--deepspeed-activation-checkpointing", "--loss-scale"],
        "planning_warns_of": [
            "--vocab-file",
            "--rampup-batch-size",
            "head",
            "pipeline:",
            "--data-path",
        ],
    },
    "tr8-104B": {
        "world": (512, 4, 32, 4),
        "layers_per_stage": (2,) * 32,
        "padded_vocab_size": 50_688,
        # as above with 64 layers, h 11600, s 2048, and 2 h for the norm of the embedding
        "parameters": 103_963_515_200,
        "micro_and_global_batch_size": (1, 2048),
        "rampup": (16, 16, 6_000_000),
        "train_samples": 300_000_000,
        "train_iters": 159_576,
        "parsing_warns_of": ["--deepspeed-activation-checkpointing", "--loss-scale"],
        "planning_warns_of": ["--vocab-file", "head", "pipeline:", "--data-path"],
    },
    "tr11-176B-ml": {
        "world": (384, 4, 12, 8),
        "layers_per_stage": (5, *[6] * 10, 5),
        "padded_vocab_size": 250_880,
        # as above with 70 layers, h 14336, no positions (ALiBi), and 2 h for the embedding's norm
        "parameters": 176_247_271_424,
        "micro_and_global_batch_size": (2, 2048),
        "rampup": (192, 16, 9_765_625),
        "train_samples": 220_000_000,
        "train_iters": 115_311,
        "parsing_warns_of": [
            "--abort-on-unmet-fused-kernel-constraints",
            "--deepspeed-activation-checkpointing",
        ],
        "planning_warns_of": ["--max-position-embeddings", "the", "pipeline:"],
    },
}


def first_words(warnings: list[str]) -> list[str]:
    """Return the first word of each warning, which names its subject."""
    return [warning.split()[0] for warning in warnings]


@pytest.mark.parametrize("run", EXPECTED)
def test_plan_of_a_published_run(run: str, tmp_path: Path):
    facts = json.loads((RUNS / f"{run}.json").read_text())["facts"]
    loaded = load_config(published_arguments(run, tmp_path))
    plan = resolve(
        loaded.config, facts["nodes"] * facts["gpus_per_node"], loaded.origin, consumed_samples=None
    )
    config = loaded.config
    assert plan.errors == ()
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    assert {
        "world": (plan.world_size, tensor, pipeline, plan.data_parallel_size),
        "layers_per_stage": plan.layers_per_stage,
        "padded_vocab_size": plan.padded_vocab_size,
        "parameters": plan.parameters,
        "micro_and_global_batch_size": (
            config.batch.micro_batch_size,
            config.batch.global_batch_size,
        ),
        "rampup": config.batch.rampup_batch_size,
        "train_samples": plan.train_samples,
        "train_iters": plan.train_iters,
        "parsing_warns_of": first_words(loaded.warnings),
        "planning_warns_of": first_words(list(plan.warnings)),
    } == EXPECTED[run]


def test_expected_facts_are_the_published_ones():
    """The table above agrees with the facts that were published with the argument lists."""
    for run, expected in EXPECTED.items():
        facts = json.loads((RUNS / f"{run}.json").read_text())["facts"]
        world = (
            facts["nodes"] * facts["gpus_per_node"],
            facts["tensor"],
            facts["pipeline"],
            facts["data"],
        )
        assert expected["world"] == world
        assert expected["train_iters"] == facts.get("train_iters", expected["train_iters"])
        assert expected["parameters"] == facts.get("parameters", expected["parameters"])
