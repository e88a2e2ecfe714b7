"""C++ equals NumPy byte for byte on random inputs, and both equal the definition."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import index_helpers, index_numpy

cpp = pytest.importorskip(
    "megatron.data._index_helpers",
    reason="C++ INDEX HELPERS ARE NOT BUILT: nothing to compare NumPy with",
)

corpora = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 1),
    st.integers(1, 5),  # epochs
    st.integers(0, 2**32 - 1),  # seed
    st.integers(1, 20),  # sequence length
)


def make_unaligned(array):
    """Return the same values at an odd address, as inside an .idx file."""
    raw = np.zeros(array.nbytes + 2, np.uint8)
    raw[2:] = array.view(np.uint8)
    return np.frombuffer(raw.data, array.dtype, len(array), 2)


def shuffle_documents(sizes, epochs, seed, dtype):
    doc_idx = np.tile(np.arange(len(sizes), dtype=dtype), epochs)
    np.random.RandomState(seed).shuffle(doc_idx)
    return doc_idx


@settings(max_examples=200, deadline=None)
@given(corpora, st.sampled_from([np.int32, np.int64]), st.sampled_from([np.int32, np.int64]))
def test_sample_index_in_cpp_and_numpy_equals_the_definition(corpus, doc_type, out_type):
    sizes, epochs, seed, seq_length = corpus
    sizes = np.array(sizes, np.int32)
    doc_idx = shuffle_documents(sizes, epochs, seed, doc_type)
    num_samples = (epochs * int(sizes.sum()) - 1) // seq_length
    fast = np.full((num_samples + 1, 2), -1, out_type)
    slow = np.full((num_samples + 1, 2), -1, out_type)
    cpp.sample_index(make_unaligned(sizes), doc_idx, seq_length, fast)
    index_numpy.sample_index(sizes, doc_idx, seq_length, slow)
    assert fast.tobytes() == slow.tobytes()
    owner = [
        (place, offset)
        for place, document in enumerate(doc_idx)
        for offset in range(sizes[document])
    ]
    assert [tuple(row) for row in fast[1:]] == owner[seq_length::seq_length][:num_samples]
    assert tuple(fast[0]) == (0, 0)


@settings(max_examples=20, deadline=None)
@given(corpora, st.integers(1, 4))
def test_sample_index_in_chunks_is_the_same(corpus, chunk):
    sizes, epochs, seed, seq_length = corpus
    sizes = np.array(sizes, np.int32)
    doc_idx = shuffle_documents(sizes, epochs, seed, np.int32)
    num_samples = (epochs * int(sizes.sum()) - 1) // seq_length
    out = np.zeros((num_samples + 1, 2), np.int32)
    chunked = np.zeros((num_samples + 1, 2), np.int32)
    index_numpy.sample_index(sizes, doc_idx, seq_length, out)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index_numpy, "_CHUNK", chunk)
        index_numpy.sample_index(sizes, doc_idx, seq_length, chunked)
    assert out.tobytes() == chunked.tobytes()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7),
    st.integers(0, 300),
    st.sampled_from([np.uint8, np.int32]),
)
def test_blending_indices_in_cpp_and_numpy_are_the_same(weights, size, which_type):
    weights = np.array(weights)
    weights /= weights.sum()
    results = []
    for module in (cpp, index_numpy):
        which = np.zeros(size, which_type)
        sample = np.zeros(size, np.int64)
        module.blending_indices(weights, which, sample)
        results.append(which.tobytes() + sample.tobytes())
    assert results[0] == results[1]


@settings(max_examples=200, deadline=None)
@given(
    corpora,
    st.sampled_from(["u1", "i1", "i2", "u2", "i4", "i8"]),
    st.sampled_from([np.int32, np.int64]),
    st.data(),
)
def test_gather_tokens_in_cpp_and_numpy_equals_the_definition(corpus, token_type, doc_type, data):
    sizes, epochs, seed, seq_length = corpus
    sizes = np.array(sizes, np.int32)
    doc_idx = shuffle_documents(sizes, epochs, seed, doc_type)
    total = int(sizes.sum())
    tokens = np.random.RandomState(seed).randint(0, 100, total).astype(token_type)
    begins = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
    num_samples = (epochs * total - 1) // seq_length
    if num_samples == 0:
        return
    index = np.zeros((num_samples + 1, 2), np.int32)
    index_numpy.sample_index(sizes, doc_idx, seq_length, index)
    samples = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), max_size=5)), np.int64)
    rows = np.array(data.draw(st.permutations(range(len(samples)))), np.int64)
    starts = index[samples].astype(np.int64)
    pointers = begins * tokens.itemsize
    fast = np.full((len(samples), seq_length + 1), -1, np.int64)
    slow = np.full((len(samples), seq_length + 1), -1, np.int64)
    cpp.gather_tokens(
        tokens, make_unaligned(pointers), make_unaligned(sizes), doc_idx, starts, rows, fast
    )
    index_numpy.gather_tokens(tokens, pointers, sizes, doc_idx, starts, rows, slow)
    assert fast.tobytes() == slow.tobytes()
    stream = np.concatenate([tokens[begins[d] : begins[d] + sizes[d]] for d in doc_idx]).astype(
        np.int64
    )
    for sample, row in zip(samples, rows, strict=True):
        begin = sample * seq_length
        assert fast[row].tolist() == stream[begin : begin + seq_length + 1].tolist()


@pytest.mark.parametrize("module", [cpp, index_numpy])
def test_running_out_of_documents_is_an_error_not_a_crash(module):
    sizes = np.array([3, 4], np.int32)
    doc_idx = np.array([0, 1], np.int32)
    with pytest.raises(RuntimeError, match="end before the last sample"):
        module.sample_index(sizes, doc_idx, 5, np.zeros((9, 2), np.int32))
    with pytest.raises(RuntimeError, match="past the last document"):
        module.gather_tokens(**make_gather_arguments(out=np.zeros((1, 8), np.int64)))


@pytest.mark.parametrize("module", [cpp, index_numpy])
def test_a_row_outside_the_output_is_an_error_not_a_crash(module):
    with pytest.raises(RuntimeError, match="row outside the output"):
        module.gather_tokens(**make_gather_arguments(rows=np.array([1])))


def test_the_slow_implementation_is_reported():
    assert index_helpers.describe_implementation() == "C++"
    program = (
        "import sys; sys.modules['megatron.data._index_helpers'] = None\n"
        "from megatron.data import index_helpers, index_numpy\n"
        "assert index_helpers.sample_index is index_numpy.sample_index\n"
        "print(index_helpers.describe_implementation())"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith("NumPy (slower: ")


def make_gather_arguments(**changed):
    """Return arguments for two documents of 3 and 4 tokens and one sample of 7."""
    arguments = {
        "tokens": np.arange(7, dtype=np.uint16),
        "pointers": np.array([0, 6]),
        "sizes": np.array([3, 4], np.int32),
        "doc_idx": np.array([1, 0], np.int32),
        "starts": np.array([[0, 0]]),
        "rows": np.array([0]),
        "out": np.full((1, 7), -1, np.int64),
    }
    return {**arguments, **changed}


HUGE = 2**31 - 1


@pytest.mark.parametrize("module", [cpp, index_numpy])
@pytest.mark.parametrize(
    "changed",
    [{"doc_idx": np.array([value, 0], np.int32)} for value in (-1, 2, HUGE, -HUGE)]
    + [{"doc_idx": np.array([value, 0], np.int64)} for value in (2**62, -(2**62))]
    + [
        {"starts": np.array([[index, offset]])}
        for index, offset in [
            (-1, 0),
            (2, 0),
            (2**62, 0),
            (0, -1),
            (0, 5),
            (0, 2**62),
            (0, -(2**62)),
        ]
    ]
    + [{"pointers": np.array([0, value])} for value in (-2, 8, 2**62, -(2**63), 2**63 - 1)]
    + [{"sizes": np.array([3, value], np.int32)} for value in (-1, 5, HUGE, -HUGE - 1)]
    + [{"rows": np.array([value])} for value in (-1, 1, 2**62)]
    + [
        {"tokens": np.arange(6, dtype=np.uint16)},
        {"pointers": np.array([0])},
    ]
    + [
        {"tokens": np.zeros((7, 1), np.uint16)},
        {"starts": np.array([0, 0])},
        {"starts": np.array([[0, 0, 0]])},
        {"rows": np.array([0, 0])},
        {"out": np.zeros(7, np.int64)},
    ],
    ids=str,
)
def test_a_wrong_index_or_shape_is_an_error_not_a_crash(module, changed):
    module.gather_tokens(**make_gather_arguments())
    with pytest.raises(RuntimeError):
        module.gather_tokens(**make_gather_arguments(**changed))


@pytest.mark.parametrize("module", [cpp, index_numpy])
@pytest.mark.parametrize("document", [-1, 2, HUGE, -HUGE])
def test_a_document_that_does_not_exist_has_no_samples(module, document):
    with pytest.raises(RuntimeError, match=f"document {document} is out of range"):
        module.sample_index(
            np.array([3, 4], np.int32),
            np.array([0, document], np.int32),
            2,
            np.zeros((4, 2), np.int32),
        )


@pytest.mark.parametrize("module", [cpp, index_numpy])
def test_impossible_sizes_and_outputs_are_refused(module):
    documents = np.array([0, 1], np.int32)
    with pytest.raises(RuntimeError, match="size -5"):
        module.sample_index(np.array([3, -5], np.int32), documents, 2, np.zeros((4, 2), np.int32))
    with pytest.raises(RuntimeError, match="sequence length"):
        module.sample_index(np.array([3, 4], np.int32), documents, 0, np.zeros((4, 2), np.int32))
    with pytest.raises(RuntimeError, match="at least one weight"):
        module.blending_indices(np.array([]), np.zeros(3, np.uint8), np.zeros(3, np.int64))
    with pytest.raises(RuntimeError, match="both outputs"):
        module.blending_indices(np.array([1.0]), np.zeros(3, np.uint8), np.zeros(2, np.int64))


@pytest.mark.parametrize("module", [cpp, index_numpy])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (0, 2), (4, 2, 1)])
def test_a_sample_index_of_another_shape_is_refused(module, shape):
    sizes = np.array([3, 4], np.int32)
    documents = np.array([0, 1], np.int32)
    with pytest.raises(RuntimeError, match=r"\[samples \+ 1, 2\]"):
        module.sample_index(sizes, documents, 2, np.zeros(shape, np.int32))
    with pytest.raises(RuntimeError, match="must have one dimension"):
        module.sample_index(sizes[:, None], documents, 2, np.zeros((4, 2), np.int32))


@pytest.mark.parametrize("module", [cpp, index_numpy])
def test_blending_arrays_of_another_shape_are_refused(module):
    weights = np.array([0.5, 0.5])
    with pytest.raises(RuntimeError, match="at least one weight"):
        module.blending_indices(weights[None], np.zeros(3, np.uint8), np.zeros(3, np.int64))
    with pytest.raises(RuntimeError, match="both outputs"):
        module.blending_indices(weights, np.zeros((3, 1), np.uint8), np.zeros((3, 1), np.int64))


@pytest.mark.parametrize("module", [cpp, index_numpy])
def test_a_type_too_small_for_the_number_of_data_sets_is_refused(module):
    which = np.zeros(600, np.uint8)
    sample = np.zeros(600, np.int64)
    module.blending_indices(np.full(256, 1 / 256), which, sample)
    with pytest.raises(RuntimeError, match="cannot number"):
        module.blending_indices(np.full(257, 1 / 257), which, sample)


def test_an_older_build_without_range_checks_is_not_used():
    program = (
        "import sys, types; sys.modules['megatron.data._index_helpers'] = types.ModuleType('old')\n"
        "from megatron.data import index_helpers, index_numpy\n"
        "assert index_helpers.gather_tokens is index_numpy.gather_tokens\n"
        "print(index_helpers.describe_implementation())"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith("NumPy (slower: the C++ build has revision 1")
