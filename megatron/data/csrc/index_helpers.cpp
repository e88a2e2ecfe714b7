// The four loops of the data path that are too slow in Python:
//
// - shuffle permutes an array as RandomState.shuffle does.
// - sample_index computes where each sample begins.
// - blending_indices chooses which data set of a mixture gives the next sample.
// - gather_tokens copies the tokens of a batch out of the memory-mapped corpus.
//
// Invariant: the results equal those of index_numpy.py byte for byte. Compile with
// -ffp-contract=off. Fused multiply-add rounds once instead of twice, and could decide a tie of a
// mixture differently.
//
// The caller allocates all outputs, which may be memory-mapped files. The GIL is released while a
// loop runs. Inputs are memory-mapped files, which may be damaged or change at any time. Every
// index that is read from them is therefore checked before it is used. std::runtime_error (Python's
// RuntimeError) names the one that is out of range.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Load one value with memcpy. The arrays of an .idx file follow a header of 34 bytes, so they are
// not aligned, and a plain access would be undefined behaviour.
template <typename T>
static inline T load(const T* base, int64_t index) {
    T value;
    std::memcpy(&value,
                reinterpret_cast<const char*>(base) + index * static_cast<int64_t>(sizeof(T)),
                sizeof(T));
    return value;
}

[[noreturn]] static void fail(const std::string& what) { throw std::runtime_error(what); }

static void require(bool holds, const char* what) {
    if (!holds) fail(what);
}

// Return `index` if it lies in [0, count), else throw.
static inline int64_t checked(int64_t index, int64_t count, const char* name) {
    if (index < 0 || index >= count) {
        fail(std::string(name) + " " + std::to_string(index) + " is out of range: there are " +
             std::to_string(count));
    }
    return index;
}

// Fill in out[k] = (index into doc_idx, offset in that document) at which sample k begins.
// Neighbouring samples share one token.
template <typename Doc, typename Out>
static void sample_index(const Array<int32_t>& sizes, const Array<Doc>& doc_idx,
                         int64_t seq_length, Array<Out>& out) {
    require(sizes.ndim() == 1 && doc_idx.ndim() == 1, "sizes and doc_idx must have one dimension");
    require(out.ndim() == 2 && out.shape(0) >= 1 && out.shape(1) == 2,
            "the output must be [samples + 1, 2]");
    require(seq_length >= 1, "the sequence length must be at least 1");
    const int32_t* size_of = sizes.data();
    const Doc* documents = doc_idx.data();
    const int64_t num_sizes = sizes.shape(0);
    const int64_t num_documents = doc_idx.shape(0);
    const int64_t num_samples = out.shape(0) - 1;
    Out* row = out.mutable_data();

    py::gil_scoped_release unlocked;
    int64_t document = 0;
    int64_t offset = 0;
    row[0] = 0;
    row[1] = 0;
    for (int64_t sample = 1; sample <= num_samples; ++sample) {
        // A sample has seq_length + 1 tokens. Its last one is the first one of the next sample.
        int64_t remaining = seq_length + 1;
        while (remaining != 0) {
            if (document >= num_documents) fail("the documents end before the last sample");
            const int64_t size = load(size_of, checked(documents[document], num_sizes, "document"));
            if (size < offset)
                fail("document " + std::to_string(documents[document]) + " has size " +
                     std::to_string(size));
            const int64_t length = size - offset;
            remaining -= length;
            // The sample ends in this document if it has at least as many tokens as remain. Then
            // `remaining` is 0 or negative. Move the offset to the last token of the sample.
            if (remaining <= 0) {
                offset += remaining + length - 1;
                remaining = 0;
            } else {
                ++document;
                offset = 0;
            }
        }
        row[2 * sample] = static_cast<Out>(document);
        row[2 * sample + 1] = static_cast<Out>(offset);
    }
}

// The layout of NumPy's bitgen_t, which the capsule of a BitGenerator holds. It is part of NumPy's
// documented C interface.
struct BitGenerator {
    void* state;
    uint64_t (*next_uint64)(void*);
    uint32_t (*next_uint32)(void*);
    double (*next_double)(void*);
    uint64_t (*next_raw)(void*);
};

