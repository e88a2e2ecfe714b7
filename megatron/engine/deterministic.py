"""The choice of kernels that give the same bits each time.

Some CUDA kernels add up numbers with atomic operations, in an order that changes from call to call.
The backward passes of flash and memory-efficient attention are the most important ones. torch has
slower kernels for most of them.
"""

import os

import torch
import torch.utils.deterministic


def choose_deterministic_kernels() -> None:
    """Let torch, cuBLAS and NCCL compute the same bits each time, in this process.

    Call it before the first GPU kernel and before the process group starts.
    """
    # cuBLAS reads it when it starts. Without a workspace of its own, each stream may get another
    # size, and with it another kernel.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # NCCL chooses an algorithm by measured times, and reductions within the switches (NVLS) add up
    # in any order. The ring has a fixed one.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    # An operator without a deterministic kernel raises an error.
    torch.use_deterministic_algorithms(True)
    # torch would fill each new tensor, also those that are overwritten next.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
