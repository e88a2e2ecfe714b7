"""The process with the fake GPU, which all tests of this folder share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron.extras.planner.dry_run.process import find_compiler

Call = Callable[..., Any]
"""Takes a function and its arguments. Returns its result in the process with the fake GPU."""


@pytest.fixture(scope="session")
def on_fake_gpu() -> Iterator[Call]:
    """Yield a function that calls another one in the process with the fake GPU."""
    if find_compiler() is None:
        pytest.skip("the fake GPU needs a C++ compiler, and there is none")
    # Imported here, because the functions of `fake_ranks` import torch when they run, not before.
    from megatron.extras.planner.dry_run.process import call_in_pool, open_pool

    with open_pool(1) as pool:
        yield lambda function, *arguments: call_in_pool(pool, function, *arguments)
