"""Every size of the network, derived once from `ModelConfig`."""

import math
from dataclasses import dataclass

from megatron.config.model import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the modules are built from, named as in docs/architecture.md, "Notation"."""

    config: ModelConfig
    vocab_size: int
    """Number of real token ids."""
    padded_vocab_size: int
    """Rows of the embedding after padding. The padding is never trained, saved or predicted."""

    @property
    def head_dim(self) -> int:
        """Width d of one attention head."""
        return self.config.kv_channels or self.config.hidden_size // self.config.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads. It equals the number of heads without grouped queries."""
        return self.config.num_query_groups or self.config.num_attention_heads

    @property
    def ffn_hidden_size(self) -> int:
        """Inner width f of the MLP."""
        return self.config.ffn_hidden_size or 4 * self.config.hidden_size

    @property
    def position_table_size(self) -> int:
        """Rows of the table of learned positions, 0 without such a table."""
        if self.config.position_embedding_type != "absolute":
            return 0
        return self.config.max_position_embeddings or self.config.seq_length

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated, 0 without rotary positions."""
        if self.config.position_embedding_type != "rotary":
            return 0
        return int(self.head_dim * self.config.rotary_percent)

    @property
    def init_std(self) -> float:
        """Sigma of the normal initialisation, as a number or a formula of the hidden size h.

        "small" is sqrt(2 / (5 h)) (https://arxiv.org/abs/1910.05895). "megatron" is
        sqrt(1 / (3 h)) (https://arxiv.org/abs/2201.11990).
        """
        std = self.config.init_method_std
        h = self.config.hidden_size
        if std == "small":
            return math.sqrt(2 / (5 * h))
        if std == "megatron":
            return math.sqrt(1 / (3 * h))
        return float(std)

    @property
    def output_init_std(self) -> float:
        """Sigma of the projections that write into the residual stream, sigma / sqrt(2 l).

        Source: https://arxiv.org/abs/1909.08053.
        """
        return self.init_std / math.sqrt(2.0 * self.config.num_layers)
