"""The flags of the tokenizer as the tools have them.

They are those of `TokenizerConfig` that matter without a model.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.config.data import TokenizerConfig


@dataclass(frozen=True)
class TokenizerFlags:
    """The flags that choose a tokenizer."""

    tokenizer_type: Literal["GPT2BPETokenizer", "PretrainedFromHF"] = "GPT2BPETokenizer"
    """GPT2BPETokenizer (--vocab-file, --merge-file), or PretrainedFromHF (Hugging Face folder)."""
    vocab_file: str | None = None
    """File vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = None
    """File merges.txt of GPT2BPETokenizer."""
    tokenizer_name_or_path: str | None = None
    """Folder of the Hugging Face tokenizer."""

    def make_config(self) -> TokenizerConfig:
        """Return the tokenizer's part of a configuration."""
        return TokenizerConfig(
            tokenizer_type=self.tokenizer_type,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            tokenizer_name_or_path=self.tokenizer_name_or_path,
        )
