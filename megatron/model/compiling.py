"""Whether torch.compile can work on this machine. It needs a C++ compiler for the CPU, Triton for a GPU, and finds out late."""

import torch

from megatron.errors import ConfigError


def require_compiler(device: torch.device) -> None:
    """Compile a small function.

    Raises:
        ConfigError: it fails; with the compiler's reason.
    """
    x = torch.ones(8, device=device)
    try:
        torch.compile(_probe)(x)
    except torch._dynamo.exc.TorchDynamoException as failure:
        reason = next(iter(f"{failure}".splitlines()), type(failure).__name__)
        needed = (
            "a C++ compiler (g++; $CXX names another one)"
            if device.type == "cpu"
            else "Triton and a C compiler"
        )
        raise ConfigError(
            f"--use-torch-compile is given, but torch.compile fails on this machine ({reason}); it needs {needed}: "
            "install what is missing or leave the flag out"
        ) from failure


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2
