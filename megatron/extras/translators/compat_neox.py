"""Keys of the YAML files of GPT-NeoX (`python deepy.py train.py 125M.yml local_setup.yml`).

Invariant: as in `compat_row`, with keys in the place of flags. The table is closed, and holds for
these files only. A key may have underscores or hyphens. `neox_file` reads the files, and the keys
of DeepSpeed in them by the tables of its JSON. It also reads what follows from several keys.

Source: the argument classes of GPT-NeoX in its versions 1 to 2 and on its main branch, and what its
code does with each argument.
"""

from collections.abc import Mapping

from megatron.extras.translators.compat_row import (
    Row,
    derive_from,
    ignore_flag,
    ignore_flags,
    refuse_flag,
    refuse_flags,
    rename_flag,
)

NEOX = "GPT-NeoX"

_DENSE = "only dense transformers are trained here"
_NORMS = "the norms are layernorm and rmsnorm"
_POSITIONS = "the positions are learned, rotary or alibi"
_ACTIVATIONS = "the activations are gelu, swiglu, geglu, reglu and bilinear"
_INITS = "weights are drawn from a normal distribution: use normal, small_init or wang_init"
_MUP = "muP is not supported"
_LOSSES = "this program only pretrains: use train_impl normal"
_FP8 = "fp8 is not supported: remove it"
_KERNELS = "kernels are selected and printed at the start"
_LAUNCHER = "torchrun or Slurm starts the processes"
_GENERATION = "it is for generate.py and eval.py; use tools/generate.py and tools/evaluate.py"
_MEMORY = "layers are recomputed by this trainer's own code"
_TRACKED = "the numbers are in the log and in metrics.jsonl; --tracker wandb sends them"
_SCALER = "the fp16 block sets the loss scale"
_DATA = "data are read by this trainer's own code"
_COUNTERS = "states of random generators are not needed to resume"
_SET_THERE = "GPT-NeoX computes it itself"


def _keep(keys: str, arity: int = 1) -> tuple[Row, ...]:
    """Return a row for each of the keys that have the same name and meaning here."""
    return tuple(rename_flag(key, f"--{key}", arity=arity) for key in keys.split())


def _choose(key: str, choices: Mapping[str, tuple[str, ...]], refusal: str) -> tuple[Row, ...]:
    """Return the rows of a key whose values have other names here."""
    return (
        *(rename_flag(key, *to, arity=1, only=(value,)) for value, to in choices.items()),
        refuse_flag(key, refusal, arity=1),
    )


