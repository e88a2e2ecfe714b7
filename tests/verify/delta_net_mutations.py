"""Known errors of gated delta nets, as changes in one process. See `mutations.py`."""

from collections.abc import Callable
from typing import Any

import torch
from verify.mutation import MEGATRON, NO_DROPOUT, TP, Mutation, wrap

HYBRID = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 16 "
    f"--linear-value-head-dim 16 {NO_DROPOUT}"
)
DOCUMENTS = f"--reset-position-ids --reset-attention-mask --eod-mask-loss {HYBRID}"
CP = "--context-parallel-size 2"
NOT_REPORTED = "no public report"
FIRST = "forward pass, output of blocks.0.attention on rank 0"


def change_documents(change: Callable[[Any, Any], Any], *names: str) -> None:
    """Give functions of the layer other documents. `change` gets the input and the documents."""
    from megatron.model import gated_delta_net

    for name in names:

        def make(compute: Any) -> Any:
            def compute_with(*args: Any) -> Any:
                at = {"convolve": 2, "apply_delta_rule": 5}[compute.__name__]
                documents = args[at]
                # The first pass of FSDP2 has none.
                if documents is not None:
                    documents = change(args[0], documents)
                return compute(*args[:at], documents, *args[at + 1 :])

            return compute_with

        wrap(gated_delta_net, name, make)


def keep_state_over_documents() -> None:
    change_documents(lambda x, documents: None, "apply_delta_rule")


def convolve_over_documents() -> None:
    change_documents(lambda x, documents: None, "convolve")


