"""The flags of the tokenizer as the tools have them.

They are those of `TokenizerConfig` that matter without a model.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from megatron.config.data import TokenizerConfig, TokenizerType

_MEGATRON_NAMES: dict[str, TokenizerType] = {
    "HuggingFaceTokenizer": "PretrainedFromHF",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "SentencePieceTokenizer",
}
"""Names in Megatron-LM. The training's compatibility tables have them, too."""

TokenizerTypeName = (
    TokenizerType | Literal["HuggingFaceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"]
)
"""A type, by our name or by Megatron-LM's."""

TokenizerPath = Annotated[str | None, tyro.conf.arg(aliases=("--tokenizer-model",))]


def resolve_tokenizer_type(name: TokenizerTypeName) -> TokenizerType:
    """Return our name of a type."""
    flag: Any = _MEGATRON_NAMES.get(name, name)
    return flag


@dataclass(frozen=True)
class TokenizerFlags:
    """The flags that choose a tokenizer."""

    tokenizer_type: TokenizerTypeName = "GPT2BPETokenizer"
    """GPT2BPETokenizer (--vocab-file, --merge-file), PretrainedFromHF (Hugging Face folder), or
    SentencePieceTokenizer (tokenizer.model). The others are Megatron-LM's names of these."""
    vocab_file: str | None = None
    """File vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = None
    """File merges.txt of GPT2BPETokenizer."""
    tokenizer_name_or_path: TokenizerPath = None
    """Folder or Hub name of the Hugging Face tokenizer, or the file tokenizer.model."""

    def make_config(self) -> TokenizerConfig:
        """Return the tokenizer's part of a configuration."""
        return TokenizerConfig(
            tokenizer_type=resolve_tokenizer_type(self.tokenizer_type),
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            tokenizer_name_or_path=self.tokenizer_name_or_path,
        )

    def make_config_if_given(self) -> TokenizerConfig | None:
        """Return the tokenizer's part of a configuration, or None if no flag names a tokenizer."""
        if self == TokenizerFlags():
            return None
        return self.make_config()
