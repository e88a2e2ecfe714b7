"""The tokenizer's flags as the tools have them: those of `TokenizerConfig` that matter without a model."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.data import TokenizerConfig


@dataclass(frozen=True)
class TokenizerFlags:
    tokenizer_type: Literal["GPT2BPETokenizer", "PretrainedFromHF"] = "GPT2BPETokenizer"
    """GPT2BPETokenizer: from --vocab-file and --merge-file. PretrainedFromHF: any Hugging Face tokenizer from a local folder."""
    vocab_file: str | None = None
    """vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt of GPT2BPETokenizer."""
    tokenizer_name_or_path: str | None = None
    """Folder of the Hugging Face tokenizer."""

    def make_config(self) -> TokenizerConfig:
        return TokenizerConfig(
            tokenizer_type=self.tokenizer_type,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            tokenizer_name_or_path=self.tokenizer_name_or_path,
        )
