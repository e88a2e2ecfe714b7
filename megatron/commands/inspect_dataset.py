r"""Report what an indexed data set holds and what is suspicious in it.

    python tools/inspect_dataset.py data/corpus_text_document --vocab-file vocab.json \
        --merge-file merges.txt --strict

Suspicious are missing separators, empty documents and ids outside of the vocabulary.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro

from megatron.commands.run_tool import run_tool
from megatron.preprocess.flags import TokenizerFlags
from megatron.preprocess.inspection import inspect_dataset, plot_lengths, report
from megatron.tokenizer import build_tokenizer, list_special_token_ids


@dataclass(frozen=True)
class InspectDatasetArguments:
    """The command line."""

    prefix: tyro.conf.Positional[str]
    """Path of the data set without .bin and .idx."""
    tokenizer: Annotated[TokenizerFlags, tyro.conf.arg(name="")] = field(
        default_factory=TokenizerFlags
    )
    strict: bool = False
    """Exit with 1 if problems are found."""
    json: bool = False
    """Print JSON."""
    plot: str | None = None
    """Write the histogram of document lengths to this .png."""


def main(argv: list[str] | None = None) -> int:
    """Print the report that `argv` asks for and return the exit code."""
    given = tyro.cli(InspectDatasetArguments, args=argv, description=__doc__)
    return run_tool(lambda: _inspect(given))


def _inspect(given: InspectDatasetArguments) -> int:
    # Without tokenizer flags the tool checks only what the files themselves show.
    named = given.tokenizer != TokenizerFlags()
    if named:
        tokenizer = build_tokenizer(given.tokenizer.make_config())
    else:
        tokenizer = None
    found = inspect_dataset(
        given.prefix,
        tokenizer.vocab_size if tokenizer else None,
        tokenizer.eod if tokenizer else None,
        list_special_token_ids(tokenizer) if tokenizer else (),
    )
    if given.plot is not None:
        plot_lengths(found, given.plot)
    print(json.dumps(asdict(found), indent=1) if given.json else report(found))
    # A suspicion that may be harmless must not stop a pipeline of scripts.
    if given.strict and any(problem.sure for problem in found.problems):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