// Permute the items as RandomState.shuffle does: for i from the last position to 1, swap the items
// at i and at a random position of [0, i]. The position is drawn by rejection: the lowest bits that
// can hold i, until their value is at most i.
template <typename Item>
static void shuffle(Array<Item>& items, const py::capsule& generator) {
    require(items.ndim() == 1, "the items must have one dimension");
    require(std::strcmp(generator.name(), "BitGenerator") == 0, "the generator must be NumPy's");
    const BitGenerator* bits = generator.get_pointer<BitGenerator>();
    Item* item = items.mutable_data();
    const int64_t count = items.shape(0);

    py::gil_scoped_release unlocked;
    uint64_t mask = 0;
    while (mask < static_cast<uint64_t>(count)) mask = 2 * mask + 1;
    // Positions do not depend on the items. They are drawn in groups, so that the processor loads
    // the items of a group from memory at the same time.
    constexpr int64_t group = 64;
    int64_t positions[group];
    for (int64_t last = count - 1; last >= 1; last -= group) {
        const int64_t size = last < group ? last : group;
        for (int64_t k = 0; k < size; ++k) {
            const uint64_t limit = static_cast<uint64_t>(last - k);
            while (mask / 2 >= limit) mask /= 2;
            uint64_t position;
            do {
                const bool is_short = limit <= std::numeric_limits<uint32_t>::max();
                position = is_short ? bits->next_uint32(bits->state) : bits->next_uint64(bits->state);
                position &= mask;
            } while (position > limit);
            positions[k] = static_cast<int64_t>(position);
#ifdef __GNUC__
            __builtin_prefetch(item + position, 1);
#endif
        }
        for (int64_t k = 0; k < size; ++k) std::swap(item[last - k], item[positions[k]]);
    }
}

// Choose at each step k the data set whose share of max(k, 1) samples lags most behind its weight.
template <typename Which>
static void blending_indices(const Array<double>& weights, Array<Which>& dataset_index,
                             Array<int64_t>& dataset_sample_index) {
    require(weights.ndim() == 1 && weights.shape(0) >= 1, "a mixture needs at least one weight");
    require(dataset_index.ndim() == 1 && dataset_sample_index.ndim() == 1 &&
                dataset_index.shape(0) == dataset_sample_index.shape(0),
            "both outputs must be [samples]");
    require(weights.shape(0) - 1 <= static_cast<int64_t>(std::numeric_limits<Which>::max()),
            "the output's type cannot number that many data sets");
    const double* weight = weights.data();
    const int64_t num_datasets = weights.shape(0);
    const int64_t size = dataset_index.shape(0);
    Which* which = dataset_index.mutable_data();
    int64_t* sample = dataset_sample_index.mutable_data();

    py::gil_scoped_release unlocked;
    std::vector<int64_t> given(num_datasets, 0);
    for (int64_t step = 0; step < size; ++step) {
        const double wanted = step > 1 ? static_cast<double>(step) : 1.0;
        int64_t chosen = 0;
        double largest = weight[0] * wanted - static_cast<double>(given[0]);
        for (int64_t i = 1; i < num_datasets; ++i) {
            const double lag = weight[i] * wanted - static_cast<double>(given[i]);
            // Strictly greater: the first data set wins a tie, as with NumPy's argmax.
            if (lag > largest) {
                largest = lag;
                chosen = i;
            }
        }
        which[step] = static_cast<Which>(chosen);
        sample[step] = given[chosen]++;
    }
}

