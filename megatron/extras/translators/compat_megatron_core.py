"""Flags that Megatron-LM has had since Megatron core, 0.4 to 0.15.

Invariant: as in `compat_row`. A family such as `--moe-*` covers flags that have no row of their
own. A family is harmless only if every possible flag of it is. Source: the argument parsers of
these releases, and what their code does with each argument.
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

_EXPERTS = "it is for mixtures of experts, which are not supported"
_MUP = "muP is not supported: remove it and tune --lr and --init-method-std"
_MLA = "multi-latent attention is not supported"
_NO_MLA = "it is for multi-latent attention, which is not supported"
_NO_MTP = "it is for multi-token prediction, which is not supported"
_MTP = "multi-token prediction is not supported"
_ATTENTION = "attention is causal over the whole sequence, with a plain softmax: remove it"
_ROPE = "rotary positions are neither interleaved nor scaled in this way: use --rope-scaling"
_RL = "there is no reinforcement learning"
_SFT = "supervised fine-tuning on prompts is not supported"
_DISTILLATION = "distillation and model optimisation are not supported"
_QUANTISED = "weights are not quantised"
_MODELS = "every layer has attention and one feed-forward network"
_KERNELS = "the kernels are selected and printed at the start"
_SCHEDULING = "the engine buckets and orders its communication itself"
_FSDP = "--zero-stage sets what is sharded, and the numbers are the same"
_MEMORY = "it changes only memory use, and there is no such option here"
_CHECKPOINTS = "every checkpoint is written in shards by all ranks, and loads on any layout"
_LOCAL = "checkpoints are written to --save only; --save-interval sets how often"
_CONVERSION = "tools/convert_checkpoint.py from-megatron-lm imports such checkpoints"
_TRACKERS = "metrics go to TensorBoard, to metrics.jsonl and to --tracker"
_RESTARTS = "a lost rank ends the run, and the next array task resumes it"
_STRAGGLERS = "--straggler-interval names slow ranks"
_PROFILER = "traces have the operators without shapes and call stacks"
_TRACE = "with --profile, it sets --profile-iterations"
_CHECKS = "a step with a NaN or an infinity is always dropped and reported"
_INFERENCE = "it is for inference, and this program only trains"
_COLLECTOR = "Python's garbage collector keeps its defaults"
_SEED = "random numbers are derived from --seed and the position in training"
_STAGES = "--pp-partition-method divides the layers and the embedding into stages"
_EXACT_GRADIENTS = (
    "gradients are accumulated in fp32, which is more exact and takes 2 bytes more for each "
    "parameter; --grad-reduce-in-bf16 sends them in bf16"
)
_MASTERS = "master weights, gradients and moments are fp32"
_LOADER = "data files are mapped into memory and read by --num-workers threads"
_PUBLISHED_VOCABULARY = (
    "use --tokenizer-type PretrainedFromHF with the folder of a published model that has the same "
    "tokenizer as tokenizer.json"
)
_OTHER_DATA = "it is for chats or images, and only texts are trained on"
_PLAIN_SENTENCEPIECE = "the pieces and ids are those of tokenizer.model alone"
_SPLITS = "name the data sets in --data-path, or use --train-weighted-split-paths-path"
_TIKTOKEN = "it is for TikTokenizer, which is not supported"

_MODEL = (
    *refuse_flags(_MUP, "--mup --mup-*", arity="*"),
    # --num-experts refuses experts. Published scripts for dense models have other flags of experts,
    # and these are harmless.
    ignore_flag("--moe-*", _EXPERTS, arity="*"),
    *ignore_flags(
        _EXPERTS,
        "--moe-grouped-gemm --moe-token-dropping --moe-per-layer-logging --moe-layer-recompute "
        "--moe-extended-tp --moe-pad-expert-input-to-capacity --moe-router-pre-softmax "
        "--moe-use-upcycling --moe-shared-expert-overlap --moe-router-enable-expert-bias "
        "--moe-use-legacy-grouped-gemm --moe-permute-fusion --moe-enable-deepep "
        "--moe-router-force-load-balancing --moe-router-padding-for-fp8 "
        "--moe-apply-probs-on-input --moe-router-fusion --overlap-moe-expert-parallel-comm "
        "--use-fused-weighted-squared-relu --delay-wgrad-compute "
        "--moe-pad-experts-for-cuda-graph-inference",
    ),
    refuse_flag("--multi-latent-attention", _MLA),
    *ignore_flags(
        _NO_MLA,
        "--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim "
        "--rotary-scaling-factor --mscale --mscale-all-dim",
        arity=1,
    ),
    ignore_flag("--cache-mla-latents", _NO_MLA),
    refuse_flag("--mtp-num-layers", _MTP, arity=1),
    ignore_flag("--mtp-*", _NO_MTP, arity="*"),
    *refuse_flags(_MODELS, "--mamba-* --hybrid-* --heterogeneous-*", arity="*"),
    *refuse_flags(_MODELS, "--is-hybrid-model --disable-mamba-mem-eff-path"),
    refuse_flag(
        "--spec", "it names code of Megatron core, which is not used: remove it", arity="*"
    ),
    rename_flag("--qk-layernorm", "--qk-norm", "head"),
    refuse_flag("--qk-l2-norm", "a norm without weights is not supported: use --qk-norm"),
    refuse_flag("--quick-geglu", "use --glu-activation"),
    refuse_flag("--activation-func-clamp-value", "activations are not clamped: remove it", arity=1),
    ignore_flag("--glu-linear-offset", "there is no offset", arity=1, only=("0", "0.0")),
    refuse_flag("--glu-linear-offset", "there is no offset in --glu-activation", arity=1),
    ignore_flag("--softmax-type", "the softmax is plain", arity=1, only=("vanilla",)),
    refuse_flag("--softmax-type", _ATTENTION, arity=1),
    refuse_flag(
        "--window-size", "use --sliding-window, which also counts the token itself", arity=1
    ),
    refuse_flag(
        "--window-attn-skip-freq",
        "use --full-attention-layers: 3::4 for a frequency of 4",
        arity=1,
    ),
    ignore_flag("--rope-type", "rotary positions are the plain ones", arity=1, only=("rope",)),
    refuse_flag("--rope-type", _ROPE, arity=1),
    refuse_flag("--no-rope-freq", "use --no-rope-layers: 3::4 for a frequency of 4", arity=1),
    ignore_flag(
        "--rotary-seq-len-interpolation-factor", "1 is no scaling", arity=1, only=("1", "1.0")
    ),
    rename_flag(
        "--rotary-seq-len-interpolation-factor",
        *("--rope-scaling", "linear", "--rope-scaling-factor"),
        arity=1,
    ),
    refuse_flag("--rotary-interleaved", _ROPE),
    rename_flag(
        "--use-rope-scaling",
        *("--rope-scaling", "llama3"),
        reason="with low and high factors of 1 and 4 and an original length of 8192, as there",
    ),
    refuse_flag("--mrope-section", _ROPE, arity="*"),
    *ignore_flags(
        "there are no relative position embeddings",
        "--relative-attention-num-buckets --relative-attention-max-distance",
        arity=1,
    ),
    refuse_flag(
        "--embedding-init-method-std",
        "all matrices are drawn with --init-method-std, and smaller in the output projections",
        arity=1,
    ),
    rename_flag("--padded-vocab-size", "--pad-vocab-size-to", arity=1),
    *ignore_flags(
        _KERNELS,
        "--no-rope-fusion --no-bias-swiglu-fusion --cross-entropy-loss-fusion --use-legacy-models "
        "--use-te-activation-func --enable-cuda-graph --external-cuda-graph "
        "--disable-bf16-reduced-precision-matmul --no-gradient-reduce-div-fusion "
        "--enable-experimental",
    ),
    *ignore_flags(_KERNELS, "--cross-entropy-fusion-impl --cuda-graph-impl", arity=1),
    ignore_flag("--cuda-graph-*", _KERNELS, arity="*"),
    ignore_flag("--init-model-with-meta-device", "each rank builds only its own part of the model"),
    *ignore_flags(_SEED, "--te-rng-tracker --inference-rng-tracker"),
    *refuse_flags(_QUANTISED, "--kitchen-config-file --kitchen-recipe-number", arity=1),
    ignore_flag("--first-last-layers-bf16", "it is for fp8, which is not supported"),
    *ignore_flags(
        "it is for fp8, which is not supported",
        "--num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16",
        arity=1,
    ),
    *ignore_flags(
        "it is for fp8, which is not supported",
        "--keep-fp8-transpose-cache --keep-fp8-transpose-cache-when-using-custom-fsdp "
        "--reuse-grad-buf-for-mxfp8-param-ag",
    ),
)

_OPTIMIZER_AND_LOSS = (
    rename_flag("--optimizer", "--optimizer", "muon", arity=1, only=("dist_muon",)),
    ignore_flag(
        "--muon-tp-mode",
        "whole matrices are orthogonalised",
        arity=1,
        only=("duplicated", "distributed"),
    ),
    refuse_flag(
        "--muon-tp-mode", "whole matrices are orthogonalised, so a layout changes no number", 1
    ),
    refuse_flag("--muon-no-split-qkv", "queries, keys and values are three matrices"),
    ignore_flag("--muon-split-qkv", "queries, keys and values are three matrices"),
    ignore_flag("--muon-use-syrk", _KERNELS),
    ignore_flag("--muon-scalar-optimizer", "it is AdamW", arity=1, only=("adam",)),
    refuse_flag("--muon-scalar-optimizer", "it is AdamW: remove it", arity=1),
    rename_flag("--calculate-per-token-loss", "--loss-mean", "step"),
    *ignore_flags(_MASTERS, "--use-precision-aware-optimizer"),
    ignore_flag("--main-grads-dtype", _EXACT_GRADIENTS, arity=1, only=("bf16",)),
    *(
        ignore_flag(flag, _MASTERS, arity=1, only=("fp32",))
        for flag in (
            "--main-grads-dtype",
            "--main-params-dtype",
            "--exp-avg-dtype",
            "--exp-avg-sq-dtype",
        )
    ),
    *refuse_flags(
        _MASTERS,
        "--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
        arity=1,
    ),
    rename_flag("--optimizer-cpu-offload", "--cpu-optimizer"),
    *ignore_flags(_MEMORY, "--optimizer-offload-fraction", arity=1),
    *ignore_flags(
        _MEMORY,
        "--use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads "
        "--no-pin-cpu-params --no-clone-scatter-output-in-embedding",
    ),
    ignore_flag(
        "--recompute-modules",
        "--checkpoint-activations and --recompute-attention-core select what is recomputed",
        arity="*",
    ),
    *ignore_flags(
        _CHECKS,
        "--no-check-for-nan-in-loss-and-grad --check-for-nan-in-loss-and-grad "
        "--check-for-spiky-loss --check-for-large-grads",
    ),
    *ignore_flags(_CHECKS, "--rerun-mode --result-rejected-tracker-filename", arity=1),
    ignore_flag("--error-injection-rate", "no errors are injected", arity=1, only=("0",)),
    refuse_flag("--error-injection-rate", "no errors are injected", arity=1),
    ignore_flag("--error-injection-type", "no errors are injected", arity=1),
    refuse_flag(
        "--iterations-to-skip",
        "use --skip-train-iteration-range, as in 5-5 for one iteration",
        arity="*",
    ),
    # It changes only batch sizes that the ranks cannot divide.
    ignore_flag(
        "--decrease-batch-size-if-needed",
        "a batch size that the ranks cannot divide is an error",
    ),
)

_PARALLELISM = (
    *ignore_flags(
        _SCHEDULING,
        "--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush "
        "--no-delay-grad-reduce --delay-grad-reduce --delay-param-gather --no-align-grad-reduce "
        "--align-grad-reduce --no-align-param-gather --align-param-gather "
        "--overlap-param-gather-with-optimizer-step --defer-embedding-wgrad-compute "
        "--ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw --use-nccl-ub "
        "--use-sharp --disable-symmetric-registration --disable-gloo-process-groups "
        "--fsdp-manual-registration "
        "--use-tp-pp-dp-mapping --disable-tp-comm-split-ag --disable-tp-comm-split-rs "
        "--disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad --disable-tp-comm-overlap-ag "
        "--disable-tp-comm-overlap-rs --tp-comm-overlap --tp-comm-overlap-rs-dgrad",
    ),
    ignore_flag("--tp-comm-*", _SCHEDULING, arity="*"),
    *ignore_flags(
        _SCHEDULING,
        "--ddp-bucket-size --ddp-num-buckets --wgrad-deferral-limit "
        "--microbatch-group-size-per-virtual-pipeline-stage --nccl-communicator-config-path "
        "--pipeline-model-parallel-comm-backend --sharp-enabled-group "
        "--suggested-communication-unit-size --symmetric-ar-type "
        "--distributed-timeout-seconds-after-init",
        arity=1,
    ),
    ignore_flag("--high-priority-stream-groups", _SCHEDULING, arity="*"),
    rename_flag("--use-torch-fsdp2", "--zero-stage", "3"),
    *ignore_flags(
        _FSDP,
        "--use-custom-fsdp --use-megatron-fsdp --fsdp-double-buffer "
        "--torch-fsdp2-no-reshard-after-forward --enable-full-sharding-in-hsdp",
    ),
    *(
        rename_flag(
            "--data-parallel-sharding-strategy", "--zero-stage", stage, arity=1, only=(name,)
        )
        for stage, name in (
            ("0", "no_shard"),
            ("1", "optim"),
            ("2", "optim_grads"),
            ("3", "optim_grads_params"),
        )
    ),
    *ignore_flags(_FSDP, "--num-distributed-optimizer-instances", arity=1),
    *ignore_flags(
        _STAGES,
        "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
        "--pipeline-model-parallel-layout",
        arity=1,
    ),
    *ignore_flags(
        _STAGES,
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ),
    derive_from(
        "--num-virtual-stages-per-pipeline-rank",
        "it gives --num-layers-per-virtual-pipeline-stage",
    ),
    *(
        ignore_flag(flag, "there is no separate encoder", arity=1, only=("0",))
        for flag in (
            "--encoder-tensor-model-parallel-size",
            "--encoder-pipeline-model-parallel-size",
        )
    ),
    *refuse_flags(
        "there is no separate encoder",
        "--encoder-tensor-model-parallel-size --encoder-pipeline-model-parallel-size",
        arity=1,
    ),
)

_DATA = (
    *ignore_flags(
        _LOADER,
        "--no-mmap-bin-files --no-create-attention-mask-in-dataloader "
        "--create-attention-mask-in-dataloader --exit-signal-handler-for-dataloader --disable-msc",
    ),
    *ignore_flags(
        _LOADER,
        "--num-dataset-builder-threads --s3-cache-path --object-storage-cache-path",
        arity=1,
    ),
    ignore_flag("--renormalize-blend-weights", "a mixture follows its weights exactly"),
    ignore_flag("--mid-level-dataset-surplus", "a mixture follows its weights exactly", arity=1),
    ignore_flag("--multiple-validation-sets", "named validation sets are evaluated separately"),
    refuse_flag("--full-validation", "every evaluation has --eval-iters batches: use that flag"),
    *refuse_flags(_SPLITS, "--data-args-path --per-split-data-args-path", arity=1),
    refuse_flag("--tokenizer-type", _PUBLISHED_VOCABULARY, arity=1, only=("TikTokenizer",)),
    refuse_flag(
        "--tokenizer-type",
        _OTHER_DATA,
        arity=1,
        only=("MultimodalTokenizer", "SFTTokenizer", "NullMultimodalTokenizer"),
    ),
    ignore_flag("--tiktoken-*", _TIKTOKEN, arity="*"),
    *ignore_flags("the tokenizer's own files are read", "--tokenizer-metadata", arity=1),
    ignore_flag("--legacy-tokenizer", "the tokenizer's own files are read"),
    ignore_flag("--tokenizer-hf-no-use-fast", "the tokenizer's own files are read"),
    ignore_flag(
        "--tokenizer-hf-no-include-special-tokens", "no special token is added around a text"
    ),
    refuse_flag("--tokenizer-sentencepiece-legacy", _PLAIN_SENTENCEPIECE),
    refuse_flag("--tokenizer-special-tokens", _PLAIN_SENTENCEPIECE, arity="*"),
    refuse_flag("--yaml-cfg", "use --config with a YAML file of this trainer", arity=1),
)

_CHECKPOINTING = (
    rename_flag("--ckpt-step", "--load-iteration", arity=1),
    rename_flag("--persistent-save-interval", "--save-interval", arity=1),
    rename_flag(
        "--save-retain-interval",
        "--keep-latest-checkpoints",
        "1",
        "--keep-every",
        arity=1,
    ),
    rename_flag(
        "--check-weight-hash-across-dp-replicas-interval", "--check-invariants-interval", arity=1
    ),
    *ignore_flags(
        _CHECKPOINTS,
        "--use-dist-ckpt --auto-detect-ckpt-format --ckpt-fully-parallel-save "
        "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-load "
        "--ckpt-assume-constant-structure --use-persistent-ckpt-worker "
        "--load-main-params-from-ckpt --no-strict-fsdp-dtensor-load "
        "--distrib-optim-fully-reshardable-mem-efficient",
    ),
    *ignore_flags(_CHECKPOINTS, "--ckpt-format --dist-ckpt-format", arity=1),
    ignore_flag("--dist-ckpt-*", _CHECKPOINTS, arity="*"),
    ignore_flag("--non-persistent-*", _LOCAL, arity="*"),
    ignore_flag("--replication", _LOCAL),
    *ignore_flags(_LOCAL, "--replication-jump --replication-factor", arity=1),
    refuse_flag("--ckpt-convert-*", _CONVERSION, arity="*"),
    refuse_flag(
        "--pretrained-checkpoint",
        "use --load with --finetune, which loads only the weights",
        arity=1,
    ),
)

_REPORTS = (
    *ignore_flags(_COLLECTOR, "--manual-gc --no-manual-gc-eval"),
    ignore_flag("--manual-gc-interval", _COLLECTOR, arity=1),
    *ignore_flags(
        _TRACKERS,
        "--log-progress --log-energy --enable-one-logger --no-one-logger --one-logger-async",
    ),
    *ignore_flags(
        _TRACKERS,
        "--app-tag-run-name --app-tag-run-version --logging-level --config-logger-dir",
        arity=1,
    ),
    *ignore_flags(_TRACKERS, "--one-logger-* --wandb-*", arity="*"),
    *ignore_flags(_STRAGGLERS, "--log-straggler --disable-straggler-on-startup"),
    *ignore_flags(_STRAGGLERS, "--straggler-ctrlr-port --straggler-minmax-count", arity=1),
    derive_from("--profile-step-start", _TRACE, only=("0",)),
    derive_from("--profile-step-start", _TRACE),
    derive_from("--profile-step-end", _TRACE),
    ignore_flag("--use-pytorch-profiler", "--profile always writes a trace of PyTorch's profiler"),
    rename_flag(
        "--record-memory-history",
        "--memory-snapshot",
        reason="a snapshot is written if memory runs out, and after "
        "--memory-snapshot-iterations instead of each --log-interval",
    ),
    ignore_flag("--memory-snapshot-path", "snapshots are written to --profile-dir", arity=1),
    *ignore_flags(
        _PROFILER,
        "--run-workload-inspector-server --nvtx-ranges --pytorch-profiler-collect-shapes "
        "--pytorch-profiler-collect-callstack",
    ),
    ignore_flag("--train-sync-interval", "the host reads the loss of every iteration", arity=1),
    ignore_flag("--test-mode", "no tests run beside training"),
    *ignore_flags(_RESTARTS, "--enable-ft-package --calc-ft-timeouts --inprocess-restart"),
    ignore_flag("--inprocess-empty-cuda-cache", _RESTARTS),
    ignore_flag("--inprocess-*", _RESTARTS, arity="*"),
    ignore_flag(
        "--exit-signal",
        "this signal always saves and exits",
        arity=1,
        only=tuple(
            spelled
            for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
            for spelled in (name, name.lower())
        ),
    ),
)

_OTHER_PROGRAMS = (
    *ignore_flags(_INFERENCE, "--flash-decode --nccl-all-reduce-for-prefill"),
    *ignore_flags(_INFERENCE, "--decode-only-cuda-graphs --disable-chunked-prefill"),
    ignore_flag("--inference-dynamic-batching", _INFERENCE),
    ignore_flag("--inference-dynamic-batching-track-paused-request-events", _INFERENCE),
    ignore_flag("--mlp-chunks-for-prefill", _INFERENCE, arity=1),
    ignore_flag("--inference-*", _INFERENCE, arity="*"),
    *refuse_flags(_RL, "--perform-rl-step"),
    *ignore_flags(
        _RL,
        "--rl-* --grpo-* --langrl-* --no-rl-* --no-langrl-*",
        arity="*",
    ),
    refuse_flag("--sft", _SFT),
    ignore_flag("--sft-tokenizer-prompt-format", _SFT, arity=1),
    *refuse_flags(_DISTILLATION, "--export-* --kd-*", arity="*"),
    refuse_flag("--load-model-opt-format", _DISTILLATION),
    refuse_flag("--retro-*", "it is for retrieval, and only GPT and Llama models are trained", "*"),
)

MEGATRON_CORE: tuple[Row, ...] = (
    *_MODEL,
    *_OPTIMIZER_AND_LOSS,
    *_PARALLELISM,
    *_DATA,
    *_CHECKPOINTING,
    *_REPORTS,
    *_OTHER_PROGRAMS,
)
