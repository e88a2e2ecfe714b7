"""Flags that forks of Megatron-LM add.

They are those of BigCode and LLM-jp, which trained StarCoder and LLM-jp, and Pai-Megatron-Patch.

Invariant: as in `compat_row`. Sources: the forks' argument parsers, and what their code does with
each argument.
"""

from megatron.extras.translators.compat_row import (
    Row,
    derive_from,
    ignore_flag,
    ignore_flags,
    refuse_flag,
    rename_flag,
)

_ONE_FILE = (
    "put the file as tokenizer.json into a folder, and use --tokenizer-type PretrainedFromHF with "
    "--tokenizer-name-or-path FOLDER"
)
_NO_FIM = "it is only for --fim-rate"

_BIGCODE = (
    rename_flag("--attention-head-type", "--num-query-groups", "1", arity=1, only=("multiquery",)),
    ignore_flag(
        "--attention-head-type",
        "each head has its own keys and values unless --num-query-groups is given",
        arity=1,
        only=("multihead",),
    ),
    rename_flag("--rotary-theta", "--rotary-base", arity=1),
    refuse_flag(
        "--tokenizer-type",
        _ONE_FILE,
        arity=1,
        only=("TokenizerFromFile", "TokenizerFromFileWithFIM"),
    ),
    refuse_flag("--tokenizer-file", _ONE_FILE, arity=1),
    ignore_flag("--fim-rate", "0 turns it off", arity=1, only=("0", "0.0")),
    refuse_flag(
        "--fim-rate",
        "samples are trained as they are: bring texts into the fill-in-the-middle format before "
        "tools/preprocess_data.py",
        arity=1,
    ),
    *ignore_flags(_NO_FIM, "--fim-spm-rate --fim-split-sample --fragment-fim-rate", arity=1),
    ignore_flag("--transformer-timers", "the step's parts are always timed"),
    ignore_flag("--structured-logs", "each rank that fails writes a report of its own"),
    ignore_flag("--structured-logs-dir", "each rank that fails writes a report of its own", 1),
    ignore_flag("--distributed-timeout", "--distributed-timeout-minutes sets it", arity=1),
    ignore_flag("--sanity-check-dataloader-interval", "samples are not printed", arity=1),
)

_LLM_JP = (
    rename_flag("--rope-theta", "--rotary-base", arity=1),
    rename_flag("--use-z-loss", "--z-loss-coefficient", "1e-4"),
    refuse_flag(
        "--use-embedding-scaling",
        "embeddings are not multiplied: remove it; --embed-layernorm normalises them",
    ),
    refuse_flag(
        "--tokenizer-type",
        "Llama 3 has a tokenizer.json: use --tokenizer-type PretrainedFromHF with its folder",
        arity=1,
        only=("Llama3Tokenizer",),
    ),
    refuse_flag(
        "--use-mpi", "start with torchrun, which sets each process's rank in the environment"
    ),
    ignore_flag(
        "--use-gcp-dynamic-checkpointing", "--save-interval and --save-at set when to save"
    ),
    ignore_flag("--dynamic-checkpointing-min", "--save-interval and --save-at set when to save", 1),
)

PAI_VOCABULARIES = {
    "LLama2Tokenizer": 32000,
    "LLama3Tokenizer": 128000,
    "Qwen2Tokenizer": 151643,
    "Qwen3Tokenizer": 151643,
}
"""Tokenizer of Pai-Megatron-Patch -> ids of its base vocabulary, without added tokens."""

_PAI = (
    derive_from(
        "--patch-tokenizer-type",
        "its ids and those of --extra-vocab-size are --vocab-size",
        only=tuple(PAI_VOCABULARIES),
    ),
    refuse_flag("--patch-tokenizer-type", "use --tokenizer-type", arity=1),
    derive_from(
        "--extra-vocab-size",
        "--vocab-size is the ids of --patch-tokenizer-type and this many more",
        arity="*",
    ),
    ignore_flag("--max-padding-length", "every sequence has --seq-length tokens", arity=1),
    ignore_flag("--train-mode", "the run pretrains", arity=1, only=("pretrain",)),
    refuse_flag("--train-mode", "supervised fine-tuning is not supported", arity=1),
    refuse_flag(
        "--optimizer-offload-policy", "--cpu-optimizer keeps the optimizer on the host", arity=1
    ),
)

FORKS: tuple[Row, ...] = (*_BIGCODE, *_LLM_JP, *_PAI)
