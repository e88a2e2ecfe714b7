"""The corpus with its splits, mixtures and phases, and the tokenizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import WORKERS, Range

TokenizerType = Literal["GPT2BPETokenizer", "PretrainedFromHF", "SentencePieceTokenizer"]


@dataclass(frozen=True)
class DataConfig:
    """Settings of the data sets and of how their samples are read."""

    data_path: tuple[str, ...] = ()
    """Path of one indexed data set without .bin/.idx, or a mixture: WEIGHT PATH WEIGHT PATH ...
    With --dataset-format: one folder, or a URL such as s3://bucket/folder."""
    split: str = "969,30,1"
    """Weights by which documents are divided into training, validation and test. Missing weights
    count as 0."""
    train_weighted_split_paths: tuple[str, ...] = ()
    """'NAME: WEIGHT START:END PATH, WEIGHT START:END PATH, ...' with START:END as fractions of the
    documents, as in 0:0.95."""
    valid_weighted_split_paths: tuple[str, ...] = ()
    """As --train-weighted-split-paths. Several names make several validation sets, each with its
    own loss."""
    test_weighted_split_paths: tuple[str, ...] = ()
    """As --valid-weighted-split-paths, for the final test."""
    train_weighted_split_paths_path: str | None = None
    """File that holds the argument of --train-weighted-split-paths."""
    valid_weighted_split_paths_path: str | None = None
    """File that holds the argument of --valid-weighted-split-paths."""
    test_weighted_split_paths_path: str | None = None
    """File that holds the argument of --test-weighted-split-paths."""
    data_phases: str | None = None
    """YAML file with the phases of the training data. It replaces --data-path. With
    --dataset-format, it replaces --datasets and --weights. Each phase has a mixture, and the
    iteration or the token with which it begins. See docs/data_phases.md."""
    dataset_format: Literal["parquet", "arrow", "jsonl"] | None = None
    """Read files of this format below --data-path directly, without tools/preprocess_data.py. See
    docs/streaming.md."""
    datasets: str | None = None
    """With --dataset-format: folders below --data-path, as in web,code. Each is a data set.
    Default: --data-path itself is the only one."""
    weights: str | None = None
    """With --datasets: share of each data set in the tokens, as in 3,1. Default: equal shares."""
    col_name: str = "text"
    """With --dataset-format: the column with the texts or the lists of token ids."""
    logical_shards: Annotated[int, Range("[1, 1048576]")] = 256
    """With --dataset-format: parts into which each data set is divided. Ranks share the parts. The
    number must not change during a run. A multiple of micro-batch size x data-parallel size reads
    each document once only."""
    bos_token: Annotated[int | None, Range("[0, 2147483647]")] = None
    """With --dataset-format: id that is put before each document."""
    eos_token: Annotated[int | None, Range("[0, 2147483647]")] = None
    """With --dataset-format: id that is put after each document. Default: the tokenizer's
    end-of-document token after texts, and nothing after token ids."""
    strip_tokens: str | None = None
    """With --dataset-format: ids that are removed from the start and the end of each document
    before others are added, as in 0,1."""
    max_document_tokens: Annotated[int | None, Range("[1, 2147483647]")] = None
    """With --dataset-format: leave longer documents out of training. Special tokens that are added
    do not count."""
    max_ngram_repetition: Annotated[float | None, Range("[0, 1]")] = None
    """With --dataset-format: leave a document out of training if a larger share of its tokens is
    part of a repeated sequence of 10 tokens. Typical values are 0.1 to 0.3."""
    drop_duplicates: bool = False
    """With --dataset-format: leave a document out of training if it has the same tokens as another
    one in its window of 256 rows."""
    data_impl: Literal["mmap", "infer"] = "mmap"
    """Format of the data set. mmap (.bin/.idx) is the only one."""
    mock_data: bool = False
    """Train on synthetic tokens instead of --data-path, to measure speed or to try a command line.
    The ids of a sample increase by 1 from a random first id, so the loss falls."""
    data_cache_path: str | None = None
    """Folder for index caches. Default: the folder of the data. It is needed where that folder is
    read-only."""
    data_cache_gb: Annotated[int, Range("[0, 1048576]")] = 20
    """If --data-path is a URL: gigabytes of the data that are kept in --data-cache-path. What was
    not used for the longest time is removed first. 0 keeps nothing."""
    allow_changed_data: bool = False
    """Continue with --dataset-format although the contents of files have changed since the
    checkpoint. Their names, sizes and row groups must be the same."""
    num_workers: Annotated[int, WORKERS] = 2
    """Threads that read training samples ahead. 0 reads in the training thread."""
    valid_num_workers: Annotated[int, WORKERS] = 2
    """Threads that read validation samples ahead."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end-of-document token."""
    reset_attention_mask: bool = False
    """Restrict attention to one document, which ends with its end-of-document token."""
    eod_mask_loss: bool = False
    """Exclude from the loss what is predicted from an end-of-document token, which is the start of
    another document."""

    @property
    def needs_documents(self) -> bool:
        """Whether a flag needs to know where documents end."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


@dataclass(frozen=True)
class TokenizerConfig:
    """Settings of the tokenizer and of the size of the vocabulary."""

    tokenizer_type: TokenizerType = "GPT2BPETokenizer"
    """GPT2BPETokenizer: from --vocab-file and --merge-file. PretrainedFromHF: any Hugging Face
    tokenizer, from a folder or the Hub. SentencePieceTokenizer: a tokenizer.model, as of Llama 2.
    See docs/tokenizers.md."""
    vocab_file: str | None = None
    """vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt of GPT2BPETokenizer."""
    tokenizer_name_or_path: str | None = None
    """Folder of the Hugging Face tokenizer, its name on the Hub (organization/name), or the file
    tokenizer.model. --tokenizer-model is another name of this flag."""
    special_tokens_in_text: bool = False
    """Let a text that spells a special token, such as <|endoftext|>, have this token. By default it
    is ordinary text. For texts that are tokenized while training reads them, and for prompts."""
    vocab_size: Annotated[int | None, Range("[1, 2147483647]")] = None
    """Number of token ids, if the tokenizer's files are not available: for planning, or for data
    that is tokenised already."""
    make_vocab_size_divisible_by: Annotated[int, Range("[1, 2147483647]")] = 128
    """Pad the vocabulary to a multiple of this x tensor-parallel size."""
    pad_vocab_size_to: Annotated[int | None, Range("[1, 2147483647]")] = None
    """Pad the vocabulary to exactly this size. It must be a multiple of
    --make-vocab-size-divisible-by and of the tensor-parallel size."""

    @property
    def has_two_files(self) -> bool:
        """Whether --vocab-file and --merge-file give the tokenizer. Otherwise one path does."""
        two = {"GPT2BPETokenizer": True, "PretrainedFromHF": False, "SentencePieceTokenizer": False}
        return two[self.tokenizer_type]
