"""Apertus 8B's command line trains at a tiny size, and each of its flags has the effect it claims.

Only sizes, paths, and the length of warm-ups and decays are changed. TP 2, the distributed
optimizer, bf16, xIELU, the norm of queries and keys, the goldfish loss, attention inside documents,
AdEMAMix, WSD and the ramp-up of the batch size are as published.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config.minimal import replace_values
from equivalence.corpus import curve, load_from
from equivalence.test_published_runs_train import write_hf_tokenizer
from process_pool import Outcome, ProcessPool, pretrain, succeed
from tiny_corpus import EOD, REFERENCE_PREFIX

from megatron.base.errors import ConfigError
from megatron.config.compare import split_off_flags_without_effect
from megatron.config.fields import LoadedConfig
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.engine.native import NativeEngine
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_report import build_json
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.observe.metrics import read_metrics
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import build_mesh
from megatron.plan.resolve import resolve
from megatron.run.start.open_data import open_data
from megatron.run.state import TrainState

RUNS = Path(__file__).resolve().parents[1] / "fixtures" / "published_runs"
PUBLISHED: list[str] = json.loads((RUNS / "modern.json").read_text())["apertus-8b"]["arguments"]
SIZES = {
    "--num-layers": ["2"],
    "--hidden-size": ["64"],
    "--ffn-hidden-size": ["160"],
    "--num-attention-heads": ["8"],
    "--num-query-groups": ["2"],
    "--seq-length": ["64"],
    "--max-position-embeddings": ["64"],
    "--micro-batch-size": ["2"],
    # Batch sizes 4 4 4 4 4 4 8 8 8 8.
    "--rampup-batch-size": ["4", "4", "24"],
    "--global-batch-size": ["8"],
    "--train-samples": ["56"],
    "--lr-warmup-samples": ["8"],
    "--lr-wsd-decay-samples": ["24"],
    "--ademamix-beta3-warmup": ["6"],
    "--ademamix-alpha-warmup": ["6"],
    "--lr": ["4e-3"],  # for a model of this width
    "--min-lr": ["4e-4"],
    "--goldfish-k": ["5"],
    "--goldfish-h": ["3"],
    "--save-interval": ["5"],
    "--num-workers": ["1"],
}
STEPS = 10


def tiny_arguments(folder: Path, data: Path) -> list[str]:
    """Return the published command line with the sizes above.

    Args:
        folder: The folder of the run's checkpoints and logs.
        data: The folder of the tokenizer and of the index caches.
    """
    paths = {
        "--tokenizer-model": [str(write_hf_tokenizer(data))],
        "--data-path": [write_short_documents(data, 40)],
        "--save": [str(folder / "checkpoints")],
        "--load": [str(folder / "checkpoints")],
        "--tensorboard-dir": [str(folder / "tensorboard")],
        "--trigger-path": [str(folder / "triggers")],
    }
    assert SIZES.keys() | paths.keys() <= set(PUBLISHED)
    return [*replace_values(PUBLISHED, SIZES | paths), "--data-cache-path", str(data / "cache")]


def write_short_documents(folder: Path, length: int) -> str:
    """Write the reference texts as documents of `length` tokens. Return the prefix of the files."""
    prefix = folder / f"documents-of-{length}"
    if not prefix.with_suffix(".idx").exists():
        source = IndexedDataset(str(REFERENCE_PREFIX))
        writer = IndexedDatasetWriter(str(prefix), source.dtype)
        for document in range(20):
            tokens = source.get(document, 0, int(source.sizes[document]) - 1)
            for start in range(0, len(tokens), length - 1):
                part = tokens[start : start + length - 1]
                writer.add_document(np.append(part, EOD).astype(source.dtype))
        writer.finalize()
    return str(prefix)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.full)])
def test_apertus_trains_saves_and_resumes(ranks: int, pool: ProcessPool, tmp_path: Path) -> None:
    changed = {"--micro-batch-size": ["1"]} if ranks == 8 else {}

    def arguments(name: str) -> list[str]:
        return replace_values(tiny_arguments(tmp_path / name, tmp_path), changed)

    output = succeed(pool.run(ranks, pretrain, arguments("whole")))
    assert "training is complete at iteration 10" in output
    whole = tmp_path / "whole" / "checkpoints"
    losses = curve(whole)
    assert len(losses) == STEPS
    assert losses[-1][0] < losses[0][0] - 0.3
    resumed = succeed(pool.run(ranks, pretrain, load_from(arguments("rest"), whole, 5)))
    assert "at iteration 5" in resumed
    assert curve(tmp_path / "rest" / "checkpoints") == losses[5:]
    assert (tmp_path / "rest" / "checkpoints" / "global_step10").is_dir()


# ---- The effect of each flag ----

FLIPS: dict[str, list[str] | None] = {
    "--num-layers": ["3"],
    "--hidden-size": ["128"],
    "--ffn-hidden-size": ["192"],
    "--num-attention-heads": ["4"],
    "--num-query-groups": ["4"],
    "--position-embedding-type": ["learned_absolute"],
    "--rotary-base": ["10000"],
    "--use-rope-scaling": None,
    "--rope-scaling-factor": ["2"],
    "--make-vocab-size-divisible-by": ["96"],
    "--normalization": ["LayerNorm"],
    "--xielu": None,
    "--qk-layernorm": None,
    "--untie-embeddings-and-output-weights": None,
    "--attention-dropout": ["0.1"],
    "--hidden-dropout": ["0.1"],
    "--weight-decay": ["0.2"],
    "--clip-grad": ["0.2"],
    "--adam-beta1": ["0.8"],
    "--adam-beta2": ["0.99"],
    "--ademamix-alpha": ["4"],
    "--ademamix-beta3": ["0.99"],
    "--ademamix-beta3-warmup": ["3"],
    "--ademamix-alpha-warmup": ["3"],
    "--micro-batch-size": ["1"],
    "--global-batch-size": ["12"],
    "--rampup-batch-size": None,
    "--train-samples": ["64"],
    "--disable-bias-linear": None,
    "--optimizer": ["adam"],
    "--seed": ["29"],
    "--init-method-std": ["0.02"],
    "--lr": ["3e-3"],
    "--min-lr": ["0"],
    "--lr-decay-style": ["cosine"],
    "--lr-warmup-samples": ["16"],
    "--lr-wsd-decay-style": ["linear"],
    "--lr-wsd-decay-samples": ["16"],
    "--bf16": None,
    "--tensor-model-parallel-size": ["1"],
    "--pipeline-model-parallel-size": ["2"],
    "--tokenizer-type": ["GPT2BPETokenizer"],
    "--tokenizer-model": None,
    "--split": ["90,10,0"],
    "--seq-length": ["32"],
    # Rotary positions are relative, so inside one document this changes the rounding only.
    "--reset-position-ids": None,
    "--reset-attention-mask": None,
    "--eod-mask-loss": None,
    "--goldfish-loss": None,
    "--goldfish-k": ["3"],
    "--goldfish-h": ["4"],
    "--data-path": [str(REFERENCE_PREFIX)],
}
"""Flag that changes the plan or the loss -> another value, or None to remove it."""

SEEN_IN_FILES = {
    "--log-params-norm",
    "--tensorboard-dir",
    "--log-interval",
    "--save",
    "--load",
    "--save-interval",
    "--override-opt_param-scheduler",
}
"""Flags that change what a run reads and writes."""

SEEN_IN_TIME = {
    "--async-save",
    "--cross-entropy-loss-fusion",
    "--distributed-timeout-minutes",
    "--num-workers",
}
"""Flags that change only how long a run takes or waits."""


def list_flags(arguments: list[str]) -> list[str]:
    return [word for word in arguments if word.startswith("--")]


def list_flags_without_effect(folder: Path) -> set[str]:
    """Return the flags of the tiny command line that the report lists as such."""
    arguments = tiny_arguments(folder, folder)
    loaded = load_config(arguments)
    warnings = [*loaded.warnings, *resolve(loaded.config, 4, loaded.origin).warnings]
    return {text.split()[0] for text in split_off_flags_without_effect(warnings)[1]}


def test_every_flag_of_apertus_is_classified(tmp_path: Path) -> None:
    listed = list_flags_without_effect(tmp_path)
    kinds = [set(FLIPS), SEEN_IN_FILES, SEEN_IN_TIME, listed]
    assert set(list_flags(PUBLISHED)) == set().union(*kinds)
    assert sum(map(len, kinds)) == len(set().union(*kinds)), "a flag has two kinds"


class Variants:
    """Variants of the tiny command line: what each one plans, and how it trains."""

    def __init__(self, folder: Path) -> None:
        self.arguments = tiny_arguments(folder, folder)
        self.plan = self.summarise({})
        self.curve = self.train({})

    def load(self, changed: Mapping[str, list[str] | None]) -> LoadedConfig:
        return load_config(replace_values(self.arguments, changed))

    def summarise(self, changed: Mapping[str, list[str] | None]) -> dict[str, Any]:
        """Return the shapes, counts, batch sizes and rates that the plan derives.

        The estimate of memory is left out: a flag must change more than that.
        """
        loaded = self.load(changed)
        plan = resolve(loaded.config, 4, loaded.origin)
        points = plan.forecast().predict(range(STEPS + 1))
        shapes = [plan.shape.describe_layer(0), plan.shape.head_dim, plan.shape.rotary_dim]
        numbers = build_json(plan, points, [], (), load_hardware("a100-80g"))
        del numbers["memory_bytes"]
        return {
            **numbers,
            "shapes": shapes,
            "schedule": [point._asdict() for point in points],
        }

    def train(self, changed: Mapping[str, list[str] | None]) -> list[tuple[float, float, float]]:
        """Return (loss, gradient norm, norm of the parameters) of five steps of one process."""
        config = self.load({"--tensor-model-parallel-size": ["1"], **changed}).config
        plan = resolve(config, 1)
        assert plan.errors == ()
        mesh = build_mesh(Grid(1, 1, 1), torch.device("cpu"))
        source = open_data(plan, mesh, TrainState()).train
        assert source is not None
        engine = NativeEngine(plan, mesh)
        seen = []
        for before, point in pairwise(plan.forecast().predict(range(6))):
            batch = source.read_batch(point.global_batch_size)
            step = engine.train_batch(batch, iteration=point.iteration, lr=before.lr)
            source.advance(point.global_batch_size)
            seen.append((step.loss, step.grad_norm, engine.compute_parameter_norm()))
        return seen


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(tmp_path_factory.mktemp("apertus"))


@pytest.mark.parametrize("flag", FLIPS)
def test_a_flag_of_apertus_changes_the_plan_or_the_loss(flag: str, variants: Variants) -> None:
    changed = {flag: FLIPS[flag]}
    try:
        same_plan = variants.summarise(changed) == variants.plan
    except ConfigError:
        # Without this flag there is no plan.
        assert FLIPS[flag] is None
        return
    # Training takes longer, so only flags that leave the plan as it is are trained.
    if same_plan:
        assert variants.train(changed) != variants.curve


def test_the_same_command_line_trains_the_same(variants: Variants) -> None:
    assert variants.train({}) == variants.curve
    assert len(set(variants.curve)) == 5


def test_a_flag_of_apertus_without_effect_changes_nothing(
    variants: Variants, tmp_path: Path
) -> None:
    whole = variants.load({}).config
    listed = list_flags_without_effect(tmp_path)
    assert len(listed) == 20
    for flag in listed:
        changed = {flag: None}
        if variants.load(changed).config != whole:
            assert variants.summarise(changed) == variants.plan, flag
            assert variants.train(changed) == variants.curve, flag


def test_flags_of_apertus_that_change_what_a_run_reads_and_writes(
    pool: ProcessPool, tmp_path: Path
) -> None:
    def run(name: str, changed: Mapping[str, list[str] | None], *further: str) -> Outcome:
        """Train in one process, and return its outcome. `name` is the folder of the run."""
        single = {"--tensor-model-parallel-size": ["1"], **changed}
        arguments = replace_values(tiny_arguments(tmp_path / name, tmp_path), single)
        (outcome,) = pool.run(1, pretrain, [*arguments, *further])
        return outcome

    def look(name: str) -> dict[str, Any]:
        """Return what a run has written."""
        folder = tmp_path / name
        saved = [path.name for path in folder.glob("checkpoints/global_step*")]
        norms = [
            entry["params_norm"]
            for entry in read_metrics(folder / "checkpoints" / "metrics.jsonl")
            if "params_norm" in entry
        ]
        return {
            "--tensorboard-dir": (folder / "tensorboard").is_dir(),
            "--save-interval": sorted(saved),
            "--log-params-norm": [norm is not None for norm in norms],
        }

    printed = succeed([run("whole", {})])
    assert look("whole") == {
        "--tensorboard-dir": True,
        "--save-interval": ["global_step10", "global_step5"],
        "--log-params-norm": [True] * STEPS,
    }
    assert printed.count("learning rate:") == STEPS
    other: dict[str, list[str] | None] = {"--tensorboard-dir": None, "--log-params-norm": None}
    other |= {"--save-interval": ["4"], "--log-interval": ["5"]}
    printed = succeed([run("other", other)])
    assert look("other") == {
        "--tensorboard-dir": False,
        "--save-interval": ["global_step10", "global_step4", "global_step8"],
        "--log-params-norm": [False] * STEPS,
    }
    assert printed.count("learning rate:") == 2
    without_save = {"--save": None, "--async-save": None}
    # Without --save, --load names no folder in which a run could begin.
    unsaved = run("unsaved", without_save).error
    assert unsaved is not None
    assert "--load" in unsaved
    succeed([run("unsaved", {**without_save, "--load": None}, "--exit-interval", "2")])
    assert not (tmp_path / "unsaved" / "checkpoints").exists()

    # --load continues the run, and --override-opt_param-scheduler lets its rate change.
    longer = {"--train-samples": ["64"]}
    kept = longer | {"--override-opt_param-scheduler": None}
    refused = run("whole", kept).error
    assert refused is not None
    assert "--override-lr-scheduler" in refused
    unloaded = run("whole", {**longer, "--load": None}).error
    assert unloaded is not None
    assert "--allow-fresh-start" in unloaded
    assert "at iteration 10" in succeed([run("other", longer)])
