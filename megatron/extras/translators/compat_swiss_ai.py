"""Flags that swiss-ai's fork of Megatron-LM adds, which trained Apertus.

Invariant: as in `compat_row`. Sources: the fork's argument parser, on its main branch and on the
branches of its published runs, and what its code does with each argument.
"""

from megatron.extras.translators.compat_row import (
    Row,
    ignore_flag,
    ignore_flags,
    refuse_flag,
    refuse_flags,
    rename_flag,
)

_XIELU = "xIELU is the only such activation: use --xielu"
_NORMS = "each part of a layer has a norm; --norm-placement sets where it is"
_QUANTISED = "weights and activations are not quantised: remove it and use --bf16"
_QK_WIDTH = "queries, keys and values have one width: use --kv-channels"

# In the fork, a file `save` in the folder starts a save, and a file `exit` ends the run without
# one. The kill switch saves and ends the run, so neither file can be converted to it.
_TRIGGERS = (
    "the files of this folder have no effect; when the file of --kill-switch-path appears, the run "
    "saves and ends; --save-interval and --save-at choose the other saves"
)

SWISS_AI: tuple[Row, ...] = (
    # The model.
    rename_flag("--xielu", "--activation", "xielu"),
    ignore_flag("--qknorm-impl", "the kernels are selected and printed at the start", arity=1),
    rename_flag("--post-layer-norm", "--norm-placement", "output"),
    *refuse_flags(_XIELU, "--xielu-native --xiprelu --xiprelup"),
    refuse_flag(
        "--fix-old-xielu",
        "it changes the xIELU of old checkpoints while they are loaded. Load and save them once "
        "with the fork, then import them with tools/convert_checkpoint.py from-megatron-lm",
    ),
    *refuse_flags(_NORMS, "--no-attn-layernorm --no-mlp-layernorm"),
    refuse_flag("--no-final-layernorm", "the last layer's output always has a norm: remove it"),
    refuse_flag("--layernorm-init", "the weights of norms start at 1: remove it", arity=1),
    ignore_flag("--input-embeddings-multiplier", "1 is no factor", arity=1, only=("1", "1.0")),
    refuse_flag(
        "--input-embeddings-multiplier",
        "embeddings are not multiplied: remove it; --embed-layernorm normalises them",
        arity=1,
    ),
    *refuse_flags(
        "use --sliding-window, and --full-attention-layers for the layers without it",
        "--local-attention-every-n-layers --global-attention-every-n-layers",
        arity=1,
    ),
    refuse_flag("--qkdim-reduction-factor", _QK_WIDTH, arity=1),
    refuse_flag("--global-only-qkdim-reduction", _QK_WIDTH),
    refuse_flag("--no-token-self-attending", "each token attends to itself, too: remove it"),
    refuse_flag("--deepgemm-fp8", "fp8 is not supported: remove it and use --bf16"),
    *refuse_flags(_QUANTISED, "--w-quant --a-quant", arity=1),
    # Documents.
    *refuse_flags(
        "a document ends with a token and begins with none: use --reset-attention-mask and "
        "--eod-mask-loss",
        "--no-cross-document-attention --bod-hiding",
    ),
    # The loss and the optimizer.
    refuse_flag(
        "--z-loss-weight",
        "it penalises the largest logit; --z-loss-coefficient penalises the logarithm of the sum",
        arity=1,
    ),
    *(
        ignore_flag(flag, "-1 turns the warm-up off", arity=1, only=("-1",))
        for flag in ("--ademamix-beta3-warmup", "--ademamix-alpha-warmup")
    ),
    rename_flag(
        "--lr-wsd-decay-style", "--lr-wsd-decay-style", "minus_sqrt", arity=1, only=("1-sqrt",)
    ),
    # The run.
    ignore_flag("--trigger-path", _TRIGGERS, arity=1),
    *ignore_flags(
        "--log-params-norm logs one norm of all parameters, and the gradients' norm is always "
        "logged",
        "--log-params-norm-per-param --log-indiv-grad-norm",
    ),
    ignore_flag("--log-intermediate-metrics", "no such metrics are logged here", arity="*"),
    ignore_flag("--log-intermediate-metrics-interval", "no such metrics are logged here", arity=1),
)
