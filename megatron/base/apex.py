"""Access to NVIDIA apex, if it is installed.

The package `apex` on PyPI is an unrelated web toolkit. So the name of the package proves nothing,
and only the attributes that it offers show whether it is NVIDIA's.
"""

import importlib
from typing import Any


def find(module: str, name: str) -> tuple[Any, str]:
    """Return an attribute of an apex module, as in `find("apex.optimizers", "FusedAdam")`.

    Args:
        module: Dotted name of the module.
        name: Name of the attribute.

    Returns:
        (The attribute or None, the reason).
    """
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as absent:
        # Another name means that `apex` exists, but has no such submodule.
        if absent.name == "apex":
            return None, "NVIDIA apex is not installed"
        return None, f"the installed 'apex' is not NVIDIA's (it has no {module})"
    except ImportError as broken:
        # For example, its compiled extension was built for another version of PyTorch.
        return None, f"NVIDIA apex is installed but does not load: {broken}"
    return (
        found,
        "NVIDIA apex is installed"
        if found
        else f"the installed 'apex' is not NVIDIA's (it has no {name})",
    )
