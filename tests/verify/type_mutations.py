"""Known errors of trainers that the check of types finds at the real size of a run."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

_LENGTH = "--micro-batch-size 1 --train-iters 10 --lr 1e-4 --bf16 --data-path data/absent"
LARGE = (
    "--preset llama2-70b --num-layers 2 --tensor-model-parallel-size 8 --global-batch-size 2048 "
    f"{_LENGTH}"
)
"""70B on 16,384 ranks, with two layers, so that a test is short."""
STAGES = f"{LARGE} --num-layers 8 --pipeline-model-parallel-size 8"
"""The same ranks in eight stages of one layer."""
EXPERTS = (
    "--preset qwen3-30b-a3b --num-layers 2 --expert-model-parallel-size 8 "
    f"--global-batch-size 512 {_LENGTH}"
)
LATENT = (
    "--preset deepseek-v2-lite --num-layers 1 --num-experts None --tensor-model-parallel-size 2 "
    f"--global-batch-size 512 {_LENGTH}"
)
COPIES = (
    f"--preset llama2-7b --num-layers 2 --sharding-strategy hsdp --global-batch-size 512 {_LENGTH}"
)


@dataclass(frozen=True)
class TypeMutation:
    """An error, and what the report must say about it."""

    change: Callable[[], AbstractContextManager[Any]]
    says: tuple[str, ...]
    flags: str = LARGE
    world_size: int = 16384


@contextmanager
def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


def leave_row_parallel_products_apart() -> AbstractContextManager[Any]:
    from megatron.parallel import layers

    return _wrap(
        layers.RowParallelLinear,
        "forward",
        lambda _: lambda layer, x: layer._multiply(x, layer.bias),
    )


def leave_rotary_key_apart() -> AbstractContextManager[Any]:
    from megatron.model import latent_attention

    return _wrap(latent_attention, "enter_tensor_parallel", lambda _: lambda x, tp: x)


def leave_input_gradients_partial() -> AbstractContextManager[Any]:
    from megatron.parallel import entered_linear
    from megatron.parallel.collectives import PendingTensor

    return _wrap(
        entered_linear,
        "_begin_sum",
        lambda _: lambda partial, tp: PendingTensor(partial),
    )


def leave_norm_gradients_partial() -> AbstractContextManager[Any]:
    from megatron.engine import native

    return _wrap(
        native,
        "add_over_tensor_ranks",
        lambda add: lambda partial, replicated, tp: add([], replicated, tp),
    )


def add_up_equal_gradients() -> AbstractContextManager[Any]:
    from megatron.engine import native

    return _wrap(
        native,
        "add_over_tensor_ranks",
        lambda add: lambda partial, replicated, tp: add([*partial, *replicated], [], tp),
    )


def mark_no_gradient_partial() -> AbstractContextManager[Any]:
    """Norms are replicated, and with sequence parallelism each has the gradient of its tokens."""
    from megatron.model import norm
    from megatron.parallel.layers import make_parameter

    defaults = norm.build_norm.__defaults__
    assert defaults is not None, "the last one makes the parameters"
    changed = (*defaults[:-1], lambda spec, tp: make_parameter(spec.shape, spec))
    return patch.object(norm.build_norm, "__defaults__", changed)


def count_replicas_in_norm() -> AbstractContextManager[Any]:
    from megatron.engine.native import NativeEngine

    return _wrap(
        NativeEngine,
        "_list_counted",
        lambda _: lambda engine: [m for m in engine._masters if m.weight.numel()],
    )


def omit_other_experts_in_norm() -> AbstractContextManager[Any]:
    from megatron.engine.native import NativeEngine

    def make(is_counted: Any) -> Any:
        def check(engine: Any, master: Any) -> bool:
            first = engine._mesh.expert_parallel.rank == 0
            return is_counted(engine, master) and (first or not master.spec.by_expert)

        return check

    return _wrap(NativeEngine, "_is_counted", make)


def keep_norm_of_own_stage() -> AbstractContextManager[Any]:
    from types import SimpleNamespace

    from megatron.engine.native import NativeEngine

    def make(add: Any) -> Any:
        def add_others(engine: Any, values: Any) -> Any:
            added = add(engine, values.clone())

            def read() -> list[float]:
                own = values.tolist()[1]
                return [own if at == 1 else each for at, each in enumerate(added.tolist())]

            return SimpleNamespace(tolist=read)

        return add_others

    return _wrap(NativeEngine, "_add_over_ranks", make)


def keep_own_part_of_vocabulary() -> AbstractContextManager[Any]:
    from megatron.model import loss

    return _wrap(
        loss,
        "_combine",
        lambda _: lambda top, total, target, tp, hit=None: (top, total, target, hit),
    )


def skip_message_on_last_rank() -> AbstractContextManager[Any]:
    from megatron.parallel import collectives

    return _wrap(
        collectives,
        "_sum",
        lambda add: lambda x, tp: x.clone() if tp.rank == tp.size - 1 else add(x, tp),
    )


def reduce_in_other_precision_on_last_rank() -> AbstractContextManager[Any]:
    """A branch on the rank's number, which its own types cannot show."""
    import torch

    from megatron.engine.sharding import _TimedReduceScatter

    def make(reduce: Any) -> Any:
        def call(timed: Any, *tensors: Any, group: Any, **options: Any) -> Any:
            if group.rank() == group.size() - 1:
                timed._dtype = torch.bfloat16
            return reduce(timed, *tensors, group=group, **options)

        return call

    return _wrap(_TimedReduceScatter, "__call__", make)


