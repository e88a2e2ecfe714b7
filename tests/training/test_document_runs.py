"""Flags for document boundaries in real runs, on one process and on a grid.

The flags are --reset-position-ids, --reset-attention-mask and --eod-mask-loss.
"""

from pathlib import Path

import pytest
from process_pool import ProcessPool
from training.runs import Runner

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
FILES = f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt"
SIZE = f"{FILES} --seq-length 128 --train-iters 5"
FLAGS = f"--reset-position-ids --reset-attention-mask --eod-mask-loss {SIZE}"


def curve(run: Runner) -> list[float]:
    return [entry["lm_loss"] for entry in run.metrics()]


@pytest.mark.parametrize(
    "positions", ["absolute", pytest.param("rotary", marks=pytest.mark.full), "alibi"]
)
def test_grid_trains_like_one_process(
    positions: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    shape = f"{FLAGS} --num-layers 2 --position-embedding-type {positions}"
    single, grid, plain = (
        Runner(pool, corpus, tmp_path / name) for name in ("single", "grid", "plain")
    )
    single(shape)
    grid(
        f"{shape} --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2",
        ranks=8,
    )
    assert curve(grid) == pytest.approx(curve(single), rel=1e-5)
    plain(f"{SIZE} --num-layers 2 --position-embedding-type {positions}")
    assert curve(plain) != pytest.approx(curve(single), rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param("--micro-batch-size 1", 1, marks=pytest.mark.full),
        ("--tensor-model-parallel-size 2 --sequence-parallel --checkpoint-activations", 2),
        (
            "--micro-batch-size 1 --pipeline-model-parallel-size 2 --recompute-attention-core "
            "--zero-stage 2",
            4,
        ),
        pytest.param("--micro-batch-size 1 --deepspeed --zero-stage 1", 2, marks=pytest.mark.full),
    ],
    ids=["alone", "TP", "pipeline", "DeepSpeed"],
)
def test_one_call_for_all_documents_trains_like_one_call_each(
    flags: str, ranks: int, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """On a CPU both compute each document by the same kernel, so not one bit differs.

    With several samples and heads, the results are in another memory order. The projection after
    the attention then adds up its gradient in another order.
    """
    parts = (
        f"{FLAGS} --bf16 --num-layers 2 --position-embedding-type rotary "
        "--curriculum-schedule-type fixed_linear --curriculum-min-difficulty 64 "
        "--curriculum-max-difficulty 128 --curriculum-total-step 3 --curriculum-difficulty-step 8 "
        "--train-tokens 2300 --lr-decay-tokens 2300"
    )
    each, packed = (Runner(pool, corpus, tmp_path / name) for name in ("each", "packed"))
    each(f"{parts} {flags}", ranks)
    log = packed(f"{parts} {flags} --use-varlen-attention", ranks)
    assert "a CPU has no kernel for all documents" in log
    assert len(curve(packed)) > 3
    assert curve(packed) == curve(each)


def test_data_without_end_of_document_tokens_is_refused(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter

    source = IndexedDataset(corpus)
    writer = IndexedDatasetWriter(str(tmp_path / "endless"), source.dtype)
    for document in range(20):
        writer.add_document(source.get(document, 0, int(source.sizes[document]) - 1))
    writer.finalize()
    run = Runner(pool, str(tmp_path / "endless"), tmp_path / "run")
    assert "with --append-eod" in run.error(f"{FLAGS} --split 1,0,0")


def test_document_flags_need_a_tokenizer(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    message = Runner(pool, corpus, tmp_path).error("--reset-attention-mask")
    assert "--vocab-file" in message
