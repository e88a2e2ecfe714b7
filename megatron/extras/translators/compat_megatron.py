"""Flags for the pretraining of a GPT with Megatron-LM and Megatron-DeepSpeed that differ here.

Both BigScience's and Microsoft's Megatron-DeepSpeed are covered.

Invariant: as in `compat_row`. Sources: the argument parsers of the three, and what their code does
with each argument.
"""

from megatron.extras.translators.compat_row import (
    Row,
    derive_from,
    ignore_flag,
    ignore_flags,
    refuse_flag,
    refuse_flags,
    rename_flag,
)

_SDPA = (
    "attention runs in PyTorch's scaled_dot_product_attention, which selects its kernel itself; "
    "--attention-backend restricts the choice"
)
_KERNELS = "the kernels are selected and printed at the start"
_COUNTERS = "randomness is derived from the seed and the counters, so no random state is stored"
_MEMORY = "it changes only memory use, and there is no such option here"
_OVERLAP = "communication overlaps computation wherever the engine can do so"
_FP32 = "this is always done here"
_TENSORBOARD = "no such points are written to TensorBoard here"
_WANDB = "with --save, also --tracker wandb"
_SCORES = (
    "the scaling by layer cancels out in exact arithmetic, and attention scores are kept in "
    "fp32, where they do not overflow"
)
_EXPERTS = "it is for mixtures of experts, which are not supported"
_FP8 = "fp8 is not supported: remove it and use --bf16"
_DECAY = "the weight decay is constant: use --weight-decay"
_ONE_TEXT = (
    "a sample is one text, without separate inputs and targets; --eod-mask-loss masks ends of "
    "documents"
)
_SPLITS = (
    "use --train-weighted-split-paths 'NAME: 1 0:1 PATH' (valid, test), or --data-path with --split"
)
_INDEX = "indices are built from the data and the seed; --data-cache-path sets their folder"
_NO_CONTEXT = (
    "there is no context parallelism: --sequence-parallel with --tensor-model-parallel-size shards "
    "sequences"
)
_ULYSSES = "--sequence-parallel with --tensor-model-parallel-size shards sequences"
_ZERO_BUBBLE = (
    "there is no zero-bubble schedule: --num-layers-per-virtual-pipeline-stage shortens idle times"
)
_ZERO_BUFFERS = "the engine sizes and orders its communication itself"
_TRACE = (
    "it sets --profile-iterations, and PyTorch's profiler writes the trace, also for nsys; the "
    "iterations count from the start of the run"
)
_MESSAGES = "there is one level of messages"
_STEP_TIMES = "the step's parts are always timed"
_BY_ITSELF = "each layer is recomputed separately, which changes memory use and no number"

