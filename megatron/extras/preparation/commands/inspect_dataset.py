r"""Report what a data set holds and what is suspicious in it.

    python tools/inspect_dataset.py data/corpus_text_document --vocab-file vocab.json \
        --merge-file merges.txt --strict

    python tools/inspect_dataset.py corpus/web --dataset-format parquet --col-name tokens

Suspicious are missing and doubled separators, empty documents and ids outside of the vocabulary.
Of a data set of conversations, --show N shows which tokens count in the loss.
With --dataset-format, damaged files are named. They give the exit code 1.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import tyro

from megatron.base import exit_codes
from megatron.base.errors import ConfigError
from megatron.base.plain_text import print_line
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.console.tokenizer_flags import TokenizerFlags
from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer_record import check_tokenizers_of_data
from megatron.extras.preparation.conversations.show import (
    format_conversations,
    inspect_conversations,
    to_json,
)
from megatron.extras.preparation.corpus.manifest import expand_manifests
from megatron.extras.preparation.preprocess.inspection import inspect_dataset, plot_lengths, report
from megatron.extras.preparation.preprocess.row_inspection import format_rows_report, inspect_rows
from megatron.tokenizer.build import Tokenizer, build_tokenizer, list_special_token_ids


@dataclass(frozen=True)
class InspectDatasetArguments:
    """The command line."""

    prefix: tyro.conf.Positional[str]
    """Path of the data set without .bin and .idx. The manifest of a corpus: all digests are
    compared, and each shard is inspected. With --dataset-format: a file, folder or URL."""
    dataset_format: Literal["parquet", "arrow", "jsonl"] | None = None
    """Inspect files of this format, which training reads without preparation."""
    col_name: str = "text"
    """With --dataset-format: the column with the texts or the lists of token ids."""
    data_cache_path: str | None = None
    """With --dataset-format: folder for what is read from a URL."""
    tokenizer: Annotated[TokenizerFlags, tyro.conf.arg(name="")] = field(
        default_factory=TokenizerFlags
    )
    show: int = 0
    """Show the first N conversations. Tokens that count in the loss are green, or between « and
    »."""
    seq_length: int | None = None
    """With conversations: report how well they fill samples of this length."""
    strict: bool = False
    """Exit with 1 if problems are found."""
    json: bool = False
    """Print JSON."""
    plot: str | None = None
    """Write the histogram of document lengths to this .png."""


def main(argv: list[str] | None = None) -> int:
    """Print the report that `argv` asks for and return the exit code."""
    given = parse_arguments(InspectDatasetArguments, args=argv, description=__doc__)
    return run_tool(lambda: _inspect(given))


def _inspect(given: InspectDatasetArguments) -> int:
    # Without tokenizer flags the tool checks only what the files themselves show.
    named = given.tokenizer != TokenizerFlags()
    if named:
        tokenizer = build_tokenizer(given.tokenizer.make_config())
    else:
        tokenizer = None
    if given.dataset_format is not None:
        return _inspect_rows(given, given.dataset_format, tokenizer)
    prefixes = expand_manifests([given.prefix])
    if given.show or given.seq_length is not None or IndexedDataset(prefixes[0]).is_packed:
        return _inspect_conversations(given, prefixes, tokenizer)
    if given.plot is not None and len(prefixes) > 1:
        raise ConfigError("--plot needs one data set. Give the path of a shard, or merge them.")
    return max(_inspect_indexed(given, prefix, tokenizer) for prefix in prefixes)


def _inspect_conversations(
    given: InspectDatasetArguments, prefixes: list[str], tokenizer: Tokenizer | None
) -> int:
    if given.plot is not None:
        raise ConfigError("--plot is for documents. Leave it out.")
    if tokenizer is not None:
        # Another tokenizer would show other texts.
        check_tokenizers_of_data(given.tokenizer.make_config(), prefixes)
    for prefix in prefixes:
        found = inspect_conversations(prefix, given.show, given.seq_length, tokenizer)
        if given.json:
            print_line(json.dumps(to_json(found), indent=1))
        elif sys.stdout.isatty():
            # `print_line` would remove the colours. All foreign text was made plain.
            print(format_conversations(found, tokenizer, colour=True), flush=True)
        else:
            print_line(format_conversations(found, tokenizer, colour=False))
    return 0


def _inspect_indexed(
    given: InspectDatasetArguments, prefix: str, tokenizer: Tokenizer | None
) -> int:
    found = inspect_dataset(
        prefix,
        tokenizer.vocab_size if tokenizer else None,
        tokenizer.eod if tokenizer else None,
        list_special_token_ids(tokenizer) if tokenizer else (),
    )
    if given.plot is not None:
        plot_lengths(found, given.plot)
    print_line(json.dumps(asdict(found), indent=1) if given.json else report(found))
    # A suspicion that may be harmless must not stop a pipeline of scripts.
    if given.strict and any(problem.sure for problem in found.problems):
        return exit_codes.FOUND
    return 0


def _inspect_rows(given: InspectDatasetArguments, format: str, tokenizer: Tokenizer | None) -> int:
    if given.plot is not None:
        raise ConfigError("--plot needs an indexed data set. Leave out --dataset-format or --plot.")
    found = inspect_rows(
        given.prefix,
        format,
        given.col_name,
        vocab_size=tokenizer.vocab_size if tokenizer else None,
        encode=tokenizer.encode_batch if tokenizer else None,
        cache_folder=given.data_cache_path,
    )
    print_line(json.dumps(asdict(found), indent=1) if given.json else format_rows_report(found))
    return int(bool(found.damaged or (given.strict and found.problems)))


if __name__ == "__main__":
    sys.exit(main())
