"""The inner loops of the data path, from the C++ extension if it was built, else from NumPy.

Both give the same bytes. `describe_implementation()` returns which one is in use, and the reason if
it is the slow one.
"""

from types import ModuleType

from megatron.data import index_numpy


def _choose() -> tuple[ModuleType, str]:
    """Return the module with the loops, and a description of it."""
    try:
        from megatron.data import _index_helpers  # type: ignore[attr-defined]
    except ImportError as error:
        return (
            index_numpy,
            f"NumPy (slower: {error}; `pip install -e .` with a C++ compiler builds the fast one)",
        )
    # The first builds had no REVISION. An older build may lack the checks of ranges.
    found = getattr(_index_helpers, "REVISION", 1)
    if found != index_numpy.REVISION:
        return index_numpy, (
            f"NumPy (slower: the C++ build has revision {found}, this version needs "
            f"{index_numpy.REVISION}; `pip install -e .` builds it again)"
        )
    return _index_helpers, "C++"


_module, _implementation = _choose()

sample_index = _module.sample_index
blending_indices = _module.blending_indices
gather_tokens = _module.gather_tokens
# None without C++. `shuffle_in_place` then shuffles in blocks.
shuffle = getattr(_module, "shuffle", None)


def describe_implementation() -> str:
    """Return "C++" or "NumPy (slower: REASON)", for the table of choices printed at start."""
    return _implementation