_MODEL = (
    *_keep(
        "num-layers hidden-size num-attention-heads seq-length max-position-embeddings "
        "layernorm-epsilon attention-dropout hidden-dropout make-vocab-size-divisible-by"
    ),
    rename_flag("num-kv-heads", "--num-query-groups", arity=1),
    *_choose(
        "pos-emb",
        {
            "learned": ("--position-embedding-type", "absolute"),
            "rotary": ("--position-embedding-type", "rotary"),
            "alibi": ("--position-embedding-type", "alibi"),
        },
        _POSITIONS,
    ),
    rename_flag("rotary-pct", "--rotary-percent", arity=1),
    rename_flag("rotary-emb-base", "--rotary-base", arity=1),
    *_choose(
        "norm",
        dict.fromkeys(("layernorm", "te_layernorm"), ("--normalization", "LayerNorm"))
        | dict.fromkeys(("rmsnorm", "te_rmsnorm"), ("--normalization", "RMSNorm")),
        _NORMS,
    ),
    *_choose(
        "activation",
        {
            "gelu": ("--activation", "gelu"),
            "swiglu": ("--glu-activation", "swiglu"),
            "geglu": ("--glu-activation", "geglu"),
            "reglu": ("--glu-activation", "reglu"),
            "bilinear": ("--glu-activation", "liglu"),
        },
        _ACTIVATIONS,
    ),
    ignore_flag("mlp-type", "it has no gate", arity=1, only=("regular",)),
    *_choose("mlp-type", {"llama": ("--glu-activation", "swiglu")}, _ACTIVATIONS),
    rename_flag("bias-gelu-fusion", "--bias-gelu-fusion"),
    rename_flag("gpt-j-residual", "--parallel-residual"),
    rename_flag("no-weight-tying", "--untie-embeddings-and-output-weights"),
    *(
        derive_from(key, "it sets --ffn-hidden-size, by GPT-NeoX's rule")
        for key in ("intermediate-size", "expansion-factor", "mlp-multiple-of")
    ),
    derive_from("rms-norm-epsilon", "it sets --layernorm-epsilon with norm rmsnorm"),
    derive_from("sliding-window-width", "--sliding-window counts the token itself as well"),
    derive_from("init-method-std", "it sets --init-method-std and --output-init-method-std"),
    *(
        row
        for key in ("init-method", "output-layer-init-method")
        for row in (
            derive_from(
                key,
                "it sets --init-method-std or --output-init-method-std",
                only=(
                    *("normal", "scaled_normal", "small_init", "wang_init"),
                    "single_residual_scaled_normal",
                ),
            ),
            refuse_flag(key, _INITS, arity=1),
        )
    ),
    derive_from("attention-config", "each layer must be global or flash", arity="*"),
    *(
        derive_from(key, "both set --add-bias-linear", arity=1)
        for key in ("use-bias-in-attn-linear", "use-bias-in-mlp")
    ),
    refuse_flag("gpt-j-tied", "the two branches of a layer have a norm each"),
    refuse_flag("use-qk-layernorm", "its norm is over the heads of one rank: remove it"),
    ignore_flag("use-bias-in-norms", "GPT-NeoX does not read it: a LayerNorm has a bias", arity=1),
    ignore_flag("opt-pos-emb-offset", "0 is no offset", arity=1, only=("0",)),
    refuse_flag("opt-pos-emb-offset", "positions are counted from 0: remove it", arity=1),
    *refuse_flags("each layer has its own weights", "num-unique-layers", arity=1),
    ignore_flag("param-sharing-style", "it is only for num_unique_layers", arity=1),
    *refuse_flags(_DENSE, "sparsity-config soft-prompt-tuning", arity=1),
    ignore_flag("moe-num-experts", "1 is no mixture", arity=1, only=("1",)),
    refuse_flag("moe-num-experts", _DENSE, arity=1),
    *(
        ignore_flag(key, "it is for another kind of model", arity=1)
        for key in (
            *("moe-*", "mamba-*", "rpe-*", "gmlp-attn-dim", "dim-att", "head-size", "ffn-dim"),
            "scalenorm-epsilon",
        )
    ),
    refuse_flag("use-mup", _MUP),
    *ignore_flags("it is only for use_mup", "mup-* coord-check save-base-shapes", arity=1),
    ignore_flag("base-shapes-file", "it is only for use_mup", arity=1),
    refuse_flag("te-fp8-mha", _FP8),
    *ignore_flags(
        _KERNELS,
        "scaled-upper-triang-masked-softmax-fusion scaled-masked-softmax-fusion layernorm-fusion "
        "rmsnorm-fusion rope-fusion bias-dropout-fusion fused-kernels-build-path te-* "
        "use-flashattn-swiglu attention-softmax-in-fp32 apply-query-key-layer-scaling onnx-safe",
        arity=1,
    ),
    refuse_flag("fp16-lm-cross-entropy", "the loss is computed in fp32: remove it"),
    *ignore_flags("initial weights do not depend on it", "use-cpu-initialization", arity=1),
    ignore_flag("rotary-save-freqs-buffer", "the frequencies are no weights", arity=1),
)

