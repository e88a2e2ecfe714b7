"""NVIDIA apex, where it is really there. PyPI's `apex` is an unrelated web toolkit: the package is known by what it offers."""

import importlib
from typing import Any


def find(module: str, name: str) -> tuple[Any, str]:
    """(`name` of apex's `module` or None, the reason), as in find("apex.optimizers", "FusedAdam")."""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as absent:
        if absent.name == "apex":
            return None, "NVIDIA apex is not installed"
        return None, f"the installed 'apex' is not NVIDIA's (it has no {module})"
    except ImportError as broken:
        return None, f"NVIDIA apex is installed but does not load: {broken}"
    return (
        found,
        "NVIDIA apex is installed"
        if found
        else f"the installed 'apex' is not NVIDIA's (it has no {name})",
    )
