"""Flags of fms-fsdp's launch scripts that differ here.

An example is `--model_variant=llama2_7b --use_dummy_dataset=False`.

Invariant: as in `compat_row`. Sources: fms-fsdp's configuration, its registry of model variants,
and the Llama of the foundation-model-stack that it trains. That model has RMSNorm with epsilon
1e-5, SwiGLU, no biases, no dropout, and an output layer with its own weights.
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

_VARIANT = (
    "without its sequence length. Weights are initialised with --init-method-std, and smaller in "
    "the output projections; fms-fsdp uses 0.02 for all"
)
_STREAMED = (
    "the format of the files is named with --dataset-format, and what is added to each document "
    "with --bos-token, --eos-token and --strip-tokens"
)
_SPECIAL_TOKENS = (
    "only the start and the end of a document get a token: --bos-token, --eos-token, and "
    "--strip-tokens for those that are there already"
)
_SPECULATOR = "no speculators are trained here"
_TRACKER = "metrics go to TensorBoard (--tensorboard-dir), metrics.jsonl and --tracker"
_TRACE = ("--profile-iterations", "4-6", "--profile-dir", "profile_traces")
_STEPS = "iterations count from the start of the run; fms-fsdp counts from each launch"
_OWN_CHECKPOINTS = (
    "import checkpoints of fms-fsdp with tools/convert_checkpoint.py from-fms-fsdp. If the folder "
    "is not that of --ckpt_save_path, fms-fsdp starts at step 0 with the weights and moments; here "
    "--finetune starts at step 0 with the weights only"
)
_SCHEDULE = "a quadratic warm-up and a cosine, which are the default of fms-fsdp"

_VARIANTS = {
    ("7b", "llama2_7b"): "llama2-7b",
    ("13b", "llama2_13b"): "llama2-13b",
    ("34b", "llama2_34b"): "llama2-34b",
    ("70b", "llama2_70b"): "llama2-70b",
    ("llama2_1.4b",): "llama2-1.4b",
    ("llama3_194m_4k",): "llama3-194m-4k",
    ("llama3_1.8b", "llama3_1.8b_4k"): "llama3-1.8b",
    ("llama3_3.2b", "llama3_3.2b_4k"): "llama3-3.2b",
    ("llama3_8b", "llama3_8b_4k"): "llama3-8b",
    ("llama3_70b", "llama3_70b_4k"): "llama3-70b",
}
"""Names of a model in fms-fsdp's registry of model variants -> preset."""

