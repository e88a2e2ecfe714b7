"""Test what crosses the ranks between the stages of a save."""

import json
from dataclasses import asdict

import pytest

from megatron.base.json_record import restore
from megatron.checkpoint.digest import FileDigest
from megatron.checkpoint.lineage import LineageEntry
from megatron.checkpoint.shard_file import StoredSlice, WrittenFile
from megatron.checkpoint.stages import Published, StageOutcome, StageResult

WRITTEN = WrittenFile(
    "rank_00001.safetensors",
    FileDigest(24, "ab", "cd"),
    (StoredSlice("weight/w", (4, 2), 16, (2, 0), (2, 2), "F32"),),
)
PUBLISHED = Published(3, (LineageEntry(2, "ab", True), LineageEntry(3, "cd", False, 3)), ["line"])


@pytest.mark.parametrize(
    "outcome",
    [
        StageOutcome(StageResult()),
        StageOutcome(StageResult(written=WRITTEN)),
        StageOutcome(StageResult(published=PUBLISHED)),
        StageOutcome(StageResult(written=WRITTEN, warning="rank 1 on host: slow")),
        StageOutcome(StageResult(), failure="rank 1 on host: no space"),
        StageOutcome(StageResult(), fatal="another run took the folder over"),
    ],
)
def test_an_outcome_crosses_the_ranks_unchanged(outcome: StageOutcome) -> None:
    message = json.dumps(asdict(outcome), allow_nan=False)
    assert restore(StageOutcome, json.loads(message)) == outcome
