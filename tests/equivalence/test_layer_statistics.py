"""Tests of --log-layer-stats-interval.

The statistics of one process equal those of a plain forward and backward pass, which are computed
here from the complete logits. Those of each layout equal those of one process to 1e-5. Losses and
gradient norms are bit-identical with and without statistics.
"""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from process_pool import ProcessPool, pretrain, start_without_lease, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_corpus import MERGES, VOCAB

from megatron.observe.metrics import read_metrics

LAYERS = 4
SIZES = (
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--vocab-size 5000 --make-vocab-size-divisible-by 96 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 4 --lr 2e-3 --lr-decay-style constant --log-interval 1 "
    "--eval-interval 100 --eval-iters 0"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
# The gradient of the key's bias is zero in exact arithmetic. Adam turns its rounding errors into
# steps, so layouts with biases have different parameters.
SHAPES = {
    "gpt2": "--no-add-bias-linear",
    "llama": "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--ffn-hidden-size 48 --num-query-groups 2 --no-add-bias-linear "
    "--untie-embeddings-and-output-weights --qk-norm head --sliding-window 7 "
    "--full-attention-layers 2",
    "bloom": "--position-embedding-type alibi --no-add-bias-linear --seq-length 128 "
    f"--reset-attention-mask --vocab-file {VOCAB} --merge-file {MERGES}",
}
PER_LAYER = (
    "layer_output_rms",
    "layer_grad_norm",
    "layer_params_norm",
    "layer_attention_logit",
)


def command(folder: Path, corpus: str, shape: str, *flags: str) -> list[str]:
    text = " ".join((SIZES, SHAPES[shape], *flags))
    paths = ["--data-path", corpus, "--data-cache-path", f"{folder}/cache"]
    return [*text.split(), *paths, "--metrics-file", f"{folder}/metrics.jsonl"]


def read_statistics(folder: Path) -> dict[int, list[float]]:
    """Return the statistics of each iteration that has them, as one list."""
    return {
        entry["iteration"]: [
            *(number for key in PER_LAYER for number in entry[key]),
            entry["output_logit"],
        ]
        for entry in read_metrics(folder / "metrics.jsonl")
        if "output_logit" in entry
    }


def read_curve(folder: Path) -> list[tuple[float, float]]:
    return [(e["lm_loss"], e["grad_norm"]) for e in read_metrics(folder / "metrics.jsonl")]


def compare_with_plain_pass(argv: list[str]) -> tuple[list[float], list[float]]:
    """Return the statistics of the engine's first step, and those of a plain pass."""
    run = start_without_lease(argv)
    assert run.sources.train is not None
    microbatches = run.sources.train.read_batch(8)
    plain = compute_plainly(run.engine.stages[0], microbatches)
    # Without a learning rate the norm of the parameters is that before the step.
    result = run.engine.train_batch(microbatches, iteration=1, lr=0.0, with_layer_statistics=True)
    # Iterations without statistics have no hooks.
    for module in run.engine.stages[0].modules():
        assert not [*module._forward_hooks, *module._forward_pre_hooks], module
    run.reporter.close()
    run.sources.close()
    assert result.layers is not None
    values = vars(result.layers)
    return [*(x for key in PER_LAYER for x in values[key]), values["output_logit"]], plain


def compute_plainly(model: Any, microbatches: Any) -> list[float]:
    """Return the statistics of the complete model from complete tensors in fp64."""
    import torch
    import torch.nn.functional as F

    from megatron.engine.base import build_inputs

    attend = F.scaled_dot_product_attention
    outputs: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    attention = [0.0] * LAYERS
    logits = 0.0
    current = 0

    def attend_and_keep(query, key, value, attn_mask=None, is_causal=False, **options):
        length = query.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            seen = attn_mask > -math.inf
        wide = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query.double() @ wide.double().transpose(2, 3) / math.sqrt(query.shape[3])
        attention[current] = max(attention[current], float(scores.abs().where(seen, 0.0).max()))
        return attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    def enter(number: int) -> None:
        nonlocal current
        current = number

    inputs = build_inputs(microbatches, 1, next(model.parameters()).device)
    model.train()
    with ExitStack() as hooks:
        for number, block in model.get_blocks().items():
            for hook in (
                # This module is called again in a recomputation. The block is not.
                block.attention.register_forward_pre_hook(lambda *_, n=number: enter(n)),
                block.register_forward_hook(
                    lambda *args, n=number: outputs[n].append(args[2].detach())
                ),
            ):
                hooks.callback(hook.remove)
        hooks.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attend_and_keep))
        for one in inputs:
            (model(None, one) / len(inputs)).backward()
            with torch.no_grad():
                hidden = model.head.norm(outputs[-1][-1])
                weight = model.head.weight
                if weight is None:
                    weight = model.embedding.word.weight
                scores = hidden.double() @ weight[:5000].double().t()
                logits = max(logits, float(scores.abs().max()))
    gradients = [0.0] * LAYERS
    weights = [0.0] * LAYERS
    for name, parameter in model.named_parameters():
        if name.startswith("blocks."):
            layer = int(name.split(".")[1])
            gradients[layer] += float(parameter.grad.double().square().sum())
            weights[layer] += float(parameter.double().square().sum())
    model.zero_grad(set_to_none=True)
    rms = [float(torch.cat(kept).double().square().mean().sqrt()) for kept in outputs]
    return [*rms, *map(math.sqrt, gradients), *map(math.sqrt, weights), *attention, logits]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "flags", [pytest.param("", marks=pytest.mark.full), "--checkpoint-activations"]
)
def test_one_process_equals_a_plain_pass(
    shape: str, flags: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    argv = command(tmp_path, corpus, shape, NO_DROPOUT, flags, "--clip-grad 0.01")
    outcomes = pool.run(1, compare_with_plain_pass, argv)
    succeed(outcomes)
    engine, plain = outcomes[0].value
    assert len(plain) == 4 * LAYERS + 1
    assert min(plain) > 0
    assert engine == pytest.approx(plain, rel=1e-5)


@pytest.fixture(scope="module")
def single(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return the folder of one process's run of each shape."""
    folders = {}
    for shape in SHAPES:
        folder = folders[shape] = tmp_path_factory.mktemp(shape)
        argv = command(folder, corpus, shape, NO_DROPOUT, "--log-layer-stats-interval 2")
        succeed(pool.run(1, pretrain, argv))
    return folders


LAYOUTS = [
    (
        4,
        "llama",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--checkpoint-activations",
    ),
    (2, "gpt2", "--zero-stage 3 --micro-batch-size 2"),
    (4, "bloom", "--tensor-model-parallel-size 2 --zero-stage 1 --recompute-attention-core"),
]
LONG = [
    (2, "llama", "--zero-stage 1"),
    (4, "gpt2", "--tensor-model-parallel-size 2 --zero-stage 3 --sequence-parallel"),
    (4, "llama", "--tensor-model-parallel-size 4"),
    (4, "llama", "--pipeline-model-parallel-size 4"),
    (4, "bloom", "--pipeline-model-parallel-size 2 --zero-stage 2 --micro-batch-size 2"),
    (
        8,
        "gpt2",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --sequence-parallel",
    ),
    (2, "llama", "--tensor-model-parallel-size 2 --use-torch-compile"),
]


@pytest.mark.parametrize(
    ("ranks", "shape", "flags"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.full) for case in LONG)],
)
def test_a_layout_equals_one_process(
    ranks: int,
    shape: str,
    flags: str,
    pool: ProcessPool,
    corpus: str,
    single: dict[str, Path],
    tmp_path: Path,
) -> None:
    for folder, interval in (
        (tmp_path / "on", "--log-layer-stats-interval 2"),
        (tmp_path / "off", ""),
    ):
        argv = command(folder, corpus, shape, NO_DROPOUT, flags, interval)
        succeed(pool.run(ranks, pretrain, argv))
    ours = read_statistics(tmp_path / "on")
    expected = read_statistics(single[shape])
    assert list(ours) == list(expected) == [2, 4]
    for iteration, numbers in expected.items():
        assert ours[iteration] == pytest.approx(numbers, rel=1e-5)
    assert read_statistics(tmp_path / "off") == {}
    assert len(read_curve(tmp_path / "off")) == 4
    assert read_curve(tmp_path / "on") == read_curve(tmp_path / "off")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        pytest.param("--bf16", marks=pytest.mark.full),
        pytest.param("--fp16 --loss-scale 64", marks=pytest.mark.full),
    ],
)
def test_a_run_with_dropout_is_bit_identical(
    flags: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    board = tmp_path / "board"
    for folder, interval in (
        (tmp_path / "on", f"--log-layer-stats-interval 1 --tensorboard-dir {board}"),
        (tmp_path / "off", ""),
    ):
        argv = command(folder, corpus, "gpt2", "--clip-grad 0.1", flags, interval)
        succeed(pool.run(1, pretrain, argv))
    assert read_curve(tmp_path / "on") == read_curve(tmp_path / "off")
    statistics = read_statistics(tmp_path / "on")
    assert list(statistics) == [1, 2, 3, 4]
    # The norm is that before clipping, and without the loss scale.
    for entry in read_metrics(tmp_path / "on" / "metrics.jsonl"):
        layers = math.hypot(*entry["layer_grad_norm"])
        assert 0.1 < layers < entry["grad_norm"] < 100
    events = EventAccumulator(str(board))
    events.Reload()
    for index, key in enumerate(PER_LAYER):
        for layer in range(LAYERS):
            scalars = events.Scalars(f"{key.replace('_', '-')}/{layer}")
            values = [numbers[LAYERS * index + layer] for numbers in statistics.values()]
            assert [scalar.value for scalar in scalars] == pytest.approx(values)
            assert [scalar.step for scalar in scalars] == [1, 2, 3, 4]
