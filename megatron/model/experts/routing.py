"""The router: which experts a token uses, with which weights, and the losses that balance them.

Logits and scores are computed in fp32. Of equal scores, the expert with the lower number is chosen.
The chosen experts of a token are in ascending order.

Each auxiliary loss is a mean over the tokens of a microbatch or of its sequences, with all of their
positions on tensor- and context-parallel ranks. So its gradient has the divisor of the loss of a
microbatch: microbatches, and data-parallel ranks. Layers are added up. Only its gradient enters the
step, and the logged loss stays cross entropy.

The invariant: a microbatch is routed once. A recomputation takes the same choices, and counts
nothing again. Neither does an evaluation.

n: tokens that this rank routes, E: experts, k: experts of a token.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.loss import LossConfig
from megatron.config.model import ModelConfig
from megatron.model.experts.dispatch import count_choices
from megatron.model.layer_parts import MLPS
from megatron.model.shape import ModelShape
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layers import make_replicated_inside_region
from megatron.parallel.mesh import ContextParallel, ExpertParallel, TensorParallel
from megatron.parallel.shard import TensorShard
from megatron.parallel.spmd import declare

_EPS = 1e-20
"""Added to a sum of scores before a division by it, as in Megatron-LM."""
BALANCE = ".mlp.router.balance"
"""End of the name of a bias of balancing in checkpoints."""
LOSSES = 3
"""First numbers of `Router.sums`: the balancing loss, the z-loss, and the entropy."""


@dataclass(frozen=True)
class Routing:
    """What the routers of one microbatch share. It is made once for a microbatch."""

    factor: float = 1.0
    """The factor on the loss of the microbatch before its backward pass."""
    sequences: int = 1
    """Sequences of the microbatch. Row i of the residual stream is of sequence i % sequences."""
    choices: dict[int, Tensor] = field(default_factory=dict)
    """Number of a layer -> the experts of each token, [n, k]. A router uses what it finds here."""
    shares: dict[int, Tensor] = field(default_factory=dict)
    """Number of a layer -> the experts' shares of the choices, [sequences or 1, E]."""


@dataclass(frozen=True)
class ExpertChoice:
    """The experts of n tokens."""

    experts: Tensor
    """int64[n, k], ascending."""
    weights: Tensor
    """fp32[n, k]."""
    loss: Tensor | None
    """The auxiliary losses x their coefficients, a scalar, or None without any."""