def leave_expert_gradients_unscaled() -> AbstractContextManager[Any]:
    from megatron.engine.native import NativeEngine

    return _wrap(NativeEngine, "_scale_expert_gradients", lambda _: lambda engine: None)


def leave_copies_apart() -> AbstractContextManager[Any]:
    from megatron.engine.sharding import _CopyReduction

    return _wrap(_CopyReduction, "__call__", lambda _: lambda reduction, reduced: None)


def send_other_precision_from_first_stage() -> AbstractContextManager[Any]:
    import torch.distributed as dist

    from megatron.engine.pipeline_runner import _Stage

    def make(prepare: Any) -> Any:
        def send(stage: Any, ops: list[Any]) -> list[Any]:
            made = prepare(stage, ops)
            if not stage.is_first:
                return made
            return [
                dist.P2POp(op.op, op.tensor.float(), group=op.group, group_peer=op.group_peer)
                for op in made
            ]

        return send

    return _wrap(_Stage, "_prepare_messages", make)


def leave_tied_gradients_apart() -> AbstractContextManager[Any]:
    from megatron.engine.native import NativeEngine

    return _wrap(NativeEngine, "_add_tied_gradients", lambda _: lambda engine: None)


SEQUENCE = f"{LARGE} --sequence-parallel"
TYPE_MUTATIONS = {
    "row-parallel products are not added up": TypeMutation(
        leave_row_parallel_products_apart, ("Invariant type on axis tensor", "model/block.py")
    ),
    "input gradients of column-parallel layers stay partial": TypeMutation(
        leave_input_gradients_partial,
        ("_EnteredLinears.backward (parallel/entered_linear.py", "must send all_reduce"),
    ),
    "the gradient of the rotary key stays partial": TypeMutation(
        leave_rotary_key_apart,
        ("model/latent_attention.py", "Invariant type on axis"),
        LATENT,
        16,
    ),
    "gradients of norms stay partial": TypeMutation(
        leave_norm_gradients_partial,
        ("norm", "added up 0 times over the tensor-parallel"),
        SEQUENCE,
    ),
    "gradients of norms are taken as equal": TypeMutation(
        mark_no_gradient_partial, ("Invariant type on axis tensor", "model/norm.py"), SEQUENCE
    ),
    "equal gradients are added up": TypeMutation(
        add_up_equal_gradients, ("equal on all tensor-parallel ranks (I)",)
    ),
    "the norm counts replicas on each rank": TypeMutation(
        count_replicas_in_norm, ("the norm of pipeline", "counts it 1 times, and must 0 times")
    ),
    "the norm omits other experts": TypeMutation(
        omit_other_experts_in_norm, ("experts.up", "counts it 0 times"), EXPERTS, 64
    ),
    "the norm is that of a stage": TypeMutation(
        keep_norm_of_own_stage, ("the squared norm is added up over no group",)
    ),
    "the loss is that of a part of the vocabulary": TypeMutation(
        keep_own_part_of_vocabulary, ("_LinearCrossEntropy.forward (model/loss.py", "all_gather")
    ),
    "the last rank skips a message": TypeMutation(
        skip_message_on_last_rank, ("rank 16383", "_Reduce.forward", "sends nothing")
    ),
    "the last rank reduces in another precision": TypeMutation(
        reduce_in_other_precision_on_last_rank,
        ("ranks 0 ", "reduce_scatter of float32", "reduce_scatter of bfloat16", "sharding.py"),
        COPIES,
        512,
    ),
    "gradients of experts are not scaled": TypeMutation(
        leave_expert_gradients_unscaled, ("experts.up: its gradient is divided by 8,",), EXPERTS, 64
    ),
    "gradients of copies are not averaged": TypeMutation(
        leave_copies_apart, ("must send 1 x reduce_scatter AVG over 8", "all_reduce"), COPIES, 512
    ),
    "the first stage sends another precision": TypeMutation(
        send_other_precision_from_first_stage,
        ("messages between stages, forward", "float32", "bfloat16"),
        STAGES,
    ),
    "gradients of a tied embedding stay apart": TypeMutation(
        leave_tied_gradients_apart,
        ("word.weight", "0 times over the first and last stage"),
        f"{STAGES} --no-untie-embeddings-and-output-weights",
    ),
}
