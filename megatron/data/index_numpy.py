"""The loops of csrc/index_helpers.cpp in NumPy, for machines without a C++ compiler: the same bytes, slower.

Source: the definitions are Megatron-LM's (https://arxiv.org/abs/1909.08053), the vectorisation is by cumulated sizes.
"""

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 20


def sample_index(sizes: NDArray[np.int32], doc_idx: NDArray, seq_length: int, out: NDArray) -> None:
    """Fill out[k] = (index into doc_idx, offset) where sample k begins; out is int32 or int64 [samples + 1, 2].

    Sample k begins at token k x seq_length of the shuffled documents, in the document that holds this token.
    """
    num_samples = len(out) - 1
    out[0] = 0
    done, before = 1, 0
    for start in range(0, len(doc_idx), _CHUNK):
        ends = before + np.cumsum(sizes[doc_idx[start : start + _CHUNK]], dtype=np.int64)
        stop = min(num_samples, (int(ends[-1]) - 1) // seq_length)  # the last sample that begins in this chunk
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


def blending_indices(weights: NDArray[np.float64], dataset_index: NDArray, dataset_sample_index: NDArray[np.int64]) -> None:
    """Fill both arrays [samples]: which data set gives each sample, and which of its samples that is."""
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
    """out[rows[k]] = the out.shape[1] tokens from starts[k] = (index into doc_idx, offset) on, over document borders."""
    length = out.shape[1]
    for (index, offset), row in zip(starts.tolist(), rows.tolist(), strict=True):
        filled = 0
        while filled < length:
            if index >= len(doc_idx):
                raise RuntimeError("a sample reaches past the last document")
            document = doc_idx[index]
            begin = int(pointers[document]) // tokens.itemsize + offset
            part = min(int(sizes[document]) - offset, length - filled)
            out[row, filled : filled + part] = tokens[begin : begin + part]
            filled += part
            index, offset = index + 1, 0