_TRAINING = (
    *_keep("train-iters min-lr lr-decay-style lr-decay-iters weight-decay seed"),
    derive_from("warmup", "it is a fraction of the decay"),
    derive_from("lr-decay-fraction", "it is a fraction of train_iters"),
    derive_from("gradient-accumulation-steps", "the batch grows with the number of ranks"),
    *_keep("override-lr-scheduler use-checkpoint-lr-scheduler eod-mask-loss", arity=0),
    *_choose(
        "precision",
        {"fp16": ("--fp16",), "bfloat16": ("--bf16",), "fp32": ("--no-fp16", "--no-bf16")},
        "the precisions are fp16, bfloat16 and fp32",
    ),
    refuse_flag("train-epochs", "give train_iters, or --train-samples", arity=1),
    ignore_flag("train-impl", "this program pretrains", arity=1, only=("normal",)),
    refuse_flag("train-impl", _LOSSES, arity=1),
    *refuse_flags(_LOSSES, "z-loss", arity=1),
    *ignore_flags("it is only for other losses", "dpo-* kto-* fp32-reinforce", arity=1),
    *ignore_flags("it is only for other losses", "kl-impl kl-div-beta reinforce-*", arity=1),
    *ignore_flags(_SCALER, "hysteresis dynamic-loss-scale loss-scale loss-scale-window", arity=1),
    *ignore_flags(_SCALER, "min-scale", arity=1),
    ignore_flag("fp32-allreduce", "gradients are communicated in fp32", arity=1),
    ignore_flag("char-level-ppl", "the perplexity is that of tokens", arity=1),
    rename_flag("use-bnb-optimizer", "--use-bnb-optimizer"),
    *ignore_flags(_SET_THERE, "batch-size clip-grad optimizer-type lr zero-stage", arity=1),
    *ignore_flags(
        _SET_THERE,
        "zero-reduce-scatter zero-contiguous-gradients zero-reduce-bucket-size "
        "zero-allgather-bucket-size padded-vocab-size world-size is-pipe-parallel local-rank rank "
        "iteration do-train do-valid do-test global-num-gpus git-hash config-files",
        arity=1,
    ),
)

_PARALLEL = (
    # GPT-NeoX runs without DeepSpeed's pipeline at 0, and with a pipeline of one stage at 1.
    *(
        row
        for key, flag in (
            ("pipe-parallel-size", "--pipeline-model-parallel-size"),
            ("model-parallel-size", "--tensor-model-parallel-size"),
        )
        for row in (
            rename_flag(key, flag, "1", arity=1, only=("0",)),
            rename_flag(key, flag, arity=1),
        )
    ),
    rename_flag(
        "pipe-partition-method",
        "--pp-partition-method",
        "parameters",
        arity=1,
        only=("parameters",),
    ),
    ignore_flag("pipe-partition-method", "layers are divided evenly over the stages", arity=1),
    *_keep("sequence-parallel checkpoint-activations partition-activations", arity=0),
    *_keep("checkpoint-in-cpu", arity=0),
    *ignore_flags("each matrix has one division here", "output-layer-parallelism", arity=1),
    ignore_flag("checkpoint-num-layers", "each layer is recomputed by itself", arity=1),
    *ignore_flags(
        _MEMORY,
        "synchronize-each-layer contiguous-checkpointing profile-backward "
        "deepspeed-activation-checkpointing",
        arity=1,
    ),
    rename_flag("distributed-backend", "--distributed-backend", arity=1),
    *ignore_flags(
        "this trainer has its own engine; --deepspeed selects DeepSpeed's",
        "deepspeed deepscale deepscale-config deepspeed-extra-args",
        arity=1,
    ),
    *ignore_flags(
        _LAUNCHER,
        "hostfile include exclude num-nodes num-gpus master-port master-addr launcher force-multi "
        "detect-nvlink-pairs no-ssh-check comment account user-script deepspeed-mpi "
        "deepspeed-slurm autotuning-run lazy-mpu-init",
        arity=1,
    ),
)