FMS: tuple[Row, ...] = (
    *(
        rename_flag("--model-variant", "--preset", preset, arity=1, only=names, reason=_VARIANT)
        for names, preset in _VARIANTS.items()
    ),
    # This row follows the variants. It holds for every other value of --model-variant.
    refuse_flag(
        "--model-variant",
        "there are no Mamba models; describe another Llama with --num-layers, --hidden-size and "
        "so on",
        1,
    ),
    rename_flag("--use-dummy-dataset", "--mock-data"),
    rename_flag("--file-type", "--dataset-format", "parquet", arity=1, only=("hf_parquet",)),
    rename_flag("--file-type", "--dataset-format", "arrow", arity=1, only=("arrow",)),
    refuse_flag("--file-type", "name the format: --dataset-format parquet, arrow or jsonl", 1),
    # llm-baselines has this flag too. This value is the default tokenizer.
    ignore_flag("--tokenizer", "GPT-2's tokenizer is the default", 1, only=("gpt2",)),
    refuse_flag(
        "--tokenizer", "--tokenizer-name-or-path names a folder in Hugging Face's format", arity=1
    ),
    rename_flag(
        "--tokenizer-path",
        "--tokenizer-type",
        "PretrainedFromHF",
        "--tokenizer-name-or-path",
        arity=1,
    ),
    *(
        ignore_flag(flag, "there is no such token", 1, only=("None",))
        for flag in ("--bos-token", "--eos-token", "--bol-token", "--eol-token")
    ),
    ignore_flag("--strip-tokens", "no tokens are removed", 1, only=("",)),
    *refuse_flags(
        _SPECIAL_TOKENS,
        "--bol-token --eol-token --sep-token",
        arity=1,
    ),
    *refuse_flags(_STREAMED, "--new-dataset --eos-present"),
    refuse_flag(
        "--reset-stepcount", "--finetune loads the weights and starts the counters from scratch"
    ),
    refuse_flag(
        "--resuming-dataset",
        "a resume always continues at its position in the data; --finetune starts the data from "
        "scratch",
    ),
    # fsdp, hsdp and ddp are the same here.
    *(
        rename_flag(
            "--sharding-strategy", "--sharding-strategy", name.lower(), arity=1, only=(name,)
        )
        for name in ("FSDP", "HSDP", "DDP")
    ),
    refuse_flag(
        "--sharding-strategy",
        "--tensor-model-parallel-size shards the layers",
        arity=1,
        only=("tp", "TP"),
    ),
    rename_flag("--sharding-group-size", "--hsdp-shard-size", arity=1),
    # Recomputation and precision.
    rename_flag("--fsdp-activation-checkpointing", "--checkpoint-activations"),
    *(
        rename_flag(
            "--selective-checkpointing",
            "--checkpoint-fraction",
            f"1/{k}",
            arity=1,
            only=(str(k),),
            reason=f"1 layer in {k}",
        )
        for k in (2, 3, 4)
    ),
    rename_flag("--selective-checkpointing", "--checkpoint-fraction", arity=1),
    rename_flag("--mixed-precision", "--bf16", reason="gradients are accumulated in fp32"),
    ignore_flag("--low-cpu-fsdp", "each rank builds only its own part of the model"),
    # The length of training, the optimizer and the learning rate.
    rename_flag("--num-steps", "--train-iters", arity=1),
    rename_flag(
        "--learning-rate",
        "--lr",
        arity=1,
        reason="the peak rate. Constants of fms-fsdp are flags here. A command line of fms-fsdp "
        "sets --lr-decay-style cosine --min-lr (a tenth of the peak) "
        "--lr-warmup-iters (at most 2000) "
        "--lr-warmup-style quadratic --lr-decay-from-start --adam-beta2 0.95 --weight-decay 0.1",
    ),
    rename_flag("--grad-clip-thresh", "--clip-grad", arity=1),
    rename_flag("--training-stage", "--lr-decay-style", "linear", arity=1, only=("annealing",)),
    ignore_flag("--training-stage", _SCHEDULE, arity=1, only=("initial",)),
    refuse_flag(
        "--training-stage",
        f"give initial ({_SCHEDULE}) or annealing (linear to 0)",
        arity=1,
    ),
    # Checkpoints and reports.
    rename_flag("--ckpt-load-path", "--load", arity=1, reason=_OWN_CHECKPOINTS),
    rename_flag("--ckpt-save-path", "--save", arity=1),
    rename_flag("--checkpoint-interval", "--save-interval", arity=1),
    rename_flag("--report-interval", "--log-interval", arity=1),
    rename_flag("--tracker-project-name", "--tracker-project", arity=1),
    *ignore_flags(_TRACKER, "--tracker-dir --tracker-run-id", arity=1),
    derive_from("--use-wandb", "with --save, it is --tracker wandb", arity=0),
    rename_flag("--wandb-project-name", "--tracker-project", arity=1),
    ignore_flag("--use-aim", _TRACKER),
    *ignore_flags(
        _TRACKER,
        "--wandb-dir --wandb-run-id --aim-dir --aim-project-name --aim-run-id",
        arity=1,
    ),
    ignore_flag("--use-profiler", "no trace is written", only=("False", "false")),
    rename_flag("--use-profiler", *_TRACE, reason=_STEPS),
    rename_flag("--profiler-rank0-only", "--profile-ranks", "-1", only=("False", "false")),
    rename_flag("--profiler-rank0-only", "--profile-ranks", "0"),
    # Speculators.
    *refuse_flags(_SPECULATOR, "--speculator-tie-weights --speculator-scale-input"),
    *refuse_flags(
        _SPECULATOR,
        "--tp-size --model-arch --model-path --n-speculator-heads --speculator-width "
        "--stage2-start-step --stage2-prompt-length --stage2-batch-size --stage2-seq-length",
        arity=1,
    ),
)

FMS_DEFAULTS = (
    "--model-variant 7b --seq-length 4096 --batch-size 2 --num-steps 1000000 --learning-rate 3e-4 "
    "--grad-clip-thresh 1.0 --seed 2023 --sharding-strategy hsdp --mixed-precision "
    "--report-interval 100 --checkpoint-interval 10000 --lr-decay-style cosine --adam-beta1 0.9 "
    "--adam-beta2 0.95 --weight-decay 0.1 "
    # The loader. The data sets are folders of IBM's corpus.
    "--file-type arrow --col-name tokens --eos-token 0 --logical-shards 1024 "
    "--datasets lang=en/dataset=commoncrawl,lang=en/dataset=webhose,lang=en/dataset=github_clean,"
    "lang=de/dataset=wikipedia,lang=es/dataset=wikipedia,lang=fr/dataset=wikipedia,"
    "lang=ja/dataset=wikipedia,lang=pt/dataset=wikipedia,lang=en/dataset=wikimedia,"
    "lang=en/dataset=uspto,lang=en/dataset=pubmedcentral,lang=en/dataset=arxiv,"
    "lang=en/dataset=stackexchange "
    "--weights 7725,500,550,28,17,22,25,8,100,500,175,250,100 "
    # All data are for training, and nothing is evaluated.
    "--split 1,0,0 --eval-iters 0"
)
"""The defaults of fms-fsdp's configuration (`fms_fsdp/config/training.py`), and the constants in
its code. Paths belong to a user, and the size of the vocabulary to a variant, so they are left out.
"""