@declare()
class _AddLoss(torch.autograd.Function):
    """Return x, and send `factor` to the gradient of a loss that nothing else reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(torch.full_like(loss, factor))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grads[0], factor, None


def add_loss(x: Tensor, loss: Tensor | None, factor: float) -> Tensor:
    """Return x. Its backward pass also adds the gradients of `factor` x `loss`."""
    if loss is None or not torch.is_grad_enabled():
        return x
    return _AddLoss.apply(x, loss, factor)


def find_best(scores: Tensor, k: int) -> Tensor:
    """Return the places of the k largest of [.., E], the largest first, [.., k]."""
    # `topk` does not say which of equal scores it takes.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def choose_experts(scores: Tensor, config: ModelConfig) -> Tensor:
    """Return the experts of each token, int64[n, k], ascending.

    Args:
        scores: fp32[n, E], with the bias of balancing.
        config: The number of experts, and the groups that are allowed.
    """
    k = config.moe_router_topk
    if config.moe_router_num_groups is not None:
        assert config.moe_router_group_topk is not None, "the plan needs both"
        groups = scores.unflatten(-1, (config.moe_router_num_groups, -1))
        best = groups.sort(dim=-1, descending=True).values
        # On average, an allowed group gives this many experts.
        counted = {"sum": k // config.moe_router_group_topk, "max": 1}
        # [n, groups].
        of_group = best[..., : counted[config.moe_router_group_score]].sum(dim=-1)
        allowed = torch.zeros_like(of_group, dtype=torch.bool)
        allowed.scatter_(1, find_best(of_group, config.moe_router_group_topk), value=True)
        scores = groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    return find_best(scores, k).sort(dim=-1).values


def weigh_experts(logits: Tensor, experts: Tensor, config: ModelConfig) -> Tensor:
    """Return the weights of the chosen experts, fp32[n, k].

    Args:
        logits: fp32[n, E].
        experts: int64[n, k].
        config: How scores become weights.
    """
    match config.moe_router_score_function:
        case "sigmoid":
            weights = logits.gather(1, experts).sigmoid()
            if config.moe_router_topk > 1:
                weights = weights / (weights.sum(dim=1, keepdim=True) + _EPS)
        case "softmax" if config.moe_router_pre_softmax:
            weights = logits.softmax(dim=1).gather(1, experts)
        case "softmax":
            weights = logits.gather(1, experts).softmax(dim=1)
        case _:
            assert_never(config.moe_router_score_function)
    if config.moe_router_topk_scaling_factor is not None:
        weights = weights * config.moe_router_topk_scaling_factor
    return weights


def get_span(loss: LossConfig) -> Literal["microbatch", "sequence", "step"] | None:
    """Return whose choices the balancing loss compares. None: there is no such loss."""
    match loss.moe_router_load_balancing_type:
        case "aux_loss":
            return "microbatch"
        case "seq_aux_loss":
            return "sequence"
        case "global_aux_loss":
            return "step"
        case "none":
            return None
        case _:
            assert_never(loss.moe_router_load_balancing_type)


class Router(nn.Module):
    """Chooses the experts of tokens, and counts the choices of a step."""

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        loss: LossConfig,
        tp: TensorParallel,
        context: ContextParallel,
        ranks: ExpertParallel,
    ) -> None:
        """Create the weights.

        Args:
            shape: Sizes of the model.
            layer: Number of the layer in the complete model.
            loss: The auxiliary losses.
            tp: The tensor-parallel ranks, which share the tokens of a microbatch.
            context: The ranks that share its sequences.
            ranks: The ranks that divide the experts.
        """
        super().__init__()
        config = shape.config
        assert config.num_experts is not None, "a router has experts"
        self._config = config
        self._loss = loss
        self.layer = layer
        self.experts = config.num_experts
        self._tp = tp
        self._context = context
        self._ranks = ranks
        specs = MLPS.require("experts").list_parameters(shape)
        # Each tensor-parallel rank routes some of the tokens.
        self.weight = make_replicated_inside_region(specs["router.weight"], tp)
        self.bias: nn.Parameter | None = None
        if shape.has_mlp_bias:
            self.bias = make_replicated_inside_region(specs["router.bias"], tp)
        self.balance = torch.empty(0)
        """The bias of balancing, fp32[E], the same on all ranks. It is empty if there is none."""
        self.counts = torch.empty(0)
        """How often this rank's tokens of the step have chosen each expert, fp64[E]."""
        self.sums = torch.empty(0)
        """Sums of this rank over its microbatches of the step, fp64[LOSSES + E]. The last E numbers
        are the sums of the scores of its tokens."""

    def allocate(self, device: torch.device) -> None:
        """Create what is no parameter, filled with zeros.

        It keeps its dtype and its place, whatever the precision of the model is.
        """
        if self._config.moe_router_enable_expert_bias:
            self.balance = torch.zeros(self.experts, device=device)
        self.counts = torch.zeros(self.experts, dtype=torch.float64, device=device)
        self.sums = torch.zeros(LOSSES + self.experts, dtype=torch.float64, device=device)

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        self.counts.zero_()
        self.sums.zero_()

    def forward(self, x: Tensor, first: int, total: int, routing: Routing) -> ExpertChoice:
        """Choose the experts of n tokens.

        Args:
            x: [n, h], the tokens that this rank routes.
            first: Number of the first of them among the rows of the residual stream.
            total: Tokens of the microbatch on this context-parallel rank.
            routing: The microbatch.
        """
        if not self.counts.numel():
            self.allocate(x.device)
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(x.float(), self.weight.float(), bias)
        experts = routing.choices.get(self.layer)
        if experts is None:
            with torch.no_grad():
                experts = choose_experts(self._score(logits, balanced=True), self._config)
            # An evaluation has one pass, and keeps nothing.
            if self.training:
                routing.choices[self.layer] = experts
        loss = None
        if self.training:
            loss = self._compute_losses(logits, experts, first, total, routing)
        return ExpertChoice(experts, weigh_experts(logits, experts, self._config), loss)

    def _score(self, logits: Tensor, *, balanced: bool) -> Tensor:
        """Return the scores that choose the experts, fp32[n, E]."""
        match self._config.moe_router_score_function:
            case "sigmoid":
                scores = logits.sigmoid()
            case "softmax":
                spread = self._config.moe_router_pre_softmax or not balanced
                scores = logits.softmax(dim=1) if spread else logits
            case _:
                assert_never(self._config.moe_router_score_function)
        if balanced and self._config.moe_router_enable_expert_bias:
            scores = scores + self.balance
        return scores

    def _compute_losses(
        self, logits: Tensor, experts: Tensor, first: int, total: int, routing: Routing
    ) -> Tensor | None:
        """Return the auxiliary losses x their coefficients, and count the choices.

        Args:
            logits: fp32[n, E].
            experts: int64[n, k].
            first: See `forward`.
            total: See `forward`.
            routing: The microbatch.
        """
        tokens = total * self._context.size
        weight = self._loss.moe_aux_loss_coeff
        if get_span(self._loss) is None:
            weight = 0.0
        again = self.layer in routing.shares
        with torch.set_grad_enabled(torch.is_grad_enabled() and weight > 0):
            scores = self._score(logits, balanced=False)
            if self._config.moe_router_score_function == "sigmoid":
                scores = scores / (scores.sum(dim=1, keepdim=True) + _EPS)
            members = self._find_sequences(len(scores), first, routing)
            if not again:
                routing.shares[self.layer] = self._find_shares(scores.detach(), experts, members)
            # E sum(f p), where f is an expert's share of the choices, and p its mean score. The sum
            # over the ranks of the microbatch is its loss.
            means = members @ scores * (len(members) / tokens)
            balancing = self.experts * (routing.shares[self.layer] * means).sum() / len(members)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._loss.moe_z_loss_coeff > 0):
            z_loss = logits.logsumexp(dim=1).square().sum() / tokens
        if not again:
            self._record(scores.detach(), experts, balancing, z_loss, tokens)
        loss = weight * balancing + self._loss.moe_z_loss_coeff * z_loss
        # Context-parallel ranks have a part of the tokens each. Their gradients are averaged.
        return loss * self._context.size if loss.requires_grad else None

    @torch.no_grad()
    def _record(
        self, scores: Tensor, experts: Tensor, balancing: Tensor, z_loss: Tensor, tokens: int
    ) -> None:
        """Add a microbatch to the counts and sums of the step."""
        self.counts += count_choices(experts, self.experts)
        entropy = torch.special.entr(scores).sum() / tokens
        losses = torch.stack((balancing, z_loss, entropy))
        self.sums += torch.cat((losses, scores.sum(dim=0)))

    def _find_sequences(self, n: int, first: int, routing: Routing) -> Tensor:
        """Return 1 where a token is of a sequence, [sequences, n].

        If the sequences are not balanced one by one, all tokens are of one.
        """
        device = self.counts.device
        if get_span(self._loss) != "sequence":
            return torch.ones((1, n), device=device)
        numbers = torch.arange(first, first + n, device=device) % routing.sequences
        return (numbers == torch.arange(routing.sequences, device=device)[:, None]).float()

    @torch.no_grad()
    def _find_shares(self, scores: Tensor, experts: Tensor, members: Tensor) -> Tensor:
        """Return the experts' shares of the choices of a microbatch, [sequences, E].

        Args:
            scores: fp32[n, E], without the bias of balancing.
            experts: int64[n, k].
            members: What `_find_sequences` returned.
        """
        config = self._config
        span = get_span(self._loss)
        if config.moe_router_enable_expert_bias or config.moe_router_num_groups is not None:
            # What the scores alone would choose, as in DeepSeek-V3, 2.1.2.
            experts = find_best(scores, config.moe_router_topk)
        counts = members @ torch.zeros_like(scores).scatter_(1, experts, 1.0)
        if span == "step":
            # The choices of the step so far, of all ranks.
            all_reduce(counts.add_(self.counts), self._ranks.stage)
        elif span is not None:
            all_reduce(counts, self._tp)
            all_reduce(counts, self._context)
        return counts / counts.sum(dim=1, keepdim=True)


def list_routers(model: nn.Module) -> list[Router]:
    """Return the routers of a model, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


def list_balance(router: Router, *, owner: bool) -> list[TensorShard]:
    """Return the bias of balancing as a tensor of a checkpoint, if the router has one.

    Args:
        router: The router.
        owner: Whether this rank stores it.
    """
    if not router.balance.numel():
        return []
    name = f"blocks.{router.layer}{BALANCE}"
    shape = tuple(router.balance.shape)
    return [TensorShard("weight", name, shape, (0,), router.balance, owner=owner)]
