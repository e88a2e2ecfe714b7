"""The loops of csrc/index_helpers.cpp in NumPy, for machines without a C++ compiler: the same
bytes, slower.

Every index that is read from an array is checked before it is used, as in C++: RuntimeError says
which one is out of range.
Source: the definitions are Megatron-LM's (https://arxiv.org/abs/1909.08053), the vectorisation is
by cumulated sizes.
"""

import numpy as np
from numpy.typing import NDArray

REVISION = 2
"""Of the helpers' contract; see index_helpers.py."""
_CHUNK = 1 << 20


def check_range(indices: NDArray, count: int, name: str) -> None:
    """Check that all indices lie in [0, count).

    Raises:
        RuntimeError: one does not; the message names it. NumPy itself would accept a negative one.
    """
    if indices.size == 0:
        return
    for extreme in (int(indices.min()), int(indices.max())):
        if not 0 <= extreme < count:
            raise RuntimeError(f"{name} {extreme} is out of range: there are {count}")


def sample_index(sizes: NDArray[np.int32], doc_idx: NDArray, seq_length: int, out: NDArray) -> None:
    """Fill out[k] = (index into doc_idx, offset) where sample k begins; out is int32 or int64
    [samples + 1, 2].

    Sample k begins at token k x seq_length of the shuffled documents, in the document that holds
    this token.

    Raises:
        RuntimeError: doc_idx names a document that does not exist, or the documents end before the
            last sample.
    """
    if seq_length < 1:
        raise RuntimeError("the sequence length must be at least 1")
    num_samples = len(out) - 1
    out[0] = 0
    done, before = 1, 0
    for start in range(0, len(doc_idx), _CHUNK):
        documents = doc_idx[start : start + _CHUNK]
        check_range(documents, len(sizes), "document")
        chosen = sizes[documents]
        if chosen.min() < 0:
            raise RuntimeError(
                f"document {int(documents[chosen.argmin()])} has size {int(chosen.min())}"
            )
        ends = before + np.cumsum(chosen, dtype=np.int64)
        stop = min(
            num_samples, (int(ends[-1]) - 1) // seq_length
        )  # the last sample that begins in this chunk
        if stop >= done:
            places = np.arange(done, stop + 1, dtype=np.int64) * seq_length
            document = np.searchsorted(ends, places, side="right")
            begins = np.concatenate(([before], ends[:-1]))
            out[done : stop + 1, 0] = start + document
            out[done : stop + 1, 1] = places - begins[document]
            done = stop + 1
        before = int(ends[-1])
    if done <= num_samples:
        raise RuntimeError("the documents end before the last sample")


def blending_indices(
    weights: NDArray[np.float64], dataset_index: NDArray, dataset_sample_index: NDArray[np.int64]
) -> None:
    """Fill both arrays [samples]: which data set gives each sample, and which of its samples that
    is.

    Raises:
        RuntimeError: there is no weight, or the arrays differ in length.
    """
    if len(weights) < 1:
        raise RuntimeError("a mixture needs at least one weight")
    if len(dataset_index) != len(dataset_sample_index):
        raise RuntimeError("both outputs must be [samples]")
    given = np.zeros(len(weights), np.float64)
    for step in range(len(dataset_index)):
        chosen = int(np.argmax(weights * max(step, 1.0) - given))
        dataset_index[step] = chosen
        dataset_sample_index[step] = given[chosen]
        given[chosen] += 1


def gather_tokens(
    tokens: NDArray,
    pointers: NDArray[np.int64],
    sizes: NDArray[np.int32],
    doc_idx: NDArray,
    starts: NDArray[np.int64],
    rows: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """out[rows[k]] = the out.shape[1] tokens from starts[k] = (index into doc_idx, offset) on, over
    document borders.

    Raises:
        RuntimeError: an index, an offset or a document lies outside the array that it belongs to.
    """
    if len(pointers) != len(sizes):
        raise RuntimeError("pointers and sizes must be of the same documents")
    length = out.shape[1]
    for (index, offset), row in zip(starts.tolist(), rows.tolist(), strict=True):
        if not 0 <= row < len(out):
            raise RuntimeError("row outside the output")
        filled = 0
        while filled < length:
            begin, part = _stretch(tokens, pointers, sizes, doc_idx, index, offset)
            part = min(part, length - filled)
            out[row, filled : filled + part] = tokens[begin : begin + part]
            filled += part
            index += 1
            offset = 0


def _stretch(
    tokens: NDArray,
    pointers: NDArray[np.int64],
    sizes: NDArray[np.int32],
    doc_idx: NDArray,
    index: int,
    offset: int,
) -> tuple[int, int]:
    """Return where the tokens of doc_idx[index] from `offset` on begin, and how many there are.

    Raises:
        RuntimeError: see `gather_tokens`.
    """
    if index >= len(doc_idx):
        raise RuntimeError("a sample reaches past the last document")
    if index < 0:
        raise RuntimeError(f"place in doc_idx {index} is out of range: there are {len(doc_idx)}")
    document = int(doc_idx[index])
    if not 0 <= document < len(sizes):
        raise RuntimeError(f"document {document} is out of range: there are {len(sizes)}")
    size = int(sizes[document])
    if not 0 <= offset <= size:
        raise RuntimeError(f"offset {offset} is outside document {document}")
    begin = int(pointers[document]) // tokens.itemsize
    if begin < 0 or begin + size > len(tokens):
        raise RuntimeError(f"document {document} lies outside the tokens")
    return begin + offset, size - offset
