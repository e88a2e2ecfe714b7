"""The folder of the reference data: `shared/` next to the checkout, or $MEGATRON_SHARED."""

import os
from pathlib import Path

import pytest


def shared_dir(*parts: str) -> Path:
    """Return a path below `shared/`. Skip the test if it does not exist."""
    root = Path(os.environ.get("MEGATRON_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(
            f"REFERENCE DATA ABSENT: {'/'.join(('shared', *parts))} does not exist; "
            "set MEGATRON_SHARED to run this test"
        )
    return path
