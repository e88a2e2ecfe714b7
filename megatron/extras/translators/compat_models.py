"""Flags of Megatron-LM and Megatron-DeepSpeed that are for anything but the pretraining of a GPT.

They are refused, with one reason for each kind.

Invariant: as in `compat_row`. Source: the argument parsers of Megatron-LM and of BigScience's and
Microsoft's Megatron-DeepSpeed.
"""

from megatron.extras.translators.compat_row import Row, refuse_flag, refuse_flags

_GPT = "only GPT and Llama models are trained here"
_BERT = f"it is for BERT and T5, and {_GPT}"
_RETRIEVAL = f"it is for retrieval, and {_GPT}"
_VISION = f"it is for vision, and {_GPT}"
_INFERENCE = "this program only trains; tools/generate.py samples from a checkpoint"
_DISTILLATION = "distillation is not supported: remove it"

# They are listed so that the message gives the reason. An unlisted flag would be reported as
# unknown.
OTHER_MODELS: tuple[Row, ...] = (
    refuse_flag(
        "--tokenizer-type", _BERT, arity=1, only=("BertWordPieceLowerCase", "BertWordPieceCase")
    ),
    refuse_flag("--bert-no-binary-head", _BERT),
    *refuse_flags(
        _BERT,
        "--decoder-num-layers --decoder-seq-length --pipeline-model-parallel-split-rank "
        "--mask-prob --short-seq-prob --noise-density --mean-noise-span-length",
        arity=1,
    ),
    *refuse_flags(
        _RETRIEVAL,
        "--biencoder-shared-query-context-model --use-one-sent-docs --retriever-score-scaling "
        "--retro-add-retriever --retro-return-doc-ids",
    ),
    *refuse_flags(
        _RETRIEVAL,
        "--retriever-seq-length --sample-rate --ict-head-size --biencoder-projection-dim "
        "--ict-load --bert-load --titles-data-path --query-in-block-prob --evidence-data-path "
        "--block-data-path --embedding-path --indexer-batch-size --indexer-log-interval "
        "--retro-workdir --retro-cyclic-train-iters --retro-encoder-layers "
        "--retro-encoder-hidden-dropout --retro-encoder-attention-dropout --retro-num-neighbors "
        "--retro-num-retrieved-chunks",
        arity=1,
    ),
    refuse_flag("--retriever-report-topk-accuracies", _RETRIEVAL, arity="*"),
    *refuse_flags(_VISION, "--no-data-sharding --vision-pretraining --dino-norm-last-layer"),
    *refuse_flags(
        _VISION,
        "--num-classes --img-dim --img-h --img-w --num-channels --patch-dim --classes-fraction "
        "--data-per-class-fraction --head-lr-mult --vision-pretraining-type "
        "--vision-backbone-type --swin-backbone-type --mask-type --mask-factor --iter-per-epoch "
        "--dino-local-img-size --dino-local-crops-number --dino-head-hidden-size "
        "--dino-bottleneck-size --dino-freeze-last-layer --dino-warmup-teacher-temp "
        "--dino-teacher-temp --dino-warmup-teacher-temp-epochs",
        arity=1,
    ),
    *refuse_flags(_INFERENCE, "--inference --ds-inference --output-bert-embeddings"),
    *refuse_flags(
        _INFERENCE,
        "--inference-batch-times-seqlen-threshold --max-tokens-to-oom --bert-embedder-type",
        arity=1,
    ),
    *refuse_flags(_DISTILLATION, "--mos --kd"),
    *refuse_flags(
        _DISTILLATION,
        "--num-layers-teacher --hidden-size-teacher --num-attention-heads-teacher --kd-alpha-ce "
        "--kd-beta-ce --kd-temp --load-teacher",
        arity=1,
    ),
    refuse_flag("--num-experts-teacher", _DISTILLATION, arity="*"),
    refuse_flag(
        "--reset-iteration", "--finetune loads the weights and starts the counters from scratch"
    ),
)