# A row for some values of a flag comes before the row for all others, because the first row that
# fits is used.
_MODEL = (
    rename_flag(
        "--swiglu",
        "--glu-activation",
        "swiglu",
        reason="without --ffn-hidden-size the width is 8/3 x hidden size, rounded down to a "
        "multiple of 64",
    ),
    # Megatron's fused kernel needs biases. Without them GELU has its erf form there, so both are
    # turned off here.
    rename_flag("--disable-bias-linear", "--no-add-bias-linear", "--no-bias-gelu-fusion"),
    rename_flag("--norm-epsilon", "--layernorm-epsilon", arity=1),
    rename_flag("--normalization", "--normalization", "LayerNorm", arity=1, only=("layernorm",)),
    rename_flag("--normalization", "--normalization", "RMSNorm", arity=1, only=("rmsnorm",)),
    rename_flag("--num-key-value-heads", "--num-query-groups", arity=1),
    rename_flag("--encoder-num-layers", "--num-layers", arity=1),
    rename_flag("--encoder-seq-length", "--seq-length", arity=1),
    rename_flag("--use-rotary-position-embeddings", "--position-embedding-type", "rotary"),
    rename_flag(
        "--position-embedding-type", "--position-embedding-type", "rotary", arity=1, only=("rope",)
    ),
    rename_flag(
        "--position-embedding-type",
        "--position-embedding-type",
        "absolute",
        arity=1,
        only=("learned_absolute",),
    ),
    rename_flag("--rotary-position-embeddings-theta", "--rotary-base", arity=1),
    ignore_flag(
        "--group-query-attention",
        "the number of groups alone turns it on",
        needs="model.num_query_groups",
    ),
    ignore_flag(
        "--no-position-embedding",
        "rotary and ALiBi models have no table of positions anyway",
        needs="model.position_embedding_type",
    ),
    # Megatron scales scores by layer to avoid overflow in fp16, and undoes it in the softmax.
    ignore_flag("--no-query-key-layer-scaling", _SCORES),
    ignore_flag("--apply-query-key-layer-scaling", _SCORES),
    ignore_flag("--attention-softmax-in-fp32", _SDPA),
    ignore_flag(
        "--use-cpu-initialization",
        "every weight is initialised from the seed and its name, the same on any device",
    ),
    ignore_flag(
        "--no-initialization", "weights are always initialised; a checkpoint replaces them"
    ),
    refuse_flag(
        "--data-parallel-random-init",
        "data-parallel ranks train one model, so their weights are the same",
    ),
    refuse_flag(
        "--openai-gelu",
        "GELU in its tanh form is the default: remove this flag and --no-bias-gelu-fusion",
    ),
    rename_flag("--squared-relu", "--activation", "squared_relu"),
    refuse_flag("--onnx-safe", "nothing is exported to ONNX: remove it", arity=1),
    refuse_flag(
        "--apply-residual-connection-post-layernorm",
        "residuals are taken before the norm (pre-LN), as in GPT-2",
    ),
    # With weights w + 1 a norm has the same function, start and gradients, and there is no decay.
    ignore_flag(
        "--apply-layernorm-1p",
        "the weight of a norm is stored as it is, which is the same in exact arithmetic, and the "
        "master weights are fp32",
    ),
    refuse_flag(
        "--embedding-weights-in-fp32",
        "--fp32-residual-connection keeps the residual stream in fp32",
    ),
    refuse_flag(
        "--init-method-xavier-uniform",
        "weights are drawn from a normal distribution; see --init-method-std",
    ),
    refuse_flag("--scattered-embeddings", "--sequence-parallel shards what follows the embedding"),
    refuse_flag(
        "--memory-centric-tiled-linear",
        "matrices are not tiled: --tensor-model-parallel-size shards them",
    ),
    ignore_flag("--tile-factor", "it is only for --memory-centric-tiled-linear", arity=1),
    refuse_flag("--random-ltd", "every layer processes every token: remove it"),
    ignore_flag("--num-experts", "there are no mixtures of experts", arity="*", only=("1",)),
    refuse_flag("--num-experts", "there are no mixtures of experts", arity="*"),
    refuse_flag("--num-experts-switch", "there are no mixtures of experts", arity=1),
    *(
        ignore_flag(flag, "there are no mixtures of experts", arity=1, only=("1",))
        for flag in ("--expert-model-parallel-size", "--expert-tensor-parallel-size")
    ),
    *refuse_flags(
        "there are no mixtures of experts",
        "--expert-model-parallel-size --expert-tensor-parallel-size",
        arity=1,
    ),
    *ignore_flags(
        _EXPERTS,
        "--mlp-type --topk --expert-interval --moe-expert-parallel-size "
        "--moe-train-capacity-factor --moe-eval-capacity-factor --moe-min-capacity "
        "--moe-loss-coeff",
        arity=1,
    ),
    *ignore_flags(
        _EXPERTS,
        "--disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling "
        "--create-moe-param-group --use-tutel --enable-expert-tensor-parallelism",
    ),
)

_KERNEL_CHOICES = (
    ignore_flag("--no-masked-softmax-fusion", _SDPA),
    *ignore_flags(
        _SDPA,
        "--use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton "
        "--use-flash-attn-builder",
    ),
    rename_flag(
        "--attention-backend",
        "--attention-backend",
        "unfused",
        arity="*",
        only=("local",),
        reason="both are matrix products and a softmax",
    ),
    ignore_flag("--abort-on-unmet-fused-kernel-constraints", _KERNELS),
    ignore_flag("--no-bias-dropout-fusion", _KERNELS),
    ignore_flag("--no-persist-layer-norm", _KERNELS),
    ignore_flag("--disable-mem-efficient-ln", _KERNELS),
    ignore_flag("--transformer-impl", _KERNELS, arity=1),
    ignore_flag("--use-mcore-models", _KERNELS),
    ignore_flag("--ds-fused-adam", _KERNELS),
    *refuse_flags(_FP8, "--fp8-e4m3 --fp8-hybrid --no-fp8-wgrad"),
    *refuse_flags(
        _FP8,
        "--fp8-format --fp8-recipe --fp8-margin --fp8-interval --fp8-amax-history-len "
        "--fp8-amax-compute-algo",
        arity=1,
    ),
    *refuse_flags(_FP8, "--fp8-* --fp4-*", arity="*"),
)