def convolve_parts_alone() -> None:
    """The four parts of the sequence that two ranks hold have no neighbours."""

    def divide(x: Any, documents: Any) -> Any:
        length = len(x)
        parts = {length // 4, length // 2, length * 3 // 4}
        return tuple(tuple(sorted(parts.union(bounds))) for bounds in documents)

    change_documents(divide, "convolve")


def use_borders_of_own_part() -> None:
    def shorten(x: Any, documents: Any) -> Any:
        return tuple(
            (*sorted({border // 2 for border in bounds[:-1]}), bounds[-1]) for bounds in documents
        )

    change_documents(shorten, "convolve", "apply_delta_rule")


def leave_positions_in_the_order_of_ranks() -> None:
    from megatron.model import gated_delta_net
    from megatron.parallel.context import _Exchange

    def gather(sent: Any, context: Any) -> Any:
        return torch.cat(_Exchange.apply(sent.movedim(1, 0), context).unbind(), dim=2)

    wrap(gated_delta_net, "gather_positions", lambda _: gather)


def take_decays_of_first_heads() -> None:
    from megatron.model.gated_delta_net import GatedDeltaNet

    def make(mix: Any) -> Any:
        def mix_with_first(layer: Any, *args: Any) -> Any:
            own = layer.A_log
            half = own.chunk(2)[0]
            # The parameter cannot be replaced by a tensor while it is registered.
            del layer._parameters["A_log"]
            layer.A_log = torch.cat((half, half))
            try:
                return mix(layer, *args)
            finally:
                del layer.A_log
                layer.register_parameter("A_log", own)

        return mix_with_first

    wrap(GatedDeltaNet, "_mix", make)


def cut_packed_projection() -> None:
    """Each rank draws its part of [Q | K | V | gate], whichever matrices that is."""
    from megatron.engine.engine_base import EngineBase

    names = ("query", "key", "value", "gate")

    def make(initialise_weights: Any) -> Any:
        def initialise_packed(engine: Any) -> None:
            initialise = engine._initialise

            def draw(name: str, kind: Any, local: Any, whole: Any, offset: Any, *more: Any) -> None:
                part = name.split(".")[-2]
                if ".attention." in name and part in names and offset[0]:
                    # The second half of the packed matrix has no queries and no keys.
                    name = name.replace(part, {"query": "value", "key": "gate"}.get(part, part))
                initialise(name, kind, local, whole, offset, *more)

            engine._initialise = draw
            initialise_weights(engine)

        return initialise_packed

    wrap(EngineBase, "_initialise_weights", make)


def leave_output_norm_apart() -> None:
    from megatron.model import gated_delta_net
    from megatron.parallel.layers import make_replicated_outside_region

    wrap(gated_delta_net, "make_replicated_inside_region", lambda _: make_replicated_outside_region)


def decay_rates() -> None:
    from megatron.engine.optimizer import MasterParameter

    def make(decays: Any) -> Any:
        return property(lambda m: decays.fget(m) or m.name.endswith(".A_log"))

    wrap(MasterParameter, "decays", make)


def count_rates_of_first_rank() -> None:
    from megatron.engine.native import NativeEngine

    def make(count: Any) -> Any:
        def count_others(engine: Any) -> Any:
            first = engine._mesh.tensor_parallel.rank == 0
            return [m for m in count(engine) if first or not m.name.endswith("_convolution")]

        return count_others

    wrap(NativeEngine, "_list_counted", make)


def repeat_heads_in_another_order() -> None:
    """Value head m reads key head m mod n in place of m // (m / n)."""
    from megatron.model import gated_delta_net

    def make(compute: Any) -> Any:
        def compute_tiled(query: Any, key: Any, value: Any, *others: Any) -> Any:
            copies = value.shape[1] // key.shape[1]
            return compute(*(x.repeat(1, copies, 1, 1) for x in (query, key)), value, *others)

        return compute_tiled

    wrap(gated_delta_net, "apply_delta_rule", make)


def lose_state_between_chunks() -> None:
    """Chunks of eight tokens, of which each begins with an empty state."""
    from megatron.model import gated_delta_net

    def make(compute: Any) -> Any:
        def compute_chunks(*args: Any) -> Any:
            parts = [
                compute(*inputs)
                for inputs in zip(*(each.split(8, dim=2) for each in args[:5]), strict=True)
            ]
            return torch.cat([out for out, _ in parts], 2), parts[-1][1]

        return compute_chunks

    wrap(gated_delta_net, "apply_delta_rule", make)


def lose_gradient_of_recomputed_rates() -> None:
    from megatron.model import gated_delta_net

    def make(compute: Any) -> Any:
        def compute_detached(*args: Any) -> Any:
            query, key, value, decay, *others = args
            return compute(query, key, value, decay.detach() + 0 * decay, *others)

        return compute_detached

    wrap(gated_delta_net, "apply_delta_rule", make)


DELTA_NET_MUTATIONS = [
    Mutation(
        "the state of a gated delta net goes on into the next document",
        "PrimeIntellect-ai/prime-rl#3003",
        f"{CP} {DOCUMENTS}",
        2,
        keep_state_over_documents,
        caught_by="loss",
        first=FIRST,
        documents=True,
    ),
    Mutation(
        "the convolution of a gated delta net reads the document before",
        "NVIDIA-NeMo/Automodel#2147",
        DOCUMENTS,
        2,
        convolve_over_documents,
        caught_by="loss",
        first=FIRST,
        documents=True,
    ),
    Mutation(
        "the convolution begins again at each part of a sequence",
        "PrimeIntellect-ai/prime-rl#3002",
        f"{CP} {DOCUMENTS}",
        2,
        convolve_parts_alone,
        caught_by="loss",
        first=FIRST,
        documents=True,
    ),
    Mutation(
        "the borders of documents are those of a rank's part",
        "PrimeIntellect-ai/prime-rl#2392",
        f"{CP} {DOCUMENTS}",
        2,
        use_borders_of_own_part,
        caught_by="loss",
        first=FIRST,
        documents=True,
    ),
    Mutation(
        "a packed projection is cut across its parts",
        f"{MEGATRON}#1989",
        f"{TP} {HYBRID}",
        2,
        cut_packed_projection,
        caught_by="initial weights",
    ),
    Mutation(
        "gradients of a gated delta net's norm cover the heads of one rank",
        f"{MEGATRON}#7452",
        f"{TP} {HYBRID}",
        2,
        leave_output_norm_apart,
        caught_by="gradients",
    ),
    Mutation(
        "the state reads positions in the order of the ranks",
        NOT_REPORTED,
        f"{CP} {HYBRID}",
        2,
        leave_positions_in_the_order_of_ranks,
        caught_by="loss",
        first=FIRST,
    ),
    Mutation(
        "all heads have the decays of the first ones",
        NOT_REPORTED,
        HYBRID,
        2,
        take_decays_of_first_heads,
        caught_by="loss",
        first=FIRST,
    ),
    Mutation(
        "weight decay applies to A_log",
        NOT_REPORTED,
        f"--weight-decay 0.5 {HYBRID}",
        2,
        decay_rates,
        caught_by="weights",
    ),
    Mutation(
        "the gradient norm has the convolutions of the first tensor rank only",
        NOT_REPORTED,
        f"{TP} {HYBRID}",
        2,
        count_rates_of_first_rank,
    ),
    Mutation(
        "value heads read other key heads",
        NOT_REPORTED,
        HYBRID,
        2,
        repeat_heads_in_another_order,
        caught_by="loss",
        first=FIRST,
    ),
    Mutation(
        "the state is lost between chunks",
        NOT_REPORTED,
        HYBRID,
        2,
        lose_state_between_chunks,
        caught_by="loss",
        first=FIRST,
    ),
    Mutation(
        "decays of a gated delta net get no gradient",
        NOT_REPORTED,
        f"--recompute-attention-core {HYBRID}",
        2,
        lose_gradient_of_recomputed_rates,
        caught_by="gradients",
    ),
]
