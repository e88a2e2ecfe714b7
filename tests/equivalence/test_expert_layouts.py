"""Tests that experts on several ranks equal one process.

Compared are loss, norm, the loads of all experts, the auxiliary losses and the entropy of each
step, the gradient of each parameter, an evaluation and likelihoods. The loads are integers, so
one token with another expert is found.
"""

import dataclasses
from typing import Any

import pytest
import torch
from equivalence.test_context_layouts import (
    BOUND,
    EOD,
    FIXTURES,
    NO_DROPOUT,
    STEADY,
    Train,
    find_worst,
    make_train_world,
)
from process_pool import ProcessPool, succeed
from suites import by_suite

from megatron.config.loss import LossConfig

SIZES = (
    "--num-layers 3 --hidden-size 48 --num-attention-heads 12 --seq-length 32 "
    f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt "
    "--make-vocab-size-divisible-by 7 --lr 1e-3 --lr-decay-style constant --eval-iters 1 "
    f"--split 80,20,0 --untie-embeddings-and-output-weights --num-experts 8 {NO_DROPOUT} "
    "--init-method-std 0.1"
)
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--ffn-hidden-size 64 --moe-ffn-hidden-size 20 --num-query-groups 4 --no-add-bias-linear"
)
# Batch sizes from 4 to 12. Two batches of the short suite have 4 samples, and one has 8.
RAMP = f"--rampup-batch-size 4 4 {by_suite(16, 24)} --global-batch-size 12 --train-samples 88"
MODELS = {
    # All layers have experts with biases, and widths that no kernel takes.
    # Attention has none: the gradient of a key's bias is rounding, and Adam makes steps of it.
    "biases, losses": f"{STEADY} --no-add-bias-linear --add-mlp-bias --moe-ffn-hidden-size 21 "
    "--moe-aux-loss-coeff 0.05 "
    "--moe-z-loss-coeff 0.01 --log-layer-stats-interval 10",
    "sigmoid, groups, bias of balancing, shared expert, documents": f"{RAMP} {LLAMA} {EOD} "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk 4 "
    "--moe-router-bias-update-rate 0.01 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 2.5 --moe-layer-freq ([0]*1+[1]*2) "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --hidden-dropout 0.1 "
    "--attention-dropout 0.1 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.05",
    # 32 experts for 64 tokens: some have none in most steps.
    "empty experts, goldfish": f"{STEADY} {LLAMA} --num-experts 32 --moe-router-topk 1 "
    "--moe-router-pre-softmax "
    "--moe-router-pre-softmax --goldfish-loss --goldfish-k 3 --goldfish-h 5 "
    "--moe-layer-freq 2 --moe-router-load-balancing-type none",
}
FIRST, GROUPS, EMPTY = MODELS
MUON = "--optimizer muon --muon-scale-mode unit_rms_norm --muon-fp32-matmul-prec high"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
EP = "--expert-model-parallel-size"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks that divide experts, and what else divides the model or the batch."""

    name: str
    ranks: int
    flags: str
    micro_batch_size: int = 1
    common: str = ""
    """Flags that one process gets too."""
    models: tuple[str, ...] = tuple(MODELS)
    short: bool = False


LAYOUTS = [
    Layout("data 2, experts on each rank", 2, ""),
    Layout("EP 2", 2, f"{EP} 2", micro_batch_size=2),
    Layout("EP 4 = data 4", 4, f"{EP} 4"),
    # Each tensor-parallel rank routes 1 of 2 parts of the tokens.
    Layout("TP 2, experts on each rank", 2, TP2, models=(FIRST, GROUPS)),
    Layout("TP 2, EP 4 on 4 ranks", 4, f"{TP2} {EP} 4", short=True),
    Layout("TP 4, EP 2, no data-parallel rank", 4, f"--tensor-model-parallel-size 4 {EP} 2"),
    Layout(
        "EP 2, TP 2, PP 2, sequence parallelism",
        8,
        f"{TP2} {PP2} {EP} 2 --sequence-parallel",
        models=(GROUPS,),
        short=True,
    ),
    Layout(
        "EP 2, TP 2, PP 2, sequence parallelism, all models",
        8,
        f"{TP2} {PP2} {EP} 2 --sequence-parallel",
    ),
    Layout(
        "EP 2, CP 2, ZeRO 3, one model",
        4,
        f"--context-parallel-size 2 {EP} 2 --zero-stage 3",
        models=(FIRST,),
        short=True,
    ),
    Layout("EP 2, CP 2, ZeRO 3", 4, f"--context-parallel-size 2 {EP} 2 --zero-stage 3"),
    Layout("EP 4 = CP 2 x TP 2", 4, f"--context-parallel-size 2 {TP2} {EP} 4"),
    Layout("EP 2, data 4, ZeRO 3", 4, f"{EP} 2 --zero-stage 3"),
    Layout("EP 2, data 4, ZeRO 2", 4, f"{EP} 2 --zero-stage 2", common="--optimizer ademamix"),
    # No rank shares weights, and the experts are on the ranks of several copies.
    Layout("EP 2, data 4, ZeRO 0", 4, f"{EP} 2 --zero-stage 0"),
    Layout(
        "EP 2 in copies of 2",
        4,
        f"{EP} 2 --sharding-strategy hsdp --hsdp-shard-size 2 --zero-stage 3",
    ),
    Layout(
        "EP 4 over copies of 2",
        4,
        f"{EP} 4 --sharding-strategy hsdp --hsdp-shard-size 2 --zero-stage 3",
    ),
    Layout(
        "interleaved, EP 2, recomputed",
        4,
        f"{PP2} {EP} 2 --num-layers-per-virtual-pipeline-stage 1 --checkpoint-activations",
        common="--num-layers 4 --moe-layer-freq 1",
        models=(FIRST, GROUPS),
    ),
    Layout(
        "EP 2, half recomputed, input divided",
        4,
        f"{TP2} {EP} 2 --checkpoint-activations --checkpoint-fraction 1/2 --partition-activations",
    ),
    Layout("Muon, EP 2, data 4", 4, f"{EP} 2", common=MUON),
    Layout("Muon, EP 4 over data 2 x TP 2", 4, f"{TP2} {EP} 4", common=MUON, models=(FIRST,)),
    Layout("Muon, EP 2, ZeRO 0", 4, f"{EP} 2 --zero-stage 0", common=MUON, models=(FIRST, GROUPS)),
    Layout(
        "EP 3 of 9 = TP 3",
        3,
        f"--tensor-model-parallel-size 3 {EP} 3",
        common="--num-experts 9",
        models=(FIRST,),
    ),
    Layout("compiled", 2, f"{EP} 2 --use-torch-compile", models=(GROUPS,), common="--seed 5"),
]


@pytest.fixture(scope="module")
def train_world(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """See `make_train_world`."""
    paths = f"--data-path {corpus} --data-cache-path {tmp_path_factory.mktemp('cache')}"
    return make_train_world(pool, f"{SIZES} {paths}", MODELS)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=each.name, marks=() if each.short else pytest.mark.full)
        for each in LAYOUTS
    ],
)
def test_experts_on_several_ranks_equal_one_process(layout: Layout, train_world: Train) -> None:
    # Auxiliary losses depend on the microbatches, so both have the same.
    flags = f"{layout.common} --micro-batch-size {layout.micro_batch_size}"
    alone = train_world(1, layout.models, flags)
    together = train_world(layout.ranks, layout.models, f"{flags} {layout.flags}")
    for model, found, expected in zip(layout.models, together, alone, strict=True):
        worst = find_worst(found, expected)
        assert max(worst.values()) < BOUND, f"{model}: {worst}"


def test_the_models_have_what_their_names_say(train_world: Train) -> None:
    results = train_world(1, tuple(MODELS), "--micro-batch-size 1")
    for model, (steps, *_) in zip(MODELS, results, strict=True):
        layers = 3 if model == FIRST else 2
        experts = 32 if model == EMPTY else 8
        loads = torch.tensor(steps)[:, 2 : 2 + layers * experts].view(len(steps), layers, experts)
        assert (bool((loads == 0).any())) == (model == EMPTY), model
        assert len(loads[0].flatten().unique()) > 1


def exchange(choices: dict[int, list[list[list[int]]]]) -> list[Any]:
    """Send tokens to their experts on this rank's group and back. Return what each case gave.

    Args:
        choices: Number of experts -> the choices of each rank.
    """
    import torch.distributed as dist

    from megatron.model.experts.dispatch import plan_dispatch
    from megatron.parallel.mesh import ExpertParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = ExpertParallel(size, rank, dist.group.WORLD)
    results = []
    for experts, of_ranks in choices.items():
        choice = torch.tensor(of_ranks[rank], dtype=torch.long).view(-1, 2)
        x = (torch.arange(len(choice) * 3.0).view(-1, 3) + 100 * rank).requires_grad_()
        plan = plan_dispatch(choice, experts, ranks)
        rows = plan.send(x)
        local = experts // size
        starts = [0, *plan.ends.tolist()]
        # Each expert multiplies by its number + 1.
        factors = [rank * local + i + 1.0 for i in range(local) for _ in range(*starts[i : i + 2])]
        out = plan.send_back(rows * torch.tensor(factors).view(-1, 1))
        (out * torch.arange(1.0, 3.0)[None, :, None]).sum().backward()
        results.append((len(rows), out.detach(), x.grad))
    dist.destroy_process_group()
    return results


def test_tokens_reach_their_experts_also_if_all_choose_one(pool: ProcessPool) -> None:
    cases = {
        6: [[[0, 1], [4, 5]], [[2, 3]], [[0, 5], [1, 4], [2, 3]]],
        # All on the last expert and the one before it. A rank without tokens.
        9: [[[7, 8]] * 4, [[7, 8]], []],
        12: [[[0, 11]], [[0, 11]], [[0, 11]]],
    }
    outcomes = pool.run(3, exchange, cases)
    succeed(outcomes)
    for number, of_ranks in enumerate(cases.values()):
        received = [outcome.value[number][0] for outcome in outcomes]
        assert sum(received) == 2 * sum(map(len, of_ranks))
        for rank, choices in enumerate(of_ranks):
            _, out, gradient = outcomes[rank].value[number]
            x = torch.arange(len(choices) * 3.0).view(-1, 3) + 100 * rank
            factors = torch.tensor(choices).view(-1, 2) + 1.0
            assert torch.equal(out, x[:, None] * factors[..., None])
            assert torch.equal(
                gradient, (factors @ torch.tensor([1.0, 2.0]))[:, None].expand(-1, 3)
            )
    assert [outcome.value[1][0] for outcome in outcomes] == [0, 0, 10]


def test_the_losses_of_a_model_are_those_of_its_flags() -> None:
    """A default that changed would make the comparisons above weaker."""
    assert LossConfig().moe_aux_loss_coeff == 0