_RUN = (
    *_keep("data-path split eval-iters eval-interval num-workers data-impl log-interval"),
    *_keep("tensorboard-dir save load exit-interval"),
    *_keep("finetune no-save-optim no-load-optim", arity=0),
    *(
        derive_from(key, "they set --tokenizer-type and its files", arity=1)
        for key in ("tokenizer-type", "vocab-file", "merge-file")
    ),
    *(
        derive_from(f"{part}-data-{kind}", f"they set --{part}-weighted-split-paths", arity="*")
        for part in ("train", "valid", "test")
        for kind in ("paths", "weights")
    ),
    derive_from("checkpoint-factor", "it sets --save-interval, if there is a folder to save to"),
    derive_from(
        "extra-save-iters", "it sets --save-at, if there is a folder to save to", arity="*"
    ),
    derive_from("keep-last-n-checkpoints", "it sets --keep-latest-checkpoints, as above"),
    ignore_flag("checkpoint-scale", "saves are at even steps", arity=1, only=("linear",)),
    refuse_flag("checkpoint-scale", "use --save-at with the iterations", arity=1),
    *ignore_flags(_COUNTERS, "no-save-rng no-load-rng", arity=1),
    ignore_flag("checkpoint-validation-with-forward-pass", "checkpoints have digests", arity=1),
    *ignore_flags("tools/hub_sync.py uploads checkpoints", "s3-path s3-chunk-size", arity=1),
    ignore_flag("pack-impl", "documents are packed", arity=1, only=("packed",)),
    refuse_flag("pack-impl", "documents are packed without gaps: use packed", arity=1),
    ignore_flag("dataset-impl", "this program pretrains", arity=1, only=("gpt2",)),
    refuse_flag("dataset-impl", _LOSSES, arity=1),
    *refuse_flags(
        _LOSSES,
        "train-label-data-paths valid-label-data-paths test-label-data-paths "
        "train-reward-data-paths valid-reward-data-paths test-reward-data-paths "
        "pos-* neg-*",
        arity=1,
    ),
    refuse_flag("weight-by-num-documents", "give the weights as train_data_weights"),
    ignore_flag("weighted-sampler-alpha", "it is only for weight_by_num_documents", arity=1),
    *ignore_flags(_DATA, "use-shared-fs allow-chopped mmap-warmup short-seq-prob", arity=1),
    *ignore_flags(_DATA, "serve-model-weights weight-server-port online-dataserver-*", arity=1),
    rename_flag("use-wandb", "--tracker", "wandb", only=("true",), arity=1),
    ignore_flag("use-wandb", "no tracker is used", arity=1),
    rename_flag("wandb-project", "--tracker-project", arity=1),
    rename_flag("log-param-norm", "--log-params-norm"),
    rename_flag("peak-theoretical-tflops", "--peak-tflops-per-device", arity=1),
    *ignore_flags(
        _TRACKED,
        "log-dir log-grad-pct-zeros log-grad-norm log-optimizer-states log-gradient-noise-scale "
        "gradient-noise-scale-n-batches gradient-noise-scale-cpu-offload use-comet comet-* wandb-*",
        arity=1,
    ),
    *ignore_flags(
        "use --profile-iterations and --memory-snapshot",
        "profile profile-step-start profile-step-stop memory-profiling memory-profiling-path",
        arity=1,
    ),
    *ignore_flags("use --kill-switch-path", "adlr-autoresume adlr-autoresume-interval", arity=1),
    *ignore_flags(
        _GENERATION,
        "text-gen-type precompute-model-name temperature top-p top-k return-logits maximum-tokens "
        "prompt-end sample-input-file sample-output-file num-samples recompute "
        "eval-results-prefix eval-tasks",
        arity=1,
    ),
)

NEOX_KEYS: tuple[Row, ...] = (*_MODEL, *_TRAINING, *_PARALLEL, *_RUN)

NEOX_DEFAULTS = (
    "--hidden-dropout 0 --attention-dropout 0 --weight-decay 0.1 --no-bias-gelu-fusion "
    "--zero-stage 0"
)
"""The defaults of GPT-NeoX that differ from ours. `compat_neox_derived` has that of the warm-up."""
