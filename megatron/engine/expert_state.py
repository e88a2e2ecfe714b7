"""What routers keep beside their parameters: counts of a step, and the bias that balances experts.

The invariant: the bias is the same on all ranks of a stage. It changes once in an applied step, by
the choices of the complete step (https://arxiv.org/abs/2408.15664). Nothing else changes it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.engine.base import ExpertStatistics
from megatron.engine.invariants import Replica
from megatron.model.experts.routing import LOSSES, get_span, list_balance, list_routers
from megatron.model.gpt import GPT
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import TensorShard
from megatron.plan.run_plan import Plan


class ExpertState:
    """The state of this rank's routers. A model without experts has none."""

    def __init__(self, stages: Sequence[GPT], plan: Plan, mesh: Mesh) -> None:
        """Find the routers of this rank's stages."""
        self._routers = [router for stage in stages for router in list_routers(stage)]
        self._layers = sorted(plan.shape.expert_layers)
        self._experts = plan.config.model.num_experts or 0
        self._loss = plan.config.loss
        self._mesh = mesh

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        for router in self._routers:
            router.begin_step()

    def end_step(self, microbatches: int, *, applied: bool) -> ExpertStatistics | None:
        """Return the statistics of a step, and update the bias. All ranks call it together.

        Args:
            microbatches: This rank's number of microbatches.
            applied: Whether the step has updated the weights.
        """
        if not self._layers:
            return None
        # Layers of other stages stay 0, so the sum over all ranks is right.
        sums = torch.zeros(
            (len(self._layers), 2 * self._experts + LOSSES),
            dtype=torch.float64,
            device=self._mesh.device,
        )
        for router in self._routers:
            row = self._layers.index(router.layer)
            sums[row] = torch.cat((router.counts, router.sums))
        if self._mesh.grid.world_size > 1:
            with self._mesh.tensor_parallel.comm_timer():
                dist.all_reduce(sums)
        counts, losses, scores = sums.split((self._experts, LOSSES, self._experts), dim=1)
        if applied:
            self._update_biases(counts)
        # Each is a mean over microbatches. The ranks of a microbatch have a term of it each.
        means = losses / (microbatches * self._mesh.grid.data)
        if get_span(self._loss) is None:
            # No microbatch is balanced, so this is the loss of the step. It has the same choices
            # and scores on each layout.
            shares, parts = (x / x.sum(dim=1, keepdim=True).clamp(min=1) for x in (counts, scores))
            means[:, 0] = self._experts * (shares * parts).sum(dim=1)
        balancing, z_loss, entropy = means.t().tolist()
        return ExpertStatistics(self._layers, counts.long().tolist(), balancing, z_loss, entropy)

    def _update_biases(self, counts: torch.Tensor) -> None:
        below = torch.sign(counts.mean(dim=1, keepdim=True) - counts)
        for router in self._routers:
            if router.balance.numel():
                row = below[self._layers.index(router.layer)]
                router.balance.add_(row.float(), alpha=self._loss.moe_router_bias_update_rate)

    def list_shards(self) -> list[TensorShard]:
        """Return the biases as tensors of a checkpoint."""
        ranks = self._mesh.expert_parallel
        owner = ranks is None or ranks.stage.rank == 0
        return [shard for router in self._routers for shard in list_balance(router, owner=owner)]

    def list_replicas(self) -> tuple[dist.ProcessGroup | None, list[Replica]]:
        """Return the group whose ranks have the same biases, with this rank's."""
        ranks = self._mesh.expert_parallel
        return (
            None if ranks is None else ranks.stage.group,
            [Replica(shard.name, "weight", shard.tensor) for shard in self.list_shards()],
        )
