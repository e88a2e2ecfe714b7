"""Rules about the files of the tokenizer."""

import os
from collections.abc import Iterator

from megatron.config.data import TokenizerConfig
from megatron.rules.finding import Finding, error
from megatron.tokenizer.vocabulary import describe_absence, describe_lack, find_tokenizer_folder


def check_tokenizer_files(config: TokenizerConfig) -> Iterator[Finding]:
    """Check that each file that a run needs is on this machine.

    A run must not guess the size of its vocabulary. Only a plan may guess it (`find_vocab_size`).
    """
    stated = config.vocab_size is not None
    without = "or leave it out and give --vocab-size N, if no tokenizer is needed"
    name = config.tokenizer_name_or_path
    if config.has_two_files:
        for flag, path in (
            ("--vocab-file", config.vocab_file),
            ("--merge-file", config.merge_file),
        ):
            if path is not None and not os.path.isfile(path):
                yield error(f"{flag} {path} does not exist. Correct the path, {without}.")
        if config.vocab_file is None and not stated:
            yield error(
                "the size of the vocabulary is unknown: give --vocab-file and --merge-file, "
                "--tokenizer-type with --tokenizer-name-or-path, or --vocab-size N."
            )
    elif find_tokenizer_folder(name) is not None:
        return
    elif name is None:
        # If the size is given, no text is tokenized.
        if not stated:
            yield error(describe_lack(config))
    # A name may be on the Hugging Face Hub. If the size is given, the name alone is enough.
    elif not stated or name.startswith((".", "/", "~")):
        yield error(describe_absence(config))
