"""Tests of what --context-parallel-size is refused with, and of other spellings of its flags."""

import pytest

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.step.deepspeed.kind import DEEPSPEED
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

RUN = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 6 --seq-length 96 --micro-batch-size 1 "
    "--global-batch-size 8 --lr 1e-3 --mock-data --vocab-size 100 --train-iters 10 "
    "--context-parallel-size 4"
)
CURRICULUM = (
    "--curriculum-schedule-type fixed_discrete --curriculum-difficulties 48 92 96 "
    "--curriculum-max-steps 4 6 --train-tokens 100000 --lr-decay-tokens 10000"
)


def plan(flags: str, processes: int = 8) -> Plan:
    return resolve(load_config(f"{RUN} {flags}".split()).config, processes)


def test_sequences_are_divided_before_the_batch() -> None:
    found = plan("--tensor-model-parallel-size 2", 16)
    assert found.errors == ()
    assert (found.data_parallel_size, found.weight_ranks, found.shard_size) == (2, 8, 8)
    assert found.config.parallel.length_unit == 8
    sharded = plan("--sharding-strategy hsdp --hsdp-shard-size 4")
    assert (sharded.copies, sharded.shard_size) == (2, 4)


@pytest.mark.parametrize(
    ("flags", "processes", "message"),
    [
        ("--seq-length 100", 8, "--seq-length 100 is no multiple of 8; use 96, or another size"),
        (
            "--seq-length 88 --tensor-model-parallel-size 3 --sequence-parallel",
            24,
            "is no multiple of 24; use 72",
        ),
        (CURRICULUM, 8, "but iteration 5 has 92; make the lengths and their steps multiples of 8"),
        ("--cp-comm-type a2a", 8, "use --cp-comm-type allgather"),
        ("", 6, "= 4 must divide the number of processes, 6; start 4 or 8 processes"),
        ("--use-varlen-attention --bf16 --reset-attention-mask", 8, "leave out --use-varlen"),
    ],
)
def test_what_does_not_fit_is_an_error_with_a_way_out(
    flags: str, processes: int, message: str
) -> None:
    assert any(message in error for error in plan(flags, processes).errors)


def test_deepspeed_is_refused() -> None:
    _, problem = DEEPSPEED.list_unsupported(plan("--deepspeed --softmax-type learnable"))
    assert problem == (
        "--softmax-type learnable was not compared with DeepSpeed's engine; remove --deepspeed"
    )
    (problem,) = DEEPSPEED.list_unsupported(plan("--deepspeed"))
    assert "--context-parallel-size 4" in problem
    assert "remove --deepspeed" in problem


@pytest.mark.parametrize(
    ("given", "kind"), [("p2p", "allgather"), ("all_gather", "allgather"), ("a2a", "a2a")]
)
def test_spellings_of_megatron(given: str, kind: str) -> None:
    loaded = load_config(f"{RUN} --cp-comm-type {given}".split())
    assert loaded.config.parallel.cp_comm_type == kind


@pytest.mark.parametrize("given", ["a2a+p2p", "a2a p2p", "nonsense"])
def test_other_kinds_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--cp-comm-type"):
        load_config(f"{RUN} --cp-comm-type {given}".split())


def test_megatrons_own_test_with_shared_sequences() -> None:
    """The arguments are those of gpt3_mcore_te_tp2_pp1_cp2_nondeterministic, without its paths."""
    arguments = (
        "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --log-params-norm "
        "--log-num-zeros-in-grad --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard "
        "--micro-batch-size 4 --global-batch-size 32 --seq-length 1024 "
        "--max-position-embeddings 1024 --train-iters 50 --timing-log-level 0 "
        "--lr-decay-iters 320000 --split 949,50,1 --distributed-backend nccl --lr 0.00015 "
        "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 "
        "--lr-warmup-fraction .01 --log-interval 1 --save-interval 10000 --eval-interval 1000 "
        "--eval-iters 10 --transformer-impl transformer_engine --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 1 --context-parallel-size 2 --sequence-parallel "
        "--hidden-dropout 0.0 --attention-dropout 0.0 --no-gradient-accumulation-fusion "
        "--attention-softmax-in-fp32 --use-mcore-models --ckpt-format torch_dist "
        "--dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness log_all --bf16 "
        "--attention-backend flash --log-memory-to-tensorboard --use-persistent-ckpt-worker"
    )
    loaded = load_config(f"{arguments} --data-path data --vocab-size 50257".split())
    found = resolve(loaded.config, 8, loaded.origin)
    assert found.errors == ()
    assert str(found.grid) == "pipeline 1 x data 2 x context 2 x tensor 2"
    assert found.shape.config.max_position_embeddings == 1024


def test_the_command_of_megatrons_parallelism_guide() -> None:
    """Llama 3 70B on 64 GPUs (docs/user-guide/parallelism-guide.md of NVIDIA/Megatron-LM)."""
    guide = (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--context-parallel-size 2 --num-layers 80 --hidden-size 8192 --num-attention-heads 64 "
        "--seq-length 8192 --micro-batch-size 1 --global-batch-size 512 --bf16"
    )
    loaded = load_config(guide.split())
    bare = resolve(loaded.config, 64, loaded.origin)
    length, rate = bare.errors
    assert "use --train-iters or --train-samples" in length
    assert "--lr is required" in rate
    (vocabulary,) = bare.warnings
    assert "give --vocab-size N for another size" in vocabulary
    # Completed as these messages say.
    loaded = load_config(
        f"{guide} --train-iters 1000 --lr 6e-5 --vocab-size 128256 --mock-data".split()
    )
    found = resolve(loaded.config, 64, loaded.origin)
    assert (found.errors, found.warnings) == ((), ())
    assert str(found.grid) == "pipeline 4 x data 2 x context 2 x tensor 4"
    assert found.layers_per_stage == (20, 20, 20, 20)
