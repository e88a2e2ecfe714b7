"""Faults that are planted in a step. The checks of `test_steps.py` must catch each of them."""

from dataclasses import replace

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import Case, count_collectives, run_case
from cuda.formulas import Layout, predict
from cuda.test_steps import BF16, check_waits, count_messages

from megatron.base.errors import TrainingError

ONE_GPU = Case(BF16 + "--global-batch-size 4")
TP = Case(BF16 + "--tensor-model-parallel-size 2 --global-batch-size 4", 2)


@pytest.mark.parametrize("fault", ["blocking read-back", "branch on a tensor"])
def test_a_number_that_is_read_in_a_layer_is_caught(fault, on_fake_gpu: Call):
    report = on_fake_gpu(run_case, replace(ONE_GPU, fault=fault))
    with pytest.raises(AssertionError, match="a number is read"):
        check_waits(report)
    # Two layers, two microbatches.
    reads = [n for wait, n in report.step.synchronisations.items() if "number" in wait.cause]
    assert reads == [4]


def test_a_scalar_that_comes_from_the_cpu_is_caught(on_fake_gpu: Call):
    report = on_fake_gpu(run_case, replace(ONE_GPU, fault="scalar from the CPU"))
    with pytest.raises(AssertionError, match="blocking copy to the GPU"):
        check_waits(report)


def test_a_tensor_on_the_wrong_device_is_caught(on_fake_gpu: Call):
    with pytest.raises(TrainingError, match=r"at least two devices, cuda:0 and cpu"):
        on_fake_gpu(run_case, replace(ONE_GPU, fault="tensor on the CPU"))


def test_a_wrong_shape_is_caught(on_fake_gpu: Call):
    with pytest.raises(TrainingError, match=r"block.py.*broadcast"):
        on_fake_gpu(run_case, replace(ONE_GPU, fault="wrong shape"))


@pytest.mark.parametrize("fault", ["message in fp32", "message twice as long"])
def test_a_message_of_another_dtype_or_size_is_caught(fault, on_fake_gpu: Call):
    report = on_fake_gpu(run_case, replace(TP, fault=fault))
    assert count_messages(report) != predict(Layout(t=2))
    # Both faults send 12 of the 20 activations with twice the bytes. Another function sends the
    # input gradients of attention and MLP.
    dtype = "float32" if fault == "message in fp32" else "bfloat16"
    assert count_collectives(report.step, "all_reduce", "tensor")[dtype, 2 * 8192] == 12


def test_the_same_steps_without_a_fault_pass(on_fake_gpu: Call):
    check_waits(on_fake_gpu(run_case, ONE_GPU))
    assert count_messages(on_fake_gpu(run_case, TP)) == predict(Layout(t=2))
