"""Where the tests find the reference data: `shared/` beside the checkout, or $MEGATRON_SHARED."""

import os
from pathlib import Path

import pytest


def shared_dir(*parts: str) -> Path:
    """Path below shared/; skips the test, loudly, where it is absent."""
    root = Path(os.environ.get("MEGATRON_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(
            f"REFERENCE DATA ABSENT: {'/'.join(('shared', *parts))} is not there; set MEGATRON_SHARED to run this test"
        )
    return path
