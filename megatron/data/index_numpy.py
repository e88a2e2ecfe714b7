"""The loops of csrc/index_helpers.cpp in NumPy, for machines without a C++ compiler.

They give the same bytes, but are slower. As in C++, every index that is read from an array is
checked before it is used. A RuntimeError names the one that is out of range.

Source: the definitions are those of Megatron-LM (https://arxiv.org/abs/1909.08053). The loops over
documents are vectorised with cumulative sizes.
"""

import numpy as np
from numpy.typing import NDArray

REVISION = 3
"""Version of the contract that the C++ extension must have. See index_helpers.py."""
# Documents handled at once, so that memory does not grow with the corpus.
_CHUNK = 1 << 20


def check_range(indices: NDArray, count: int, name: str) -> None:
    """Check that all indices lie in [0, count).

    Raises:
        RuntimeError: one does not. The message names it.
    """
    # NumPy itself would accept a negative index and read another item. min() needs an item.
    if indices.size == 0:
        return
    for extreme in (int(indices.min()), int(indices.max())):
        if not 0 <= extreme < count:
            raise RuntimeError(f"{name} {extreme} is out of range: there are {count}")


def _require(holds: bool, rule: str) -> None:
    """Check a rule for arguments.

    Raises:
        RuntimeError: it does not hold. The rules and messages are those of the C++ code.
    """
    if not holds:
        raise RuntimeError(rule)


def sample_index(sizes: NDArray[np.int32], doc_idx: NDArray, seq_length: int, out: NDArray) -> None:
    """Fill in where each sample begins.

    Sample k begins at token k x seq_length of the shuffled documents, in the document that holds
    this token.

    Args:
        sizes: int32, the size of each document.
        doc_idx: The shuffled documents.
        seq_length: Tokens of a sample, without the last label.
        out: int32 or int64 [samples + 1, 2]. Row k receives (index into doc_idx, offset).

    Raises:
        RuntimeError: an array has another shape, doc_idx names a document that does not exist, or
            the documents end before the last sample.
    """
    _require(
        sizes.ndim == 1 and doc_idx.ndim == 1,
        "sizes and doc_idx must have one dimension",
    )
    _require(
        out.ndim == 2 and out.shape[0] >= 1 and out.shape[1] == 2,
        "the output must be [samples + 1, 2]",
    )
    _require(seq_length >= 1, "the sequence length must be at least 1")
    num_samples = len(out) - 1
    out[0] = 0
    done = 1
    before = 0
    for start in range(0, len(doc_idx), _CHUNK):
        documents = doc_idx[start : start + _CHUNK]
        check_range(documents, len(sizes), "document")
        chosen = sizes[documents]
        if chosen.min() < 0:
            raise RuntimeError(
                f"document {int(documents[chosen.argmin()])} has size {int(chosen.min())}"
            )
        ends = before + np.cumsum(chosen, dtype=np.int64)
        # The last sample that begins in this chunk.
        stop = min(num_samples, (int(ends[-1]) - 1) // seq_length)
        if stop >= done:
            places = np.arange(done, stop + 1, dtype=np.int64) * seq_length
            # side="right" skips empty documents, as the loop in C++ does.
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
    """Fill in which data set gives each sample of a mixture.

    Args:
        weights: One for each data set. They add up to 1.
        dataset_index: [samples], receives the data set of each sample.
        dataset_sample_index: [samples], receives the number of the sample in its data set.

    Raises:
        RuntimeError: no weight is given, an output has another shape, or the type of
            `dataset_index` is too small for the number of data sets.
    """
    _require(weights.ndim == 1 and len(weights) >= 1, "a mixture needs at least one weight")
    _require(
        dataset_index.ndim == 1 and dataset_sample_index.shape == dataset_index.shape,
        "both outputs must be [samples]",
    )
    # NumPy would store a larger number modulo the size of the type.
    _require(
        len(weights) - 1 <= np.iinfo(dataset_index.dtype).max,
        "the output's type cannot number that many data sets",
    )
    given = np.zeros(len(weights), np.float64)
    for step in range(len(dataset_index)):
        # At a tie argmax takes the first data set, as the loop in C++ does.
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
    """Copy the tokens of samples, across the borders of documents.

    Args:
        tokens: All tokens of the corpus.
        pointers: The byte at which each document begins.
        sizes: The number of tokens of each document.
        doc_idx: The shuffled documents.
        starts: [k, 2], (index into doc_idx, offset) of each sample.
        rows: [k]. Row rows[i] of `out` receives the sample that begins at starts[i].
        out: out.shape[1] tokens of each sample are written.

    Raises:
        RuntimeError: an array has another shape, or an index, an offset or a document is outside
            the array that it belongs to.
    """
    _require(
        all(array.ndim == 1 for array in (tokens, pointers, sizes, doc_idx, rows)),
        "tokens, pointers, sizes, doc_idx and rows must have one dimension",
    )
    _require(len(pointers) == len(sizes), "pointers and sizes must be of the same documents")
    _require(starts.shape == (len(rows), 2), "starts must be [rows, 2]")
    _require(out.ndim == 2, "the output must be [rows, tokens]")
    length = out.shape[1]
    for (index, offset), row in zip(starts.tolist(), rows.tolist(), strict=True):
        if not 0 <= row < len(out):
            raise RuntimeError("row outside the output")
        filled = 0
        while filled < length:
            # The messages are those of the C++ code, so that both fail in the same way.
            if index >= len(doc_idx):
                raise RuntimeError("a sample reaches past the last document")
            if index < 0:
                count = len(doc_idx)
                raise RuntimeError(f"place in doc_idx {index} is out of range: there are {count}")
            document = int(doc_idx[index])
            if not 0 <= document < len(sizes):
                raise RuntimeError(f"document {document} is out of range: there are {len(sizes)}")
            size = int(sizes[document])
            if not 0 <= offset <= size:
                raise RuntimeError(f"offset {offset} is outside document {document}")
            begin = int(pointers[document]) // tokens.itemsize
            if begin < 0 or begin + size > len(tokens):
                raise RuntimeError(f"document {document} lies outside the tokens")
            begin += offset
            part = min(size - offset, length - filled)
            out[row, filled : filled + part] = tokens[begin : begin + part]
            filled += part
            # The sample continues at the first token of the next shuffled document.
            index += 1
            offset = 0