_BATCHES_AND_DATA = (
    rename_flag(
        "--batch-size",
        "--micro-batch-size",
        arity=1,
        reason="the batch of one rank, as in old scripts",
    ),
    ignore_flag(
        "--dataloader-type",
        "samples come in the order that the seed gives",
        arity=1,
        only=("single",),
    ),
    ignore_flag("--repeated-dataloader", "the order of samples is built for the entire training"),
    ignore_flag("--mmap-warmup", "the operating system reads ahead"),
    ignore_flag("--vocab-extra-ids", "there are no extra ids", arity=1, only=("0",)),
    rename_flag(
        "--tokenizer-type",
        "--tokenizer-type",
        "PretrainedFromHF",
        arity=1,
        only=("HuggingFaceTokenizer", "HFTokenizer"),
    ),
    rename_flag(
        "--tokenizer-type",
        "--tokenizer-type",
        "SentencePieceTokenizer",
        arity=1,
        only=("GPTSentencePieceTokenizer", "Llama2Tokenizer"),
        reason="ids are those of the text alone, as in today's Megatron-LM",
    ),
    derive_from(
        "--tokenizer-type",
        "it reserves one id after those of --vocab-size for the end of a document",
        arity=1,
        only=("NullTokenizer",),
        needs="tokenizer.vocab_size",
    ),
    rename_flag("--tokenizer-model", "--tokenizer-name-or-path", arity=1),
    refuse_flag(
        "--trust-remote-code",
        "a tokenizer's own code is never run: remove it if the tokenizer is of a standard class",
    ),
    *refuse_flags(_SPLITS, "--train-data-path --valid-data-path --test-data-path", arity="*"),
    refuse_flag("--aml-data-download-path", "write full paths in --data-path", arity=1),
    *refuse_flags(
        _INDEX,
        "--train-idx-path --train-desc-path --train-doc-idx-path --train-sample-idx-path "
        "--train-shuffle-idx-path",
        arity=1,
    ),
    refuse_flag(
        "--train-data-exact-num-epochs", "set the length of training with --train-samples", arity=1
    ),
    refuse_flag("--loss-on-targets-only", _ONE_TEXT),
    refuse_flag("--reweight-loss-based-on-position-frequency", _ONE_TEXT),
    *refuse_flags(
        "curriculum learning is by sequence length: use --curriculum-schedule-type",
        "--data-efficiency-curriculum-learning --return-data-index",
    ),
    refuse_flag("--use-dataset-only", "megatron.data is a package: import it", arity=1),
)

_OPTIMIZER_AND_PRECISION = (
    rename_flag("--override-opt-param-scheduler", "--override-lr-scheduler"),
    rename_flag("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-lr-scheduler"),
    # Megatron-LM's distributed optimizer shards optimizer states, which is ZeRO's stage 1.
    rename_flag(
        "--use-distributed-optimizer",
        *("--zero-stage", "1"),
        reason="this is the default, so the flag has no effect without another --zero-stage",
    ),
    ignore_flag("--accumulate-allreduce-grads-in-fp32", _FP32),
    refuse_flag("--fp16-lm-cross-entropy", "the loss is computed in fp32: remove it"),
    ignore_flag("--sgd-momentum", "the optimizer is AdamW", arity=1),
    ignore_flag("--weight-decay-incr-style", _DECAY, arity=1, only=("constant",)),
    refuse_flag("--weight-decay-incr-style", _DECAY, arity=1),
    *refuse_flags(_DECAY, "--start-weight-decay --end-weight-decay", arity=1),
    rename_flag(
        "--warmup",
        "--lr-warmup-fraction",
        arity=1,
        reason="a fraction of the decay, as in the first Megatron-LM and in GPT-NeoX",
    ),
    ignore_flag("--cpu-torch-adam", "--cpu-optimizer runs torch's AdamW"),
)

