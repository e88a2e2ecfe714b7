"""Runs from the files that `tools/plan.py --write-config` writes for other trainers' files."""

from pathlib import Path

import pytest
from process_pool import pretrain, succeed
from training.runs import Runner

from megatron.commands import plan
from megatron.config.compare import compute_config_digest
from megatron.extras.interop.translators.translator import load_config

ROOT = Path(__file__).resolve().parents[2]

LLAMA3 = """#!/bin/bash
# In the style of Megatron-LM's examples for Llama 3.
CHECKPOINTS=${1:-checkpoints}
PROGRAM=/opt/megatron/pretrain_gpt.py
if [ ! -f "$PROGRAM" ]; then exit 1; fi
MODEL=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --rotary-base 500000
    --max-position-embeddings 8192 --position-embedding-type rope --swiglu
    --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear)
TRAINING=(--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125 --lr 0.00015
    --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --bf16
    --adam-beta1 0.9 --adam-beta2 0.95 --use-distributed-optimizer --wandb-project llama)
torchrun --nproc_per_node 8 "$PROGRAM" "${MODEL[@]}" "${TRAINING[@]}" --save $CHECKPOINTS \\
    --tokenizer-type Llama2Tokenizer --tokenizer-model $TOKENIZER --data-path $DATA
"""

FMS = """#!/bin/bash
ARGS="--model_variant=llama2_7b --seq_length=4096 --batch_size=2 --num_steps=1000 --use_wandb=False"
torchrun --nnodes=1 --nproc_per_node=8 main_training_llama.py ${ARGS} --ckpt_save_path=$OUT/ckpt
"""

NEOX = """# Pythia-160M in the format of GPT-NeoX, with the sizes of a test.
pipe_parallel_size: 0
model_parallel_size: 1
num_layers: 12
hidden_size: 768
num_attention_heads: 12
seq_length: 2048
max_position_embeddings: 2048
pos_emb: rotary
rotary_pct: 0.25
no_weight_tying: true
gpt_j_residual: true
init_method: small_init
output_layer_init_method: wang_init
optimizer: {type: Adam, params: {lr: 0.0006, betas: [0.9, 0.95], eps: 1.0e-8}}
min_lr: 0.00006
zero_optimization: {stage: 1}
train_micro_batch_size_per_gpu: 32
gradient_clipping: 1.0
weight_decay: 0.1
hidden_dropout: 0
attention_dropout: 0
train_iters: 143000
lr_decay_iters: 143000
lr_decay_style: cosine
warmup: 0.01
tokenizer_type: HFTokenizer
vocab_file: 20B_tokenizer.json
"""

SMALLER = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --num-query-groups 2 "
    "--ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 8 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--rampup-batch-size None --log-interval 1 --lr 2e-3 --train-iters 10 --train-samples None "
    "--lr-decay-samples None --lr-warmup-samples 0 --lr-warmup-iters 2 --lr-decay-iters 10 "
    "--lr-warmup-fraction None "
    "--vocab-size 5000 --tokenizer-type GPT2BPETokenizer --tokenizer-name-or-path None "
    "--pad-vocab-size-to None --train-weighted-split-paths-path None "
    "--valid-weighted-split-paths-path None --no-deepspeed --distributed-backend gloo "
    "--kill-switch-path None --tracker None --sharding-strategy None --zero-stage 1 "
    "--tensorboard-dir None --metrics-file None --codecarbon-dir None --eval-iters 0 "
    "--col-name text --eos-token None --datasets None --weights None --dataset-format None "
    "--strip-tokens None"
)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(FMS, id="fms-fsdp"),
        pytest.param(NEOX, id="gpt-neox"),
        pytest.param(LLAMA3, id="llama3", marks=pytest.mark.full),
        pytest.param("train/tr11-176B-ml/tr11-176B-ml.slurm", id="tr11", marks=pytest.mark.full),
    ],
)
def test_run_from_the_written_file(run: Runner, tmp_path: Path, capsys, script: str) -> None:
    path = tmp_path / ("pythia.yml" if script == NEOX else "run.sh")
    if script.endswith(".slurm"):
        script = (ROOT / script).read_text()
    path.write_text(script)
    file = tmp_path / "run.yaml"
    assert plan.main([str(path), "--write-config", str(file)]) == 0
    digest = compute_config_digest(load_config(["--config", str(file)]).config)
    assert f"has the digest {digest}." in capsys.readouterr().out
    folders = ["--save", str(run.folder), "--load", str(run.folder), "--data-path", run.data]
    succeed(run.pool.run(1, pretrain, ["--config", str(file), *SMALLER.split(), *folders]))
    assert run.losses_of_training() == list(range(1, 11))
    losses = run.losses()
    assert losses[10] < losses[1]
