"""Products of odd widths on the fake GPU, and the bytes of their padded copies."""

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import Case, PaddingReport, find_padding

LAYERS, HIDDEN, INNER, IDS, MICROBATCHES = 2, 1024, 2730, 50257, 3
MODEL = (
    f"--preset lauzhack-177m --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 16 "
    f"--seq-length 512 --vocab-size {IDS} --make-vocab-size-divisible-by 1 --micro-batch-size 1 "
    "--bf16 "
)
TP = "--tensor-model-parallel-size 2 --sequence-parallel "
LAYOUTS = {
    "one GPU": (1, 1, ""),
    "TP 2": (2, 2, TP),
    "ZeRO 0": (1, 2, "--sharding-strategy ddp"),
    "ZeRO 1": (1, 2, "--zero-stage 1"),
    "ZeRO 2": (1, 2, "--zero-stage 2"),
    "ZeRO 3, TP 2": (2, 4, "--zero-stage 3 " + TP),
}
"""Name -> tensor-parallel ranks, all ranks, flags."""


def predict_bytes(tensor: int, *, reduced: bool) -> dict[tuple[str, tuple[int, int]], int]:
    """Return what padding moves in a step. `reduced`: each microbatch sends its gradients away."""
    width = INNER // tensor
    ids = -(-IDS // tensor)
    passes = MICROBATCHES * LAYERS
    later = 0 if reduced else passes - LAYERS
    wide, tall, table = (width, HIDDEN), (HIDDEN, width), (ids, HIDDEN)
    # Weights are read and written in 16 bits, forward and backward. The output matrix has one copy.
    found = {
        ("copy_", wide): passes * 2 * 2 * 2 * 2 * width * HIDDEN,
        ("copy_", tall): passes * 2 * 2 * 2 * width * HIDDEN,
        ("copy_", table): MICROBATCHES * 2 * 2 * ids * HIDDEN,
        # The first gradients of the last matrix are read and written in fp32.
        ("clone", tall): (passes - later) * 2 * 4 * width * HIDDEN,
    }
    if later:
        # All later gradients are read and written, and the product is read.
        found["add_", wide] = later * 2 * 3 * 4 * width * HIDDEN
        found["add_", tall] = later * 3 * 4 * width * HIDDEN
    return found


def make_case(name: str, flags: str) -> Case:
    """Return a case with a number of microbatches on each rank."""
    tensor, ranks, layout = LAYOUTS[name]
    batch = MICROBATCHES * ranks // tensor
    return Case(f"{MODEL} {layout} --global-batch-size {batch} {flags}", ranks)


def find_compiled_padding(case: Case) -> PaddingReport:
    """Compile the layers of a case, which earlier cases have left in torch's caches."""
    import torch

    torch.compiler.reset()
    return find_padding(case)


def check(name: str, found: PaddingReport) -> None:
    """Check the products and the bytes of a step with fused gradients."""
    # Three products of each of 5 weights in a layer, and of the output matrix.
    assert found.products == MICROBATCHES * 3 * (5 * LAYERS + 1)
    assert found.slow == []
    reduced = name.startswith(("ZeRO 2", "ZeRO 3"))
    tensor = LAYOUTS[name][0]
    expected = predict_bytes(tensor, reduced=reduced)
    # The gradient of the output matrix is added up in any case.
    of_layers = {(INNER // tensor, HIDDEN), (HIDDEN, INNER // tensor)}
    moved = {
        key: size for key, size in found.moved.items() if key in expected or key[1] in of_layers
    }
    assert moved == expected


@pytest.mark.parametrize(
    "name",
    [
        "one GPU",
        "ZeRO 2",
        "ZeRO 3, TP 2",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("TP 2", "ZeRO 0", "ZeRO 1")),
    ],
)
def test_every_size_is_a_multiple_of_8_and_copies_are_counted(name: str, on_fake_gpu: Call):
    found = on_fake_gpu(find_padding, make_case(name, "--gradient-accumulation-fusion"))
    check(name, found)


@pytest.mark.full
@pytest.mark.parametrize("name", ["one GPU", "ZeRO 3, TP 2"])
def test_a_compiled_step_has_the_same_products_and_copies(name: str, on_fake_gpu: Call):
    case = make_case(name, "--gradient-accumulation-fusion --use-torch-compile")
    check(name, on_fake_gpu(find_compiled_padding, case))


def test_products_without_fused_gradients_are_padded_too(on_fake_gpu: Call):
    found = on_fake_gpu(find_padding, make_case("one GPU", "--no-gradient-accumulation-fusion"))
    assert found.products == MICROBATCHES * 3 * (5 * LAYERS + 1)
    assert found.slow == []
