"""Flags of fms-fsdp's launch scripts (`--model_variant=llama2_7b --use_dummy_dataset=False`) that are not the same here.

Invariant: as in `compat_row`. Source: fms-fsdp's configuration and its registry of model variants, and the Llama of the
foundation-model-stack that it trains: RMSNorm with epsilon 1e-5, SwiGLU, no biases, no dropout, an output layer of its own.
"""

from megatron.config.compat_row import Row, all_harmless, all_refused, harmless, refused, renamed

_LLAMA = (
    *("--normalization", "RMSNorm", "--layernorm-epsilon", "1e-5", "--glu-activation", "swiglu", "--no-add-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rotary"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
)
_VARIANT = "weights begin with --init-method-std, and smaller ones in the output projections, where all begin with 0.02 there"
_STREAMED = "data sets are not streamed: make them by tools/preprocess_data.py and mix them by --data-path WEIGHT PATH WEIGHT PATH"
_SPECIAL_TOKENS = "special tokens come with the data: tools/preprocess_data.py --append-eod ends documents with theirs"
_SPECULATOR = "no speculators are trained here"
_TRACKER = "metrics go to TensorBoard (--tensorboard-dir) and to metrics.jsonl"
_PROFILER = "no profiler is attached; --log-timers-to-tensorboard has the times of a step's parts"
_OWN_CHECKPOINTS = "checkpoints of fms-fsdp are not read"
_NO_NODES = "over all data-parallel ranks, as there are no groups within a node; the numbers are the same"


def _variant(
    *names: str, layers: int, hidden: int, ffn: int, heads: int, groups: int | None = None, vocab: int = 32000, base: int = 10000
) -> Row:
    """The row of a model variant. `groups`: key/value heads, where they are fewer than `heads`."""
    shape = {"num-layers": layers, "hidden-size": hidden, "ffn-hidden-size": ffn, "num-attention-heads": heads}
    shape |= {"num-query-groups": groups or heads, "vocab-size": vocab, "rotary-base": base}
    flags = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    return renamed("--model-variant", *flags, *_LLAMA, arity=1, only=names, reason=_VARIANT)


_LLAMA3 = {"vocab": 128256, "base": 500000}

FMS: tuple[Row, ...] = (
    # model
    _variant("7b", "llama2_7b", layers=32, hidden=4096, ffn=11008, heads=32),
    _variant("13b", "llama2_13b", layers=40, hidden=5120, ffn=13824, heads=40),
    _variant("34b", "llama2_34b", layers=48, hidden=8192, ffn=22016, heads=64, groups=8, base=1000000),
    _variant("70b", "llama2_70b", layers=80, hidden=8192, ffn=28672, heads=64, groups=8),
    _variant("llama2_1.4b", layers=24, hidden=2048, ffn=6144, heads=16, groups=4),
    _variant("llama3_194m_4k", layers=10, hidden=1024, ffn=2816, heads=8, **_LLAMA3),
    _variant("llama3_1.8b", "llama3_1.8b_4k", layers=24, hidden=2048, ffn=7168, heads=16, groups=8, **_LLAMA3),
    _variant("llama3_3.2b", "llama3_3.2b_4k", layers=24, hidden=3072, ffn=8192, heads=24, groups=8, **_LLAMA3),
    _variant("llama3_8b", "llama3_8b_4k", layers=32, hidden=4096, ffn=14336, heads=32, groups=8, **_LLAMA3),
    _variant("llama3_70b", "llama3_70b_4k", layers=80, hidden=8192, ffn=28672, heads=64, groups=8, **_LLAMA3),
    refused("--model-variant", "there are no Mamba models; another Llama is given by --num-layers, --hidden-size and so on", 1),
    # data
    refused("--use-dummy-dataset", "there is no made-up data; examples/quickstart.sh trains on a small real one"),
    *all_refused(_STREAMED, "--file-type --col-name --datasets --weights --logical-shards", arity=1),
    refused("--tokenizer", "--tokenizer-name-or-path names a folder of Hugging Face's form", arity=1),
    renamed("--tokenizer-path", "--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", arity=1),
    *(harmless(flag, "there is none", 1, only=("None",)) for flag in ("--bos-token", "--eos-token", "--bol-token", "--eol-token")),
    harmless("--strip-tokens", "there are none", 1, only=("",)),
    *all_refused(_SPECIAL_TOKENS, "--bos-token --eos-token --bol-token --eol-token --sep-token --strip-tokens", arity=1),
    *all_refused(_STREAMED, "--new-dataset --eos-present"),
    refused("--reset-stepcount", "--finetune loads the weights and starts the counters afresh"),
    refused("--resuming-dataset", "a resume always goes on in the data where it was; --finetune starts the data afresh"),
    # sharding, recomputation, precision
    renamed("--sharding-strategy", "--zero-stage", "3", arity=1, only=("fsdp", "FSDP")),
    renamed("--sharding-strategy", "--zero-stage", "3", arity=1, only=("hsdp", "HSDP"), reason=_NO_NODES),
    renamed("--sharding-strategy", "--zero-stage", "0", arity=1, only=("ddp", "DDP")),
    refused("--sharding-strategy", "--zero-stage says what is sharded, --tensor-model-parallel-size cuts the layers", arity=1),
    refused("--sharding-group-size", "--zero-stage shards over all data-parallel ranks; there are no smaller groups", arity=1),
    renamed("--fsdp-activation-checkpointing", "--checkpoint-activations"),
    *(
        renamed("--selective-checkpointing", "--checkpoint-fraction", f"1/{k}", arity=1, only=(str(k),), reason=f"1 layer in {k}")
        for k in (2, 3, 4)
    ),
    renamed("--selective-checkpointing", "--checkpoint-fraction", arity=1),
    renamed("--mixed-precision", "--bf16", reason="gradients are added up in fp32"),
    harmless("--low-cpu-fsdp", "each rank builds its own part of the model only"),
    # training
    renamed("--num-steps", "--train-iters", arity=1),
    renamed(
        "--learning-rate",
        "--lr",
        arity=1,
        reason="the peak. What was fixed there is a flag here: --lr-decay-style cosine --min-lr (a tenth of the peak) "
        "--lr-warmup-iters 2000 (linear here) --adam-beta2 0.95 --weight-decay 0.1",
    ),
    renamed("--grad-clip-thresh", "--clip-grad", arity=1),
    renamed("--training-stage", "--lr-decay-style", "linear", arity=1, only=("annealing",)),
    refused("--training-stage", "say --lr-decay-style cosine, --min-lr and --lr-warmup-iters; warm-up is linear here", arity=1),
    # checkpoints and reports
    renamed("--ckpt-load-path", "--load", arity=1, reason=_OWN_CHECKPOINTS),
    renamed("--ckpt-save-path", "--save", arity=1),
    renamed("--checkpoint-interval", "--save-interval", arity=1),
    renamed("--report-interval", "--log-interval", arity=1),
    *all_harmless(_TRACKER, "--tracker --tracker-dir --tracker-project-name --tracker-run-id", arity=1),
    *all_harmless(_TRACKER, "--use-wandb --use-aim"),
    *all_harmless(_TRACKER, "--wandb-dir --wandb-project-name --wandb-run-id --aim-dir --aim-project-name --aim-run-id", arity=1),
    *all_harmless(_PROFILER, "--use-profiler --profiler-rank0-only"),
    # speculators
    *all_refused(_SPECULATOR, "--speculator-tie-weights --speculator-scale-input"),
    *all_refused(
        _SPECULATOR,
        "--tp-size --model-arch --model-path --n-speculator-heads --speculator-width --stage2-start-step --stage2-prompt-length "
        "--stage2-batch-size --stage2-seq-length",
        arity=1,
    ),
)
