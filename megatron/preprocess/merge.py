"""Several indexed data sets end to end as one.

Invariant: sequences and documents keep their order and content; the output appears when it is whole.
"""

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.errors import ConfigError, DataError


def merge_datasets(prefixes: Sequence[str], output_prefix: str) -> tuple[int, int]:
    """Write them all to `output_prefix`; returns documents and tokens. Memory does not grow with the data.

    Raises ConfigError where the output is also an input, DataError where a data set is damaged or another dtype than the first.
    """
    if not prefixes:
        raise ConfigError(
            "--input needs at least one data set, given by its path without .bin and .idx."
        )
    if Path(output_prefix).resolve() in {Path(prefix).resolve() for prefix in prefixes}:
        raise ConfigError(
            f"--output-prefix {output_prefix} is also an --input, which would be lost; choose another name."
        )
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{dataset.prefix} holds {dataset.dtype.name} and {first.prefix} {first.dtype.name}: they were made with "
                "vocabularies of different sizes, hence with different tokenizers. Preprocess them with the same one."
            )
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    total = sum(len(dataset.tokens) for dataset in datasets) * first.dtype.itemsize
    with (
        IndexedDatasetWriter(output_prefix, first.dtype) as writer,
        tqdm(total=total, unit="B", unit_scale=True, desc="merge") as bar,
    ):
        for dataset in datasets:
            writer.add_dataset(dataset)
            bar.update(len(dataset.tokens) * first.dtype.itemsize)
    return writer.num_documents, writer.num_tokens
