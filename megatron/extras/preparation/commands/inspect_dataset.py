r"""Report what a data set holds and what is suspicious in it.

    python tools/inspect_dataset.py data/corpus_text_document --vocab-file vocab.json \
        --merge-file merges.txt --strict

    python tools/inspect_dataset.py corpus/web --dataset-format parquet --col-name tokens

Suspicious are missing and doubled separators, empty documents and ids outside of the vocabulary.
Of a data set of conversations, --show N shows which tokens count in the loss.
With --dataset-format, damaged files are named. They give the exit code 1.
"""

import collections
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from megatron.base import exit_codes
from megatron.base.errors import ConfigError
from megatron.base.plain_text import make_plain, print_line
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.console.tokenizer_flags import TokenizerFlags
from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer_record import check_tokenizers_of_data
from megatron.extras.preparation.corpus.manifest import expand_manifests
from megatron.extras.preparation.preprocess.inspection import inspect_dataset, plot_lengths, report
from megatron.extras.preparation.preprocess.row_inspection import format_rows_report, inspect_rows
from megatron.extras.samples.chat.packed import ConversationPacking
from megatron.tokenizer.build import Tokenizer, build_tokenizer, list_special_token_ids

_COLOUR = "\x1b[32m{}\x1b[0m"
_MARKED = "«{}»"
_SPECIALS = 20
"""Special tokens that are listed."""


@dataclass(frozen=True)
class ConversationReport:
    """What a data set of conversations holds."""

    prefix: str
    conversations: int
    tokens: int
    counted: int
    """Tokens that count in the loss."""
    longest: int
    samples: int | None
    """Samples of one pass with --seq-length."""
    too_long: int
    """Conversations that do not fit into a sample. A run refuses them."""
    efficiency: float | None
    """Share of these samples that conversations fill. The rest is padding."""
    specials: dict[str, int] = field(default_factory=dict)
    """Special token -> how often the conversations that are shown have it."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """The first conversations: `tokens`, and `counted` for each of them."""


def inspect_conversations(
    prefix: str, show: int, seq_length: int | None, tokenizer: Tokenizer | None
) -> ConversationReport:
    """Return what a data set of conversations holds.

    Args:
        prefix: Path of the data set.
        show: Conversations to show.
        seq_length: Tokens of a sample. None leaves out how they are packed.
        tokenizer: The tokenizer. It is needed to show conversations.

    Raises:
        ConfigError: The data are documents, or the tokenizer is missing.
        DataError: The data set is damaged.
    """
    data = IndexedDataset(prefix)
    if not data.is_packed:
        raise ConfigError(
            f"{prefix} holds documents, whose tokens all count. --show is for data that "
            "preprocess_data.py --conversations has made."
        )
    if show and tokenizer is None:
        raise ConfigError(f"--show {show} needs the tokenizer. Give its flags.")
    samples = efficiency = None
    too_long = 0
    if seq_length is not None:
        samples = ConversationPacking().count_samples(data, (0, len(data)), seq_length)
        fitting = data.sizes[data.sizes <= seq_length + 1]
        too_long = len(data) - len(fitting)
        efficiency = float(fitting.sum(dtype=np.int64) / (samples * (seq_length + 1)))
    shown = []
    # Of the shown ones only. All would have to be decoded.
    found: collections.Counter[str] = collections.Counter()
    for number in range(min(show, len(data))):
        assert tokenizer is not None
        # The sign says whether a token counts.
        stored = data[number]
        ids = np.maximum(stored, ~stored).tolist()
        special = {*list_special_token_ids(tokenizer)}
        found.update(tokenizer.decode([each]) for each in ids if each in special)
        texts = [tokenizer.decode([each]) for each in ids]
        shown.append({"ids": ids, "tokens": texts, "counted": (stored >= 0).tolist()})
    return ConversationReport(
        prefix, len(data), len(data.tokens), int(np.count_nonzero(data.tokens >= 0)),
        int(data.sizes.max()), samples, too_long, efficiency,
        dict(found.most_common(_SPECIALS)), shown,
    )  # fmt: skip


def format_conversations(
    report: ConversationReport, tokenizer: Tokenizer | None, *, colour: bool
) -> str:
    """Return a report for people.

    Args:
        report: The report.
        tokenizer: Decodes the conversations that are shown.
        colour: Whether counted tokens are green. Otherwise they are between « and ».
    """
    lines = [*_list_shown(report, tokenizer, _COLOUR if colour else _MARKED)]
    for name, count in report.specials.items():
        lines.append(f"special token {make_plain(name)}: {count} in the conversations above")
    rows = {
        "conversations": f"{report.conversations:,}",
        "tokens": f"{report.tokens:,}",
        "counted in the loss": f"{report.counted:,} ({report.counted / report.tokens:.1%})",
        "longest": f"{report.longest:,} tokens",
    }
    if report.samples is not None and report.efficiency is not None:
        rows["samples of a pass"] = f"{report.samples:,}, {report.efficiency:.1%} filled"
    if report.too_long:
        rows["PROBLEM"] = f"{report.too_long:,} are longer than a sample. A run refuses them"
    return "\n".join([*lines, *(f"{name:20} {value}" for name, value in rows.items())])


def _list_shown(
    report: ConversationReport, tokenizer: Tokenizer | None, form: str
) -> Iterator[str]:
    """Yield the conversations that are shown."""
    for number, each in enumerate(report.shown):
        assert tokenizer is not None
        pieces = []
        pairs = zip(each["counted"], each["ids"], strict=True)
        for counted, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
            # Several tokens may be one character. The text is foreign.
            text = tokenizer.decode([token for _, token in run])
            text = "\n".join(map(make_plain, text.split("\n")))
            pieces.append(form.format(text) if counted else text)
        yield f"--- conversation {number + 1}"
        yield "".join(pieces)


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
            print_line(json.dumps(asdict(found), indent=1))
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
