r"""Concatenate several indexed data sets.

    python tools/merge_datasets.py --input data/a_text_document data/b_text_document \
        --output-prefix data/all_text_document

The result is a new data set. The inputs stay as they are. The manifest of a corpus, such as
corpus.json, stands for all of its shards.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from megatron.base.errors import ConfigError, DataError
from megatron.base.host_limits import allow_open_files
from megatron.base.plain_text import print_line
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.data.tokenizer_record import compare_tokenizers, read_record, write_record
from megatron.extras.preparation.corpus.manifest import expand_manifests
from megatron.extras.preparation.preprocess.build_dataset import refuse_existing


def merge_datasets(
    prefixes: Sequence[str], output_prefix: str, *, overwrite: bool = False
) -> tuple[int, int]:
    """Write several data sets to `output_prefix`. Memory does not grow with the data.

    Sequences and documents keep their order and content. The output gets its final name when it is
    complete.

    Args:
        prefixes: Paths of the data sets, without .bin and .idx.
        output_prefix: Path of the result, without .bin and .idx.
        overwrite: Replace a data set that has this path already.

    Returns:
        The number of documents and of tokens.

    Raises:
        ConfigError: no input is given, or the output is also an input or exists already.
        DataError: a data set is damaged, or has another dtype or another tokenizer than the first
            one.
    """
    if not prefixes:
        raise ConfigError(
            "--input needs at least one data set, given by its path without .bin and .idx."
        )
    # Inputs are memory-mapped. Renaming the output over one of them would replace it permanently.
    if Path(output_prefix).resolve() in {Path(prefix).resolve() for prefix in prefixes}:
        raise ConfigError(
            f"--output-prefix {output_prefix} is also an --input, which would be lost. Choose "
            "another name."
        )
    if not overwrite:
        refuse_existing(output_prefix)
    # All inputs are opened and checked before anything is written. Each holds two files open.
    allow_open_files(2 * len(prefixes))
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{dataset.prefix} holds {dataset.dtype.name} and {first.prefix} "
                f"{first.dtype.name}: they were made with vocabularies of different sizes, so with "
                "different tokenizers. Preprocess them with the same tokenizer."
            )
    made_with = _merge_records(prefixes)
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    # After a crash, the record of an older data set must not stay beside the new one.
    write_record(output_prefix, None)
    total = sum(len(dataset.tokens) for dataset in datasets) * first.dtype.itemsize
    with (
        IndexedDatasetWriter(output_prefix, first.dtype) as writer,
        tqdm(total=total, unit="B", unit_scale=True, desc="merge") as bar,
    ):
        for dataset in datasets:
            writer.add_dataset(dataset)
            bar.update(len(dataset.tokens) * first.dtype.itemsize)
    write_record(output_prefix, made_with)
    return writer.num_documents, writer.num_tokens


def _merge_records(prefixes: Sequence[str]) -> dict[str, dict[str, str]] | None:
    """Return the tokenizer that all data sets have, or None if that of one is not known.

    Raises:
        DataError: two were made with different tokenizers, or a record cannot be read.
    """
    records = [read_record(prefix) for prefix in prefixes]
    known = [(prefix, record) for prefix, record in zip(prefixes, records, strict=True) if record]
    for prefix, record in known[1:]:
        differing = compare_tokenizers(record, known[0][1])
        if differing:
            raise DataError(
                f"{prefix} was made with another tokenizer than {known[0][0]}: "
                f"{'; '.join(differing)} (xxh3_128 of the files). Preprocess them with the same "
                "tokenizer."
            )
    if len(known) < len(prefixes):
        return None
    return records[0]


def merge(input: tuple[str, ...], output_prefix: str, overwrite: bool = False) -> int:
    """Concatenate several indexed data sets.

    Args:
        input: Data sets in the order of the output, each by its path without .bin and .idx, or the
            manifest of a corpus. The digests of its shards are compared first.
        output_prefix: Path of the result without .bin and .idx.
        overwrite: Replace a data set that has this path already.
    """
    prefixes = expand_manifests(input)
    documents, tokens = merge_datasets(prefixes, output_prefix, overwrite=overwrite)
    print_line(
        f"{output_prefix}: {documents} documents, {tokens} tokens of {len(prefixes)} data sets"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Merge the data sets that `argv` names and return the exit code."""
    return run_tool(lambda: parse_arguments(merge, args=argv))


if __name__ == "__main__":
    sys.exit(main())
