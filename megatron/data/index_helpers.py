"""The data path's inner loops: compiled where the extension was built, NumPy elsewhere. Same bytes from both.

`describe_implementation()` says which one is in use, and why the slow one if it is.
"""

from types import ModuleType

from megatron.data import index_numpy


def _choose() -> tuple[ModuleType, str]:
    try:
        from megatron.data import _index_helpers  # type: ignore[attr-defined]
    except ImportError as error:
        return (
            index_numpy,
            f"NumPy (slower: {error}; a C++ compiler and `pip install -e .` bring the fast one)",
        )
    found = getattr(_index_helpers, "REVISION", 1)
    if found != index_numpy.REVISION:  # an older build may not check ranges
        return index_numpy, (
            f"NumPy (slower: the C++ build has revision {found}, this version needs {index_numpy.REVISION}; "
            "`pip install -e .` builds it again)"
        )
    return _index_helpers, "C++"


_module, _implementation = _choose()

sample_index = _module.sample_index
blending_indices = _module.blending_indices
gather_tokens = _module.gather_tokens


def describe_implementation() -> str:
    """ "C++", or "NumPy (slower: REASON)"; for the table of choices that is printed at start."""
    return _implementation
