"""Flags of llm-baselines (`python src/main.py --n_layer 12 ...`) that differ here.

Invariant: as in `compat_row`. Source: llm-baselines' argument parser in all its versions, and what
its code does with each argument. `compat_derived` computes what follows from several of its flags.
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

_DATA = "--data-path names the data; tools/import_tokens.py converts a train.bin"
_TRACKER = "metrics go to TensorBoard (--tensorboard-dir), metrics.jsonl and --tracker"
_OTHER_OPTIMIZER = "it is for another optimizer than adamw and ademamix"
_AVERAGES = "weights are not averaged over steps"
_MOE = "there are no mixtures of experts"
_NO_MOE = "it is for mixtures of experts, which are not supported"
_MUP = "muP is not supported"
_NO_MUP = "it is for muP, which is not supported"
_RESEARCH = "the model is a plain GPT or Llama"

LLM_BASELINES: tuple[Row, ...] = (
    # The model.
    rename_flag(
        "--model",
        *("--normalization", "RMSNorm", "--glu-activation", "swiglu", "--no-add-bias-linear"),
        *("--position-embedding-type", "rotary", "--no-weight-decay-on-embeddings"),
        arity=1,
        only=("llama", "llama2"),
        reason="the feed-forward width is 8/3 x --n_embd, rounded up to a multiple of "
        "--multiple_of",
    ),
    rename_flag(
        "--model",
        *("--no-add-bias-linear", "--no-norm-bias"),
        *("--no-bias-gelu-fusion", "--no-weight-decay-on-embeddings"),
        arity=1,
        only=("base",),
    ),
    refuse_flag("--model", _MUP, arity=1, only=("mup_gpt", "mup_llama")),
    refuse_flag("--model", "use --model base or --model llama", arity=1),
    rename_flag("--n-layer", "--num-layers", arity=1),
    rename_flag("--n-head", "--num-attention-heads", arity=1),
    rename_flag("--n-kv-head", "--num-query-groups", arity=1),
    rename_flag("--n-embd", "--hidden-size", arity=1),
    rename_flag("--sequence-length", "--seq-length", arity=1),
    rename_flag("--rmsnorm-eps", "--layernorm-epsilon", arity=1),
    rename_flag("--init-std", "--init-method-std", arity=1),
    rename_flag(
        "--untied-embeds",
        "--untie-embeddings-and-output-weights",
        reason="the output matrix has weight decay here, and none there",
    ),
    rename_flag("--bias", "--add-bias-linear", "--norm-bias", arity=1, only=("True", "true")),
    rename_flag(
        "--bias", "--no-add-bias-linear", "--no-norm-bias", arity=1, only=("False", "false")
    ),
    *(
        rename_flag(
            "--dropout", "--hidden-dropout", p, "--attention-dropout", p, arity=1, only=(p,)
        )
        for p in ("0", "0.0", "0.05", "0.1", "0.2", "0.3", "0.5")
    ),
    refuse_flag("--dropout", "use --hidden-dropout and --attention-dropout", arity=1),
    derive_from(
        "--multiple-of", "with --model llama the feed-forward width is a multiple of it", arity=1
    ),
    ignore_flag("--use-pretrained", "there are no weights to load", arity=1, only=("none",)),
    refuse_flag(
        "--use-pretrained",
        "use --load with --finetune, which loads the weights of this trainer's checkpoints",
        arity=1,
    ),
    refuse_flag("--parallel-block", "the feed-forward layer comes after attention: remove it"),
    ignore_flag("--attention-type", "attention is causal", arity=1, only=("base", "self")),
    ignore_flag("--use-zloss", "the loss is the cross-entropy alone", 1, only=("False", "false")),
    *refuse_flags(_RESEARCH, "--attention-type --use-zloss", arity=1),
    *refuse_flags(
        _RESEARCH,
        "--normalized --use-reduced-heads --mixture-of-depth --proj-norms --proj-embeds "
        "--proj-logits --use-cumsum --trainable-cumsum --use-softmax-cumsum --add-random-tokens "
        "--train-partial --data-cleaning",
    ),
    *ignore_flags(
        "it is for a variant of the model or the data that is not supported",
        "--mod-capacity-factor --mod-every --ratio-heads --reduction-factor --context-full "
        "--context-reduced --context-short --context-long --n-heads-short --n-heads-long "
        "--short-heads-dim --long-heads-dim --num-curated-batch --num-curated-seqs --num-rand-tok "
        "--num-train-seqs",
        arity=1,
    ),
    ignore_flag("--mlp-dim-exp-factor", _NO_MOE, arity=1, only=("1", "1.0")),
    refuse_flag("--mlp-dim-exp-factor", "use --ffn-hidden-size", arity=1),
    refuse_flag("--moe", _MOE),
    *ignore_flags(_NO_MOE, "--from-dense --plot-router-logits"),
    ignore_flag("--capacity-factor", _NO_MOE, arity=1),
    *ignore_flags(_NO_MUP, "--scale-emb --scale-base-model --scale-depth", arity=1),
    # Precision and kernels.
    rename_flag("--dtype", "--bf16", arity=1, only=("bfloat16", "torch.bfloat16")),
    rename_flag("--dtype", "--fp16", arity=1, only=("float16", "torch.float16")),
    ignore_flag("--dtype", "fp32 is the default", arity=1, only=("float32", "torch.float32")),
    rename_flag("--compile", "--use-torch-compile"),
    rename_flag("--no-compile", "--no-use-torch-compile"),
    ignore_flag("--device", "each process uses the GPU of its local rank, or the CPU", arity=1),
    # Batches and the length of training.
    derive_from(
        "--acc-steps",
        "the global batch size is --batch_size x --acc_steps, over all ranks",
        arity=1,
    ),
    rename_flag("--iterations", "--train-iters", arity=1),
    refuse_flag("--max-epochs", "use --train-iters or --train-samples", arity=1),
    ignore_flag("--data-seed", "the order of samples follows from --seed", arity=1),
    ignore_flag("--data-rd-seed", "the order of samples follows from --seed", arity=1),
    # The optimizer and the learning rate.
    ignore_flag("--opt", "AdamW is the optimizer", arity=1, only=("adamw",)),
    derive_from(
        "--opt", "it is --optimizer ademamix with llm-baselines' defaults", only=("ademamix",)
    ),
    rename_flag("--adema-beta3", "--ademamix-beta3", arity=1),
    rename_flag("--adema-alpha", "--ademamix-alpha", arity=1),
    rename_flag("--adema-beta3-warmup", "--ademamix-beta3-warmup", arity=1),
    rename_flag("--adema-alpha-warmup", "--ademamix-alpha-warmup", arity=1),
    refuse_flag(
        "--opt",
        "queries, keys and values are one matrix there and three here, and its matrices have no "
        "weight decay and a learning rate of their own. --optimizer muon is near it with "
        "--muon-coefficient-type simple --muon-scale-mode shape_scaling",
        arity=1,
        only=("muon",),
    ),
    refuse_flag(
        "--opt",
        "queries, keys and values are one matrix there and three here. --optimizer muon is near "
        "it with --muon-coefficient-type simple --muon-extra-scale-factor 0.2",
        arity=1,
        only=("d-muon", "muon-pytorch"),
    ),
    refuse_flag("--opt", "there is no such optimizer: use adamw", arity=1),
    rename_flag("--beta1", "--adam-beta1", arity=1),
    rename_flag("--beta2", "--adam-beta2", arity=1),
    rename_flag("--eps", "--adam-eps", arity=1),
    rename_flag("--grad-clip", "--clip-grad", arity=1),
    rename_flag("--warmup-steps", "--lr-warmup-iters", arity=1),
    rename_flag("--warmup-percent", "--lr-warmup-fraction", arity=1),
    rename_flag(
        "--scheduler",
        "--lr-decay-style",
        "cosine",
        arity=1,
        only=("cos",),
        reason="warm-up starts at 0 here, and at a hundredth of the peak there",
    ),
    rename_flag(
        "--scheduler",
        "--lr-decay-style",
        "linear",
        arity=1,
        only=("linear",),
        reason="warm-up starts at 0 here, and at a hundredth of the peak there",
    ),
    rename_flag("--scheduler", "--lr-decay-style", "constant", arity=1, only=("none",)),
    derive_from(
        "--scheduler", "it is --lr-decay-style WSD with llm-baselines' defaults", only=("wsd",)
    ),
    refuse_flag("--scheduler", "use --scheduler wsd or cos", arity=1),
    derive_from("--final-div-factor", "--min-lr is --lr / 100 / --final_div_factor", arity=1),
    derive_from(
        "--wsd-fract-decay",
        "with --scheduler wsd, --lr-wsd-decay-iters is its value x --iterations",
        arity=1,
    ),
    *(
        derive_from(
            "--wsd-final-lr-scale",
            "with --scheduler wsd, --min-lr is its value x --lr",
            only=values,
        )
        for values in (("0", "0.0"), ())
    ),
    *(
        rename_flag("--decay-type", "--lr-wsd-decay-style", style, arity=1, only=(theirs,))
        for theirs, style in (("linear", "linear"), ("cosine", "cosine"), ("sqrt", "minus_sqrt"))
    ),
    refuse_flag(
        "--decay-type",
        "the final decay of WSD has another shape: use linear, cosine or sqrt",
        arity=1,
    ),
    *ignore_flags(
        "it is for --scheduler cos_inf or dd, which are refused",
        "--cos-inf-steps --dd-second-decay-type --dd-first-lr-factor",
        arity=1,
    ),
    refuse_flag(
        "--weight-decay-scheduler", "the weight decay is constant: use --weight-decay", arity=1
    ),
    *ignore_flags(
        _OTHER_OPTIMIZER,
        "--momentum --shampoo-beta --precondition-frequency --max-precond-dim --merge-dims "
        "--precondition-1d --normalize-grads --soap-data-format --correct-bias --nesterov "
        "--muon-ns-steps --muon-lr-factor --muon-backend --muon-backend-steps --schedulefree-r "
        "--weight-lr-power --dampening --prodigy-beta3 --prodigy-decouple "
        "--prodigy-use-bias-correction --prodigy-safeguard-warmup --prodigy-fsdp-in-use "
        "--sophia-rho --sophia-bs --clipping-type --clip-eta --mars-type --mars-vr-gamma "
        "--mars-is-approx --mars-lr --mars-beta1 --mars-beta2 --adafactor-decay-rate "
        "--lamb-use-bias-correction --adopt-decouple --adopt-eps --scion-lmh-scale "
        "--scion-emb-scale --scion-tr-scale --beta3 --gamma --alpha --sgd-lr-scale "
        "--final-weight-decay --block-dim --model-sharding",
        arity=1,
    ),
    *ignore_flags(_OTHER_OPTIMIZER, "--sign-norm --sgd-sign-update"),
    ignore_flag("--adam-mini-verbose", _OTHER_OPTIMIZER, arity=1),
    refuse_flag("--cautious", "AdamW's update is not masked", arity=1),
    *refuse_flags(_AVERAGES, "--weight-average --exponential-weight-average"),
    *ignore_flags(
        _AVERAGES,
        "--wa-interval --wa-horizon --wa-dtype --max-num-wa-sweeps --ewa-interval --ewa-decay",
        arity=1,
    ),
    *ignore_flags(_AVERAGES, "--wa-use-temp-dir --wa-sweep-horizon --ewa-after-warmup"),
    # Data. Without --data-path a run is refused, so no other data can be trained on by mistake.
    *ignore_flags(_DATA, "--dataset --datasets-dir", arity=1),
    ignore_flag("--data-in-ram", "data files are mapped into memory"),
    # Evaluation, checkpoints and reports.
    rename_flag("--eval-freq", "--eval-interval", arity=1),
    rename_flag("--eval-batches", "--eval-iters", arity=1),
    ignore_flag("--full-eval-at", "every evaluation has --eval-iters batches", arity="*"),
    ignore_flag("--eval-seq-prefix", "no text is generated while training", arity=1),
    rename_flag(
        "--results-base-folder",
        "--save",
        arity=1,
        reason="checkpoints are directly in this folder",
    ),
    rename_flag("--permanent-ckpt-interval", "--save-interval", arity=1),
    rename_flag("--save-checkpoint-freq", "--save-interval", arity=1),
    ignore_flag("--latest-ckpt-interval", "--save-interval sets when checkpoints are saved", 1),
    rename_flag(
        "--resume-from",
        "--load",
        arity=1,
        reason="import checkpoints of llm-baselines with tools/convert_checkpoint.py "
        "from-llm-baselines",
    ),
    refuse_flag("--resume-from-swa", _AVERAGES, arity=1),
    ignore_flag("--auto-resume", "a run resumes if --load names the folder of --save", arity=1),
    ignore_flag("--config-format", "there is one format of the flags", arity=1, only=("base",)),
    *ignore_flags(
        "a run is named by its folder", "--exp-name --experiment-name --run-prefix", arity=1
    ),
    derive_from("--wandb", "with --save, it is --tracker wandb", arity=0),
    *ignore_flags(_TRACKER, "--log-dynamics --log-parameter-norms"),
    *ignore_flags(_TRACKER, "--wandb-run-prefix --dynamics-logger-cfg --norm-order", arity=1),
)

LLM_BASELINES_DEFAULTS = (
    "--model llama --n-layer 24 --n-head 12 --n-embd 768 --sequence-length 512 --multiple-of 256 "
    "--rmsnorm-eps 1e-5 --init-std 0.02 --dropout 0.0 --vocab-size 50304 --batch-size 50 "
    "--acc-steps 1 --iterations 15000 --opt adamw --lr 1e-3 --beta1 0.9 --beta2 0.95 "
    "--weight-decay 0.1 --grad-clip 1.0 --scheduler cos --final-div-factor 1 --warmup-steps 3000 "
    "--dtype bfloat16 --seed 0 --eval-interval 200 --eval-batches 64 --log-interval 50"
)
"""The defaults of llm-baselines' newest argument parser."""
