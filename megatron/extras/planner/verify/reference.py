"""The reference: the steps of one process that share as little as possible with the run.

| what              | the run                               | the reference                     |
|-------------------|---------------------------------------|-----------------------------------|
| batch             | microbatches on data-parallel ranks   | one microbatch, read by one rank  |
| labels, masks     | `data/batches.py`, `documents.py`     | formulas of this module           |
| batch size        | `schedule/batch_size.py`              | formulas of this module           |
| parameters        | specs of `model/layer_parts.py`       | `reference_parameters`, by name   |
| initial weights   | `model/init.py`, shard by shard       | formula of name and depth         |
| layers            | `model/`, on slices                   | `model/`, complete                |
| loss, z-loss      | `model/loss.py`, fused and sharded    | torch's cross entropy             |
| losses of experts | `model/experts/routing.py`            | formulas of this module           |
| recomputation     | as configured                         | none                              |
| dropout masks     | `parallel/rng.py`, for each slice     | formulas of `reference_layers`    |
| norm and clipping | sums over ranks                       | a sum over parameters             |
| optimizer         | `engine/optimizer.py` and others      | torch's AdamW, or formulas        |
| resume            | at step 2                             | none                              |

The layers themselves, the goldfish mask, the order of samples, the formula of the learning rate and
the functions that `reference_optimizer` names are the run's own. The reference does not resume, so
it shows what an uninterrupted run computes.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.batch import BatchConfig
from megatron.config.tree import Config
from megatron.extras.planner.verify.recording import ActivationTrace
from megatron.extras.planner.verify.reduction import COMPARED, DROPPED, EOD, use_one_process
from megatron.extras.planner.verify.reference_layers import use_masks, use_recurrence
from megatron.extras.planner.verify.reference_optimizer import (
    Moments,
    Rates,
    ReferenceOptimizer,
    compute_clipping,
)
from megatron.extras.planner.verify.reference_parameters import compute_initial_weight, get_ratios
from megatron.extras.planner.verify.synthetic import Conversations
from megatron.model.experts.routing import BALANCE, Router, find_best, list_routers
from megatron.model.goldfish import find_loss_mask
from megatron.model.gpt import GPT, INPUT_AND_OUTPUT
from megatron.model.inputs import Inputs
from megatron.parallel.mesh import TensorParallel
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the reference. Tensors are by the name of the parameter."""

    inputs: Inputs
    """The global batch in the order of the samples."""
    rates: Rates
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    """Before clipping. The dropped step has none."""
    state: Moments
    """Weights and moments after the step."""
    trace: ActivationTrace


@dataclass
class ReferenceRun:
    """All steps of the reference."""

    initial: dict[str, Tensor]
    steps: list[ReferenceStep] = field(default_factory=list)


def run_reference(plan: Plan, samples: Tensor) -> ReferenceRun:
    """Train the copy's model in this process. The dropped step has only a forward pass.

    Args:
        plan: The plan of the copy.
        samples: The samples of all steps in order, int64[n, s + 1].
    """
    torch.set_num_threads(1)
    config = plan.config
    alone = resolve(use_one_process(config, 1), 1)
    # An error here would be a mistake of the reduction, and not of the user.
    alone.raise_on_errors()
    schedule = alone.lr_schedule
    model = _build_model(alone)
    parameters = dict(model.named_parameters())
    optimizer = ReferenceOptimizer(parameters, config.optimizer, alone.shape)
    use_recurrence(model)
    masks = use_masks(model, plan)
    experts = ReferenceExperts(model, config)
    run = ReferenceRun(_copy(parameters) | experts.copy_biases())
    # A mixture alternates weights and paths.
    paths = config.data.data_path
    if len(paths) > 1:
        paths = paths[1::2]
    conversations = Conversations(paths)
    consumed = 0
    position = (0, 0, 0)
    for iteration in range(1, COMPARED + 1):
        size = compute_batch_size(config.batch, consumed)
        length = plan.get_seq_length(iteration)
        # Samples are read once and in order, for any number of ranks.
        batch = samples[consumed : consumed + size]
        inputs = _build_inputs(batch, length, config.data, conversations)
        decoupled = None
        if schedule.decoupled is not None:
            decoupled = schedule.decoupled.get_lr(*position)
        rates = schedule.get_lr(*position), decoupled
        masks.iteration = iteration
        trace = ActivationTrace()
        with trace.attach([model]), experts.watch():
            loss = _compute_loss(model, inputs, plan, alone.shape.vocab_size)
            if iteration != DROPPED:
                (loss + experts.compute_losses(size)).backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        # fp64, because squares of many elements are added.
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        factor = compute_clipping(config.optimizer, norm)
        for name, gradient in gradients.items():
            parameters[name].grad = gradient * factor
        consumed += size
        # A dropped step reads its samples, and moves neither the optimizer nor the rate.
        if iteration != DROPPED:
            optimizer.step(rates)
            experts.update_biases()
            applied = position[0] + size
            tokens = position[1] + size * length
            warmup = schedule.compute_warmup_tokens(applied, tokens, position[2])
            position = (applied, tokens, warmup)
        model.zero_grad(set_to_none=True)
        weights = _copy(parameters) | experts.copy_biases()
        state = copy.deepcopy(optimizer.moments) | {"weight": weights}
        run.steps.append(
            ReferenceStep(inputs, rates, float(loss.detach()), norm, gradients, state, trace)
        )
    return run


