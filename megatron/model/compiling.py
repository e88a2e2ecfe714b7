"""Check whether torch.compile works on this machine.

It needs a C++ compiler for the CPU and Triton for a GPU. PyTorch detects a missing one only in the
middle of the first step.
"""

import torch

from megatron.base.errors import ConfigError
from megatron.parallel.torch_private import find_compilation_error


def require_compiler(device: torch.device) -> None:
    """Compile a small function to find out whether compilation works.

    Raises:
        ConfigError: The compilation fails. The message has the compiler's reason.
    """
    x = torch.ones(8, device=device)
    try:
        torch.compile(_probe)(x)
    except find_compilation_error() as failure:
        # The exception's text has many lines of hints. The first one names the cause.
        reason = next(iter(f"{failure}".splitlines()), type(failure).__name__)
        if device.type == "cpu":
            needed = "a C++ compiler (g++; $CXX names another one)"
        else:
            needed = "Triton and a C compiler"
        raise ConfigError(
            f"--use-torch-compile is given, but torch.compile fails on this machine ({reason}); it "
            f"needs {needed}: install what is missing or leave the flag out"
        ) from failure


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2