_PARALLELISM = (
    rename_flag("--model-parallel-size", "--tensor-model-parallel-size", arity=1),
    # The first versions of Megatron-DeepSpeed. 0 turns the pipeline off.
    rename_flag(
        "--pipe-parallel-size", "--pipeline-model-parallel-size", "1", arity=1, only=("0",)
    ),
    rename_flag("--pipe-parallel-size", "--pipeline-model-parallel-size", arity=1),
    rename_flag(
        "--no-pipeline-parallel",
        *("--pipeline-model-parallel-size", "1"),
        reason="this is the default, so the flag has no effect without another size",
    ),
    # DeepSpeed's name in its first versions.
    rename_flag("--deepscale", "--deepspeed"),
    rename_flag("--deepscale-config", "--deepspeed-config", arity=1),
    refuse_flag(
        "--deepspeed-mpi", "start with torchrun, which sets each process's rank in the environment"
    ),
    ignore_flag(
        "--DDP-impl", "data parallelism has one implementation", arity=1, only=("local", "torch")
    ),
    refuse_flag(
        "--DDP-impl",
        "--zero-stage 3 shards parameters, gradients and optimizer states",
        arity=1,
        only=("FSDP",),
    ),
    ignore_flag("--lazy-mpu-init", "process groups are built once, by the entry point", arity=1),
    *ignore_flags(
        _MEMORY,
        "--use-contiguous-buffers-in-ddp --no-contiguous-buffers-in-local-ddp --use-pin-memory",
    ),
    ignore_flag("--empty-unused-memory-level", _MEMORY, arity=1),
    *ignore_flags(
        _OVERLAP,
        "--no-scatter-gather-tensors-in-pipeline --no-async-tensor-model-parallel-allreduce "
        "--overlap-grad-reduce --overlap-param-gather --overlap-p2p-communication "
        "--use-ring-exchange-p2p",
    ),
    *ignore_flags(_ZERO_BUFFERS, "--zero-reduce-scatter --zero-contigious-gradients"),
    *ignore_flags(_ZERO_BUFFERS, "--zero-reduce-bucket-size --zero-allgather-bucket-size", arity=1),
    ignore_flag("--remote-device", "parameters stay on the device", arity=1, only=("none",)),
    refuse_flag(
        "--remote-device", "parameters stay on the device: --zero-stage 3 shards them", arity=1
    ),
    # A size of 1 asks for no parallelism of this kind, so it is harmless.
    ignore_flag("--context-parallel-size", _NO_CONTEXT, arity=1, only=("1",)),
    refuse_flag("--context-parallel-size", _NO_CONTEXT, arity=1),
    refuse_flag("--hierarchical-context-parallel-sizes", _NO_CONTEXT, arity="*"),
    ignore_flag("--cp-comm-type", _NO_CONTEXT, arity="*"),
    ignore_flag("--ds-sequence-parallel-size", _ULYSSES, arity=1, only=("1",)),
    refuse_flag("--ds-sequence-parallel-size", _ULYSSES, arity=1),
    *refuse_flags(
        _ULYSSES,
        "--force-ds-sequence-parallel --ds-sequence-parallel-fpdt "
        "--ds-sequence-parallel-fpdt-offloading",
    ),
    refuse_flag("--ds-sequence-parallel-fpdt-chunk-size", _ULYSSES, arity=1),
    *refuse_flags(_ZERO_BUBBLE, "--enable-zbh1-pipeline --enable-zbh1-exact-semantics"),
    refuse_flag(
        "--standalone-embedding-stage",
        "--pp-partition-method divides layers and embedding into stages",
    ),
)