def _build_model(alone: Plan) -> GPT:
    """Return the complete model with its initial weights."""
    seed = alone.config.batch.seed
    # The reference computes the auxiliary losses of experts itself.
    loss = replace(alone.config.loss, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0)
    model = GPT(alone.shape, TensorParallel(), loss=loss)
    for name, parameter in model.named_parameters():
        size = tuple(parameter.shape)
        if name in INPUT_AND_OUTPUT:
            size = (alone.shape.vocab_size, *size[1:])
        # The rows that only pad the vocabulary stay zero.
        parameter.data.zero_()
        parameter.data[: size[0]] = compute_initial_weight(name, size, alone.shape, seed)
    return model.train()


def _copy(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def compute_batch_size(batch: BatchConfig, consumed: int) -> int:
    """Return the batch size after a number of samples, in samples."""
    if batch.rampup_batch_size is not None:
        assert batch.global_batch_size is not None, "a ramp has an end"
        start, increment, samples = batch.rampup_batch_size
        steps = (batch.global_batch_size - start) // increment
        return min(start + consumed * steps // samples * increment, batch.global_batch_size)
    if batch.step_batch_size_schedule is not None:
        first, last = (entry.split(":") for entry in batch.step_batch_size_schedule)
        return int(last[1]) if consumed >= int(last[0].removesuffix("samples")) else int(first[1])
    assert batch.global_batch_size is not None, "the copy has a batch size"
    return batch.global_batch_size


def _build_inputs(batch: Tensor, length: int, data: Any, conversations: Conversations) -> Inputs:
    """Return the inputs of one microbatch with all samples [B, s + 1], shortened to a length."""
    tokens = batch[:, :length]
    documents = []
    positions = torch.empty_like(tokens)
    mask = (tokens != EOD).float()
    # A document begins after each end of a document. An end in the last position begins none.
    for row, sample in enumerate(tokens.tolist()):
        starts = [0, *(i + 1 for i, token in enumerate(sample[:-1]) if token == EOD), length]
        packed = conversations.find(batch[row].numpy())
        if packed is not None:
            starts = [*(start for start in packed[0] if start < length), length]
            mask[row] = torch.from_numpy(packed[1])[1 : length + 1].float()
        documents.append(tuple(starts))
        for begin, end in pairwise(starts):
            positions[row, begin:end] = torch.arange(end - begin)
    return Inputs(
        tokens,
        batch[:, 1 : length + 1],
        mask if data.eod_mask_loss else None,
        positions if data.reset_position_ids else None,
        tuple(documents) if data.reset_attention_mask else None,
    )


def _compute_loss(model: GPT, inputs: Inputs, plan: Plan, vocab_size: int) -> Tensor:
    """Return the mean loss of the batch, by torch's cross entropy in fp32."""
    loss_config = plan.config.loss
    assert model.head is not None, "the model is complete"
    assert model.embedding is not None, "the model is complete"
    weight = model.head.weight
    if weight is None:
        weight = model.embedding.word.weight
    # The projection and the loss of the run are fused and in chunks.
    hidden = model.head.norm(model.run_blocks(None, inputs)) / get_ratios(plan.config.model)[0]
    logits = F.linear(hidden, weight[:vocab_size]).transpose(0, 1)
    assert inputs.labels is not None, "the reference has labels"
    losses = F.cross_entropy(logits.flatten(0, 1), inputs.labels.flatten(), reduction="none")
    # The z-loss counts for the same tokens as cross entropy.
    losses = losses + loss_config.z_loss_coefficient * logits.logsumexp(-1).flatten().square()
    losses = losses.view(inputs.labels.shape)
    mask = find_loss_mask(inputs, loss_config, training=True)
    if mask is None:
        return losses.mean()
    if loss_config.loss_mean == "step":
        return (losses * mask).sum() / mask.sum()
    # The microbatches of the copy are neighbours in the batch, see `list_microbatches`.
    micro = plan.config.batch.micro_batch_size
    means = [
        (part * kept).sum() / kept.sum().clamp(min=1)
        for part, kept in zip(losses.split(micro), mask.split(micro), strict=True)
    ]
    return torch.stack(means).mean()


class ReferenceExperts:
    """What the routers of the reference's model choose in a step, and what follows from it.

    The reference has all samples of a step in one microbatch. The losses depend on the microbatches
    of the copy, which are neighbours in the batch. The model of the reference chooses the experts
    by its own router. Everything that follows from the choices is computed here.
    """

    def __init__(self, model: GPT, config: Config) -> None:
        """Watch the routers of a model without auxiliary losses."""
        self._config = config
        self._routers = list_routers(model)
        for router in self._routers:
            router.allocate(torch.device("cpu"))
        self._seen: list[tuple[Router, Tensor, Tensor]] = []
        """Each router with its logits [n, E] and its choices [n, k]."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the choices of a forward pass in this context."""
        self._seen = []
        handles = [router.register_forward_hook(self._record) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, router: Any, arguments: tuple[Any, ...], choice: Any) -> None:
        logits = F.linear(arguments[0], router.weight, router.bias)
        self._seen.append((router, logits, choice.experts))

    def compute_losses(self, samples: int) -> Tensor:
        """Return the sum of the auxiliary losses x their coefficients.

        Args:
            samples: Samples of the batch. Row i of the logits is of sample i % samples.
        """
        loss = self._config.loss
        total = torch.zeros(())
        size = self._config.batch.micro_batch_size
        if loss.moe_router_load_balancing_type == "seq_aux_loss":
            size = 1
        for _, logits, experts in self._seen:
            parts = torch.arange(len(logits)) % samples // size
            numbers = range(int(parts.max()) + 1)
            if loss.moe_router_load_balancing_type != "none":
                balance = [self._balance(logits[parts == i], experts[parts == i]) for i in numbers]
                total = total + loss.moe_aux_loss_coeff * sum(balance) / len(balance)
            total = total + loss.moe_z_loss_coeff * logits.logsumexp(dim=1).square().mean()
        return total

    def _balance(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Return E sum(f p) of the tokens of a microbatch or a sequence."""
        model = self._config.model
        if model.moe_router_score_function == "sigmoid":
            scores = logits.sigmoid()
            scores = scores / scores.sum(dim=1, keepdim=True)
        else:
            scores = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
        if model.moe_router_enable_expert_bias or model.moe_router_num_groups is not None:
            experts = find_best(scores.detach(), model.moe_router_topk)
        shares = torch.bincount(experts.flatten(), minlength=scores.shape[1]) / experts.numel()
        return scores.shape[1] * (shares * scores.mean(dim=0)).sum()

    def update_biases(self) -> None:
        """Move each bias of balancing by the choices of the step, which was applied."""
        for router, logits, experts in self._seen:
            if router.balance.numel():
                counts = torch.bincount(experts.flatten(), minlength=logits.shape[1])
                mean = experts.numel() / logits.shape[1]
                rate = self._config.loss.moe_router_bias_update_rate
                router.balance += rate * torch.sign(mean - counts)

    def copy_biases(self) -> dict[str, Tensor]:
        """Return the biases of balancing by their names in checkpoints."""
        return {
            f"blocks.{router.layer}{BALANCE}": router.balance.clone()
            for router in self._routers
            if router.balance.numel()
        }
