"""Values that follow from several flags of fms-fsdp, or that its code fixes.

Invariant: as in `compat_derived`. Source: main_training_llama.py of fms-fsdp. For x finished steps
of N and a warm-up of w = min(2000, N // 20) steps, its rate is a part of the peak:

    initial    min(1 - (1 - min(x, w) / w)^2, 0.1 + 0.5 (1 - 0.1) (1 + cos(pi min(x, N) / N)))
    annealing  1 - x / N
"""

import os

from megatron.extras.interop.translators.compat import (
    OTHER_WARMUPS,
    Computed,
    Derivation,
    FlagValues,
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


def _compute_fms_floor(values: FlagValues) -> Computed:
    peak = values.get_field("optimizer.lr")
    if peak is None or values.get_field("optimizer.lr_decay_style") != "cosine":
        return None, ""
    return peak / 10, "a tenth of the peak rate, as in fms-fsdp"


def _compute_fms_warmup(values: FlagValues) -> Computed:
    length = _find_fms_warmup(values)
    if length is None:
        return None, ""
    return length, "at most 2000 iterations and a twentieth of training, as in fms-fsdp"


def _compute_fms_warmup_style(values: FlagValues) -> Computed:
    if not _find_fms_warmup(values):
        return None, ""
    return "quadratic", "the warm-up of fms-fsdp"


def _compute_fms_decay_start(values: FlagValues) -> Computed:
    if not _find_fms_warmup(values):
        return None, ""
    return True, "the cosine of fms-fsdp begins at step 0"


def _find_fms_warmup(values: FlagValues) -> int | None:
    """Return the iterations of fms-fsdp's warm-up, or None if the rate has another schedule."""
    steps = values.get_field("batch.train_iters")
    # Another warm-up that was given is one of this trainer's schedules.
    warmups = ("optimizer.lr_warmup_iters", *OTHER_WARMUPS)
    if any(values.get_field(dotted) is not None for dotted in warmups):
        return None
    if steps is None or values.get_field("optimizer.lr_decay_style") != "cosine":
        return None
    return min(2000, int(steps) // 20)


def _compute_fms_fresh_start(values: FlagValues) -> Computed:
    """Return whether an annealing stage starts at iteration 0 with the weights of another run."""
    load = values.get_field("checkpoint.load")
    save = values.get_field("checkpoint.save")
    if not values.has("--training-stage", "annealing") or load is None or save is None:
        return None, ""
    if os.path.realpath(load) == os.path.realpath(save):
        return None, ""
    return True, (
        "annealing starts at step 0, as in fms-fsdp, but without the optimizer's moments, which "
        "fms-fsdp loads; to resume it, give the folder of --ckpt_save_path as --ckpt_load_path too"
    )


def _compute_fms_strip_tokens(values: FlagValues) -> Computed:
    added = [values.get_field(f"data.{name}_token") for name in ("bos", "eos")]
    listed = ",".join(str(token) for token in added if token is not None)
    if values.get_field("data.dataset_format") is None or not listed:
        return None, ""
    return listed, "fms-fsdp removes the tokens that it adds from the ends of a document first"


FMS_DERIVATIONS: tuple[Derivation, ...] = (
    ("fms-fsdp", "optimizer.min_lr", _compute_fms_floor),
    ("fms-fsdp", "optimizer.lr_warmup_iters", _compute_fms_warmup),
    ("fms-fsdp", "optimizer.lr_warmup_style", _compute_fms_warmup_style),
    ("fms-fsdp", "optimizer.lr_decay_from_start", _compute_fms_decay_start),
    ("--training-stage", "checkpoint.finetune", _compute_fms_fresh_start),
    ("fms-fsdp", "data.strip_tokens", _compute_fms_strip_tokens),
)
