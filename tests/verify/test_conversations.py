"""The verification of runs on conversations: healthy ones pass, and known errors are found."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conversations.chat_files import make_config, write_conversations, write_tokenizer
from verify.conversation_mutations import (
    CONVERSATION_MUTATIONS,
    ignore_bounds_across_context_ranks,
    shift_masks_by_one,
)
from verify.mutation import ITERATIONS, NO_DROPOUT, PP, SP
from verify.verifier import Verifier

from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.extras.planner.verify.synthetic import Conversations, make_conversations
from megatron.extras.preparation.conversations.build import ConversationJob, prepare_conversations
from megatron.extras.preparation.preprocess.build_dataset import PreprocessJob, preprocess

CONTEXT = "--context-parallel-size 2"
SHORT = (shift_masks_by_one, ignore_bounds_across_context_ranks)
LAYOUTS = [
    ("", 1),
    ("", 2),
    (CONTEXT, 2),
    (f"{CONTEXT} --cp-comm-type a2a", 2),
    (f"{CONTEXT} --zero-stage 3", 4),
    (SP, 2),
    (PP, 2),
    (f"{SP} {PP}", 4),
    ("--zero-stage 1 --loss-mean step", 2),
    ("--position-embedding-type rotary --use-varlen-attention", 1),
]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the flags of a run on conversations, and of one on a mixture with documents."""
    folder = tmp_path_factory.mktemp("chat")
    config = make_config(write_tokenizer(folder / "tokenizer"))
    source = write_conversations(folder / "chat.jsonl", 200)
    job = ConversationJob((str(source),), str(folder / "chat"), config, longest=65, on_long="drop")
    prepare_conversations(job, lambda line: None)
    (folder / "text.txt").write_text("the city of light " * 40)
    (folder / "more.txt").write_text("the year of war " * 40)
    texts = PreprocessJob(
        (str(folder / "text.txt"), str(folder / "more.txt")), str(folder / "text"), config,
        append_eod=True,
    )  # fmt: skip
    preprocess(texts, log=lambda line: None)
    common = (
        f"{ITERATIONS} {NO_DROPOUT} --reset-position-ids --reset-attention-mask --eod-mask-loss "
        f"--tokenizer-type PretrainedFromHF --tokenizer-name-or-path {folder}/tokenizer "
        "--vocab-size None"
    )
    mixture = f"0.6 {texts.prefixes['text']} 0.4 {job.prefix}"
    return f"{common} --data-path {job.prefix}", f"{common} --data-path {mixture}"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(each, id=each.__name__, marks=() if each in SHORT else pytest.mark.full)
        for each in CONVERSATION_MUTATIONS
    ],
)
def test_a_known_error_is_found(
    error: Callable[[], None], flags: tuple[str, str], verifier: Verifier
) -> None:
    report = verifier.run(f"{flags[0]} {CONTEXT}", 2, error)
    assert not report["verified"]
    assert report["failed"] == CONVERSATION_MUTATIONS[error]


@pytest.mark.full
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_healthy_run_is_no_alarm(
    layout: tuple[str, int], mixed: bool, flags: tuple[str, str], verifier: Verifier
) -> None:
    report = verifier.run(f"{flags[mixed]} {layout[0]}", layout[1])
    assert report["verified"], report
    assert "first conversations of" in report["data"]


def test_the_reference_finds_conversations_in_ids_alone(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "run", np.int32) as writer:
        for size in (9, 2, 40):
            ids = np.arange(size, dtype=np.int32)
            writer.add_document(np.where(ids % 3 == 1, ids, ~ids))
    made = [*make_conversations(str(tmp_path / "run"), 1, 12)]
    with IndexedDatasetWriter(tmp_path / "copy", np.int32) as writer:
        for each in made:
            writer.add_document(each)
    assert IndexedDataset(tmp_path / "copy").is_packed
    assert all((each >= 0).any() for each in made)
    plain = [np.maximum(each, ~each) for each in made]
    sample = np.concatenate([plain[5], plain[2], np.zeros(3, np.int64)])
    found = Conversations([str(tmp_path / "copy")]).find(sample)
    assert found is not None
    one = len(plain[5])
    two = one + len(plain[2])
    assert found[0] == [0, one, two]
    expected = np.concatenate([made[5] >= 0, made[2] >= 0, np.zeros(3, bool)])
    assert np.array_equal(found[1], expected)
    # A conversation that is cut is none.
    assert Conversations([str(tmp_path / "copy")]).find(sample[1:]) is None
