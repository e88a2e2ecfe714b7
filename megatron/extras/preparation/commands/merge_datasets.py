r"""Concatenate several indexed data sets.

    python tools/merge_datasets.py --input data/a_text_document data/b_text_document \
        --output-prefix data/all_text_document

The result is a new data set. The inputs stay as they are. The manifest of a corpus, such as
corpus.json, stands for all of its shards.
"""

import sys

from megatron.base.plain_text import print_line
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.preparation.corpus.manifest import expand_manifests
from megatron.extras.preparation.preprocess.merge import merge_datasets


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
