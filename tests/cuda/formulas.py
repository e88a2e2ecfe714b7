"""The messages of a step, written by hand from the layout, and not taken from the code under test.

The model is the one of `fake_ranks.GPT`: h = 64, 4 heads, s = 32, b = 2, GPT-2's parts. `t`, `d`
and `p` are the tensor, data and pipeline sizes, and `m` is the number of microbatches.
"""

from collections import Counter
from dataclasses import dataclass

H, S, B, FFN, VOCAB = 64, 32, 2, 256, 101
Messages = Counter[tuple[str, str, str, int]]
"""(kind, group, dtype, bytes) -> how often."""
Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """What the formulas depend on."""

    t: int = 1
    d: int = 1
    p: int = 1
    m: int = 2
    layers: int = 2
    """Layers of the rank."""
    first: bool = True
    """Whether the rank has the first stage."""
    last: bool = True
    dtype: str = "bfloat16"
    sequence: bool = False
    """Sequence parallelism."""
    zero: int = 1
    copies: int = 1
    """Copies of the model. 1: all data-parallel ranks share one."""
    recomputed: bool = False
    compiled: bool = False
    group: str = "data"
    """The group that shares a copy."""
    untied: bool = False
    """Whether the output matrix is not the word embedding."""

    @property
    def width(self) -> int:
        """Bytes of an activation's element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def shards(self) -> int:
        """Ranks that share a copy."""
        return self.d // self.copies


def list_block(t: int) -> Shapes:
    """Return the shapes of a layer's parameters on a tensor-parallel rank."""
    matrices = [(3 * H // t, H), (H, H // t), (FFN // t, H), (H, FFN // t)]
    vectors = [(3 * H // t,), (H,), (FFN // t,), (H,), (H,), (H,), (H,), (H,)]
    return [*matrices, *vectors]


def list_partial(layout: Layout) -> Shapes:
    """Return the parameters whose gradients cover a part of the sequence.

    Two norms and two biases of row-parallel matrices in a layer, the positions, the last norm.
    """
    shapes: Shapes = [(H,) for _ in range(6 * layout.layers)]
    if layout.first:
        shapes.append((S, H))
    if layout.last:
        shapes += [(H,), (H,)]
    return shapes


def list_ends(layout: Layout) -> list[Shapes]:
    """Return the groups of parameters outside of the layers that are sent together.

    A head with a matrix of its own is a group: that or the copy of the word embedding, and a norm.
    """
    # 128 rows of vocabulary for each tensor-parallel rank, by --make-vocab-size-divisible-by.
    words, positions, norm = (128, H), (S, H), [(H,), (H,)]
    if layout.first and layout.last and not layout.untied:
        return [[words, positions, *norm]]
    groups: list[Shapes] = []
    if layout.first:
        groups.append([words, positions])
    if layout.last:
        groups.append([words, *norm])
    return groups


def count_elements(shapes: Shapes, ranks: int) -> int:
    """Return the elements of all shards. Rows are divided among the ranks and rounded up."""
    total = 0
    for rows, *columns in shapes:
        total += -(-rows // ranks) * ranks * (columns[0] if columns else 1)
    return total


def predict(layout: Layout) -> Messages:
    """Return all messages of a step."""
    found: Messages = Counter()
    for part in (_predict_tensor, _predict_data, _predict_pipeline):
        found += part(layout)
    # Loss, squared norm, zeros, the decision to stop, the state of a save and the digest, in fp64.
    if layout.t * layout.d * layout.p > 1:
        group = "world"
        if layout.d == layout.p == 1:
            group = "tensor"
        elif layout.t == layout.p == 1:
            group = "data"
        found["all_reduce", group, "float64", 6 * 8] += 1
    return found


def _predict_tensor(layout: Layout) -> Messages:
    found: Messages = Counter()
    if layout.t == 1:
        return found
    stream = S * B * H * layout.width
    # Attention and MLP have one message each, forward and backward. The sum of the MLP is not
    # computed again, because the backward pass of the layer does not need it. A compiled graph
    # computes all that it has.
    forward = 2 * layout.layers
    if layout.recomputed:
        forward = (4 if layout.compiled else 3) * layout.layers
    backward = 2 * layout.layers
    if not layout.sequence:
        found["all_reduce", "tensor", layout.dtype, stream] += layout.m * (
            forward + backward + layout.first + layout.last
        )
    else:
        # The embedding scatters its sum forward and gathers backward. The head does the opposite.
        # Attention and MLP keep their slice of the input, and gather it again for the gradient of
        # the weight.
        again = 2 * layout.layers
        found["all_gather", "tensor", layout.dtype, stream] += layout.m * (
            forward + backward + again + layout.first + layout.last
        )
        found["reduce_scatter", "tensor", layout.dtype, stream] += layout.m * (
            forward + backward + layout.first + layout.last
        )
    # Partial gradients are added up, and replicated ones get rank 0's value by the same sum. ZeRO
    # shards what is sent.
    partial = sum(count // layout.shards for count in _sizes(list_partial(layout)))
    found["all_reduce", "tensor", "float32", 4 * partial] += 1
    if layout.last:
        # Each position: maximum, sum of exponentials and logit of the label, of each rank.
        found["all_gather", "tensor", "float32", layout.t * 3 * S * B * 4] += layout.m
    return found


def _sizes(shapes: Shapes) -> list[int]:
    return [rows * (columns[0] if columns else 1) for rows, *columns in shapes]


def _predict_data(layout: Layout) -> Messages:
    found: Messages = Counter()
    if layout.d == 1:
        return found
    modules = [list_block(layout.t)] * layout.layers + list_ends(layout)
    for number, shapes in enumerate(modules):
        is_block = number < layout.layers
        elements = count_elements(shapes, layout.shards)
        # ZeRO 3 gathers each layer for each pass. The rest stays gathered during a microbatch.
        gathers = 1
        if layout.zero == 3:
            gathers = layout.m * (2 if is_block else 1)
        reductions = layout.m if layout.zero >= 2 else 1
        if layout.shards > 1:
            gathered = elements * layout.width
            found["all_gather", layout.group, layout.dtype, gathered] += gathers
            found["reduce_scatter", layout.group, "float32", elements * 4] += reductions
        if layout.copies > 1:
            found["all_reduce", "replicas", "float32", elements // layout.shards * 4] += 1
    return found


def _predict_pipeline(layout: Layout) -> Messages:
    found: Messages = Counter()
    if layout.p == 1:
        return found
    # Each tensor-parallel rank sends its part.
    stream = S * B * H * layout.width
    sent = stream // layout.t
    # Activations go to the next stage, and gradients come back.
    neighbours = (not layout.first) + (not layout.last)
    found["send", "pipeline", layout.dtype, sent] += layout.m * neighbours
    found["receive", "pipeline", layout.dtype, sent] += layout.m * neighbours
    if layout.t > 1 and not layout.sequence:
        found["all_gather", "tensor", layout.dtype, stream] += layout.m * neighbours
    if layout.first or layout.last:
        # The sum of the gradients of the word embedding and its copy.
        found["all_reduce", "ends", "float32", 128 * H // layout.shards * 4] += 1
    return found