_RECOMPUTATION = (
    rename_flag("--recompute-granularity", "--checkpoint-activations", arity=1, only=("full",)),
    rename_flag(
        "--recompute-granularity", "--recompute-attention-core", arity=1, only=("selective",)
    ),
    rename_flag("--recompute-activations", "--recompute-attention-core"),
    rename_flag(
        "--activations-checkpoint-method", "--checkpoint-activations", arity=1, only=("uniform",)
    ),
    ignore_flag("--activations-checkpoint-num-layers", _BY_ITSELF, arity=1),
    *ignore_flags(
        _BY_ITSELF,
        "--recompute-method --recompute-num-layers --checkpoint-num-layers",
        arity=1,
    ),
    rename_flag(
        "--deepspeed-activation-checkpointing",
        "--checkpoint-activations",
        reason="one implementation serves both engines",
    ),
    ignore_flag("--profile-backward", "layers are not timed one by one"),
    rename_flag("--distribute-checkpointed-activations", "--partition-activations"),
    rename_flag("--distribute-saved-activations", "--partition-activations"),
    *ignore_flags(
        _MEMORY, "--split-transformers --contigious-checkpointing --synchronize-each-layer"
    ),
)

_STOPPING_AND_CHECKPOINTS = (
    rename_flag(
        "--eval-only",
        "--eval-only",
        arity=1,
        only=("True", "true", "1"),
        reason="a flag without a value here",
    ),
    rename_flag("--skip-train", "--eval-only"),
    rename_flag("--no-train", "--eval-only", arity=1, only=("True", "true", "1")),
    ignore_flag("--no-train", "the run trains", arity=1, only=("False", "false", "0")),
    rename_flag("--no-train", "--eval-only", arity=1),
    rename_flag("--kill-switch-file", "--kill-switch-path", arity=1),
    rename_flag("--exit-on-missing-checkpoint", "--require-load"),
    refuse_flag("--load-tag", "use --load-iteration N for global_stepN", arity=1),
    *ignore_flags(
        "give the arguments themselves; a resume is checked against its checkpoint",
        "--use-checkpoint-args --use-mp-args-from-checkpoint-args "
        "--no-use-tokenizer-model-from-checkpoint-args",
    ),
    ignore_flag(
        "--no-load-lr-state",
        "it has no effect in Megatron either; --override-lr-scheduler changes a resume's schedule",
    ),
    ignore_flag("--no-load-rng", _COUNTERS),
    ignore_flag("--no-save-rng", _COUNTERS),
    ignore_flag("--universal-checkpoint", "every checkpoint loads on any layout"),
    refuse_flag(
        "--adlr-autoresume",
        "it is for one cluster only: requeue with --exit-duration-in-mins or SIGTERM",
    ),
    ignore_flag("--adlr-autoresume-interval", "it is only for --adlr-autoresume", arity=1),
    ignore_flag(
        "--exit-signal-handler", "SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 always save and exit"
    ),
)

_LOGGING = (
    # The flag is misspelled in Megatron's parser, so scripts use this spelling.
    rename_flag("--no-log-learnig-rate-to-tensorboard", "--no-log-learning-rate-to-tensorboard"),
    *ignore_flags(_MESSAGES, "--log-level --log-level-replica", arity=1),
    ignore_flag("--log-path", "every checkpoint holds the configuration", arity=1),
    ignore_flag("--log-throughput", "the log line always has it"),
    *ignore_flags(_STEP_TIMES, "--timing-log-level --timing-log-option", arity=1),
    ignore_flag("--no-barrier-with-level-1-timing", _STEP_TIMES),
    *ignore_flags(
        _TENSORBOARD,
        "--log-world-size-to-tensorboard --log-memory-to-tensorboard "
        "--log-optimizer-states-to-tensorboard",
    ),
    ignore_flag("--wandb-project", "without a name nothing is sent", arity=1, only=("",)),
    rename_flag("--wandb-project", "--tracker-project", arity=1, reason=_WANDB),
    ignore_flag("--wandb-exp-name", "a run is named by its folder", arity=1),
    ignore_flag("--wandb-save-dir", "its files are in the folder of --save, or in WANDB_DIR", 1),
    # Megatron-LM's flag has no value, and that of Microsoft's fork has one.
    derive_from("--profile", _TRACE, arity="*"),
    derive_from("--profile-steps", _TRACE, arity="*"),
)

MEGATRON: tuple[Row, ...] = (
    *_MODEL,
    *_KERNEL_CHOICES,
    *_BATCHES_AND_DATA,
    *_OPTIMIZER_AND_PRECISION,
    *_PARALLELISM,
    *_RECOMPUTATION,
    *_STOPPING_AND_CHECKPOINTS,
    *_LOGGING,
)