// Copy to out[rows[k], :] the tokens that begin at starts[k] = (index into doc_idx, offset). Where
// a document ends, the sample continues in the next one of doc_idx.
template <typename Token, typename Doc>
static void gather_tokens(const Array<Token>& tokens, const Array<int64_t>& pointers,
                          const Array<int32_t>& sizes, const Array<Doc>& doc_idx,
                          const Array<int64_t>& starts, const Array<int64_t>& rows,
                          Array<int64_t>& out) {
    require(tokens.ndim() == 1 && pointers.ndim() == 1 && sizes.ndim() == 1 &&
                doc_idx.ndim() == 1 && rows.ndim() == 1,
            "tokens, pointers, sizes, doc_idx and rows must have one dimension");
    require(pointers.shape(0) == sizes.shape(0),
            "pointers and sizes must be of the same documents");
    require(starts.ndim() == 2 && starts.shape(1) == 2 && starts.shape(0) == rows.shape(0),
            "starts must be [rows, 2]");
    require(out.ndim() == 2, "the output must be [rows, tokens]");
    const Token* token = tokens.data();
    const int64_t num_tokens = tokens.shape(0);
    const int64_t num_sizes = sizes.shape(0);
    const int64_t* pointer_of = pointers.data();
    const int32_t* size_of = sizes.data();
    const Doc* documents = doc_idx.data();
    const int64_t* start = starts.data();
    const int64_t* row = rows.data();
    const int64_t num_documents = doc_idx.shape(0);
    const int64_t count = starts.shape(0);
    const int64_t length = out.shape(1);
    const int64_t num_rows = out.shape(0);
    int64_t* base = out.mutable_data();

    py::gil_scoped_release unlocked;
    for (int64_t k = 0; k < count; ++k) {
        if (row[k] < 0 || row[k] >= num_rows) fail("row outside the output");
        int64_t* to = base + row[k] * length;
        int64_t* const end = to + length;
        int64_t index = start[2 * k];
        int64_t offset = start[2 * k + 1];
        while (to < end) {
            if (index >= num_documents) fail("a sample reaches past the last document");
            const int64_t document =
                checked(documents[checked(index, num_documents, "place in doc_idx")], num_sizes,
                        "document");
            const int64_t size = load(size_of, document);
            // A size is an int32, and the offset lies within it. None of these sums can overflow.
            if (offset < 0 || offset > size) {
                fail("offset " + std::to_string(offset) + " is outside document " +
                     std::to_string(document));
            }
            // Pointers are in bytes.
            const int64_t begin = load(pointer_of, document) / static_cast<int64_t>(sizeof(Token));
            if (begin < 0 || begin > num_tokens - size) {
                fail("document " + std::to_string(document) + " lies outside the tokens");
            }
            const Token* from = token + begin + offset;
            int64_t part = size - offset;
            if (part > end - to) part = end - to;
            for (int64_t i = 0; i < part; ++i) to[i] = static_cast<int64_t>(from[i]);
            to += part;
            // The sample continues at the first token of the next document.
            ++index;
            offset = 0;
        }
    }
}

// Arguments are not converted. An implicit copy of a memory-mapped array would need as much memory
// as the file. An output that is copied would never reach the caller.
template <typename Token, typename Doc>
static void define_gather(py::module_& module) {
    module.def("gather_tokens", &gather_tokens<Token, Doc>, py::arg("tokens").noconvert(),
               py::arg("pointers").noconvert(), py::arg("sizes").noconvert(),
               py::arg("doc_idx").noconvert(), py::arg("starts").noconvert(),
               py::arg("rows").noconvert(), py::arg("out").noconvert());
}

template <typename Doc>
static void define_for_documents(py::module_& module) {
    module.def("sample_index", &sample_index<Doc, int32_t>, py::arg("sizes").noconvert(),
               py::arg("doc_idx").noconvert(), py::arg("seq_length"), py::arg("out").noconvert());
    module.def("sample_index", &sample_index<Doc, int64_t>, py::arg("sizes").noconvert(),
               py::arg("doc_idx").noconvert(), py::arg("seq_length"), py::arg("out").noconvert());
    define_gather<uint8_t, Doc>(module);
    define_gather<int8_t, Doc>(module);
    define_gather<int16_t, Doc>(module);
    define_gather<uint16_t, Doc>(module);
    define_gather<int32_t, Doc>(module);
    define_gather<int64_t, Doc>(module);
}

template <typename Item>
static void define_shuffle(py::module_& module) {
    module.def("shuffle", &shuffle<Item>, py::arg("items").noconvert(), py::arg("generator"));
}

template <typename Which>
static void define_blending(py::module_& module) {
    module.def("blending_indices", &blending_indices<Which>, py::arg("weights").noconvert(),
               py::arg("dataset_index").noconvert(), py::arg("dataset_sample_index").noconvert());
}

PYBIND11_MODULE(_index_helpers, module) {
    module.doc() = "Shuffles, sample index, blending indices, token gathering; see index_helpers.py.";
    // index_helpers.py refuses an older build. Raise both numbers together.
    module.attr("REVISION") = 3;
    define_for_documents<int32_t>(module);
    define_for_documents<int64_t>(module);
    define_shuffle<uint32_t>(module);
    define_shuffle<uint64_t>(module);
    define_blending<uint8_t>(module);
    define_blending<int32_t>(module);
}
