"""Say what is in an indexed data set, and what is suspicious: separators, empty documents, ids beyond the vocabulary.

python tools/inspect_dataset.py data/corpus_text_document --vocab-file vocab.json --merge-file merges.txt --strict
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro

from megatron.errors import MegatronError
from megatron.preprocess.flags import TokenizerFlags
from megatron.preprocess.inspection import inspect_dataset, plot_lengths, report
from megatron.tokenizer import build_tokenizer, list_special_token_ids


@dataclass(frozen=True)
class InspectDatasetArguments:
    prefix: tyro.conf.Positional[str]
    """Data set, by its path without .bin and .idx."""
    tokenizer: Annotated[TokenizerFlags, tyro.conf.arg(name="")] = field(
        default_factory=TokenizerFlags
    )
    strict: bool = False
    """Exit with 1 where problems are found."""
    json: bool = False
    """Print JSON."""
    plot: str | None = None
    """Write the histogram of document lengths to this .png."""


def main(argv: list[str] | None = None) -> int:
    given = tyro.cli(InspectDatasetArguments, args=argv, description=__doc__)
    try:
        named = given.tokenizer != TokenizerFlags()
        tokenizer = build_tokenizer(given.tokenizer.make_config()) if named else None
        found = inspect_dataset(
            given.prefix,
            tokenizer.vocab_size if tokenizer else None,
            tokenizer.eod if tokenizer else None,
            list_special_token_ids(tokenizer) if tokenizer else (),
        )
        if given.plot is not None:
            plot_lengths(found, given.plot)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(found), indent=1) if given.json else report(found))
    return 1 if given.strict and any(problem.sure for problem in found.problems) else 0


if __name__ == "__main__":
    sys.exit(main())
