"""The page docs/run_folder.md names what the code writes into the folder of a run."""

from pathlib import Path

from megatron.checkpoint import folder, lease, lineage
from megatron.extras.interop.convert import hf_export
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.operations.rollback import execution, rollback_plan
from megatron.extras.operations.slurm import attempts
from megatron.extras.watch.trackers.feed import FeedRequest
from megatron.extras.watch.watchdog import watchdog
from megatron.observe import chronicle

PAGE = Path(__file__).parents[1] / "docs" / "run_folder.md"


def test_page_has_a_row_for_each_file() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {part for row in rows for part in row.split("`")[1::2]}
    config = load_config(
        ["--preset", "gpt2-124m", "--micro-batch-size", "1", "--save", "SAVE"]
    ).config
    profile = Path(str(config.logging.choose_profile_folder(config.checkpoint.save_folder)))
    tracker = FeedRequest("NAME", "", "", "", 0, 0, 0).state_path.name
    folders = (watchdog.FOLDER, hf_export.FOLDER, rollback_plan.ROLLED_BACK, profile.name)
    suffixes = (folder.REPLACED, folder.DELETING)
    written = {
        folder.LATEST,
        folder.LATEST_ITERATION,
        lineage.LINEAGE_FILE,
        lineage.UNPUBLISHED_FILE,
        lease.FILE,
        chronicle.CHRONICLE,
        execution.INTERVENTIONS,
        attempts.FILE,
        tracker,
        f"global_stepN{folder.DAMAGED}/",
        f"global_stepN{folder.UNFINISHED}/",
        *(f"{name}/" for name in (*folders, *suffixes)),
    }
    assert profile.parent == Path("SAVE")
    assert written <= named, written - named
