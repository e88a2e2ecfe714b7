"""Known errors of trainers, as changes of this package in one process.

Each mutation is applied in a process that is forked for it. The source says where such an error
happened. The flags are those of the smallest run that has the feature.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from verify.context_mutations import CONTEXT_MUTATIONS
from verify.delta_net_mutations import DELTA_NET_MUTATIONS
from verify.dropout_mutations import DROPOUT_MUTATIONS
from verify.expert_mutations import EXPERT_MUTATIONS
from verify.float8_mutations import FLOAT8_MUTATIONS
from verify.hidden_mutations import HIDDEN_MUTATIONS
from verify.latent_mutations import LATENT_MUTATIONS
from verify.museum.museum_mutations import MUSEUM_MUTATIONS
from verify.mutation import MEGATRON, NO_DROPOUT, PP, SP, TP, Mutation, wrap
from verify.parametrization_mutations import PARAMETRIZATION_MUTATIONS
from verify.row_mutations import ROW_MUTATIONS
from verify.sink_mutations import SINK_MUTATIONS

# -- gradients of replicated and tied parameters ---------------------------------------------------


def leave_norm_gradients_partial() -> None:
    from megatron.engine import native

    wrap(
        native,
        "add_over_tensor_ranks",
        lambda add: lambda partial, replicated, tp: add([], replicated, tp),
    )


def leave_tied_gradients_apart() -> None:
    from megatron.engine.native import NativeEngine

    wrap(NativeEngine, "_add_tied_gradients", lambda _: lambda engine: None)


def leave_shared_groups_apart() -> None:
    from megatron.parallel import layers

    def make(build: Any) -> Any:
        def make_parameter(local_shape: Any, spec: Any) -> Any:
            if spec.rows_of is not None:
                spec = dataclasses.replace(spec, partial_gradient=False)
            return build(local_shape, spec)

        return make_parameter

    wrap(layers, "make_parameter", make)


def leave_inner_norms_apart() -> None:
    from megatron.model import norm

    wrap(norm, "make_replicated_inside_region", lambda _: norm.make_replicated_outside_region)


# -- gradient norm and clipping --------------------------------------------------------------------


def count_replicated_parameters_on_each_rank() -> None:
    from megatron.engine.native import NativeEngine

    def list_all(engine: Any) -> list[Any]:
        return [m for m in engine._masters if m.weight.numel() > 0 and m.spec.copy_of is None]

    wrap(NativeEngine, "_list_counted", lambda _: list_all)


def count_tied_copy() -> None:
    from megatron.engine.native import NativeEngine

    wrap(
        NativeEngine,
        "_list_counted",
        lambda listed: (
            lambda engine: [
                *listed(engine),
                *(m for m in engine._masters if m.spec.copy_of is not None),
            ]
        ),
    )


def omit_last_stage_in_norm() -> None:
    # The process that reads the samples has one stage. Without any norm, it ends with an error.
    _omit_in_norm(lambda mesh: mesh.coordinate.pipeline == mesh.grid.pipeline - 1 > 0)


def omit_second_shard_in_norm() -> None:
    _omit_in_norm(lambda mesh: mesh.sharding.rank == 1)


def _omit_in_norm(is_omitted: Callable[[Any], bool]) -> None:
    from megatron.engine.native import NativeEngine

    wrap(
        NativeEngine,
        "_list_counted",
        lambda listed: lambda engine: [] if is_omitted(engine._mesh) else listed(engine),
    )


def clip_by_norm_of_own_stage() -> None:
    from megatron.engine.native import NativeEngine
    from megatron.engine.optimizer import compute_squared_norm

    def make(reduce: Any) -> Any:
        def reduce_step(engine: Any, loss: Any, vote: Any) -> Any:
            terms = reduce(engine, loss, vote)
            own = [m.weight.grad for m in engine._list_counted()]
            terms[1] = compute_squared_norm(own)
            return terms

        return reduce_step

    wrap(NativeEngine, "_reduce_step", make)


def miss_overflow_of_another_stage() -> None:
    from megatron.engine.native import NativeEngine
    from megatron.engine.optimizer import compute_squared_norm

    def make(reduce: Any) -> Any:
        def reduce_step(engine: Any, loss: Any, vote: Any) -> Any:
            terms = reduce(engine, loss, vote)
            if not terms[1].isfinite():
                terms[1] = compute_squared_norm([m.weight.grad for m in engine._masters])
            return terms

        return reduce_step

    wrap(NativeEngine, "_reduce_step", make)


# -- loss ------------------------------------------------------------------------------------------


def sum_loss_over_tensor_ranks() -> None:
    from megatron.engine.native import NativeEngine

    wrap(
        NativeEngine,
        "_compute_loss_share",
        lambda share: lambda engine, loss: share(engine, loss) * engine._mesh.grid.tensor,
    )


def multiply_z_loss_by_tensor_size() -> None:
    from megatron.model import gpt

    def make(compute: Any) -> Any:
        def cross_entropy(*args: Any, z_loss: float, **kwargs: Any) -> Any:
            return compute(*args, z_loss=z_loss * args[4].size, **kwargs)

        return cross_entropy

    wrap(gpt, "cross_entropy", make)


def average_microbatches_of_unequal_counts() -> None:
    from megatron.plan.run_plan import Plan

    wrap(Plan, "counts_tokens_of_step", lambda _: lambda plan, training: False)


def count_tokens_of_own_rank() -> None:
    from megatron.engine import engine_base

    class Silent:
        """torch.distributed without its all-reduce."""

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, counted: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            # The share of this rank stands for the sum over all ranks.
            counted.mul_(dist.get_world_size())

    wrap(engine_base, "dist", lambda _: Silent())


def let_padding_take_part_in_softmax() -> None:
    from megatron.model import gpt

    wrap(
        gpt,
        "VocabSlice",
        lambda make: lambda first, real: make(first, -(-(first + real) // 8) * 8 - first),
    )


# -- tensor parallelism ----------------------------------------------------------------------------


def add_bias_on_each_rank() -> None:
    from megatron.parallel import layers

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layers.leave_tensor_parallel(layer._multiply(x, layer.bias), layer.tp)

    wrap(layers.RowParallelLinear, "forward", lambda _: forward)


def leave_input_gradient_partial() -> None:
    from megatron.parallel import collectives, entered_linear

    wrap(collectives._Copy, "backward", lambda _: lambda ctx, *grads: (grads[0], None))
    wrap(entered_linear, "begin_all_reduce", lambda _: _pass_on)


def _pass_on(x: torch.Tensor, tp: Any) -> Any:
    from megatron.parallel.collectives import PendingTensor

    return PendingTensor(x)


def restart_positions_on_slice() -> None:
    from megatron.model.embedding import Embedding

    def make(build: Any) -> Any:
        def build_embedding(module: Any, shape: Any, tp: Any, *args: Any, **kwargs: Any) -> None:
            build(module, shape, tp, *args, **kwargs)
            module.tp = dataclasses.replace(tp, rank=0)

        return build_embedding

    wrap(Embedding, "__init__", make)


def take_slopes_of_first_rank() -> None:
    from megatron.model.positions import PositionTables

    def make(build: Any) -> Any:
        def build_tables(tables: Any, shape: Any, tp: Any, *args: Any, **kwargs: Any) -> None:
            build(tables, shape, dataclasses.replace(tp, rank=0), *args, **kwargs)

        return build_tables

    wrap(PositionTables, "__init__", make)


def normalise_over_own_heads() -> None:
    from megatron.model import norm

    wrap(norm, "reduce_from_tensor_parallel", lambda _: lambda x, tp: x * tp.size)


# -- initialisation --------------------------------------------------------------------------------


def initialise_chunks_equally() -> None:
    def make(initialise: Any) -> Any:
        def initialise_by_chunk(name: str, *args: Any) -> None:
            head, *rest = name.split(".", 2)
            if head == "blocks":
                name = f"blocks.{int(rest[0]) % 2}.{rest[1]}"
            initialise(name, *args)

        return initialise_by_chunk

    _replace_initialise(make)


def initialise_without_depth() -> None:
    from megatron.parallel.parameter_spec import Init

    def make(initialise: Any) -> Any:
        def initialise_flat(name: str, kind: Init, *args: Any) -> None:
            initialise(name, Init.NORMAL if kind == Init.SCALED_NORMAL else kind, *args)

        return initialise_flat

    _replace_initialise(make)


def _replace_initialise(make: Callable[[Any], Any]) -> None:
    from megatron.engine.engine_base import EngineBase
    from megatron.model.init import initialise

    changed = make(initialise)

    def make_fill(fill: Any) -> Any:
        def fill_changed(engine: Any) -> None:
            engine._initialise = changed
            fill(engine)

        return fill_changed

    wrap(EngineBase, "_initialise_weights", make_fill)


# -- pipeline and data parallelism -----------------------------------------------------------------


def divide_by_microbatches_again() -> None:
    from megatron.engine import pipeline_runner

    for name in ("Schedule1F1B", "ScheduleGPipe"):
        wrap(
            pipeline_runner,
            name,
            lambda make: lambda *args, **kwargs: make(*args, **{**kwargs, "scale_grads": True}),
        )


def drop_reduction_of_a_microbatch() -> None:
    from megatron.engine import sharding

    calls = [0]

    def make(reduce: Any) -> Any:
        def reduce_but_one(hook: Any, **kwargs: Any) -> Any:
            work = reduce(hook, **kwargs)
            calls[0] += 1
            if calls[0] == 2:
                kwargs["output_tensor"].zero_()
            return work

        return reduce_but_one

    wrap(sharding._TimedReduceScatter, "__call__", make)


def average_over_all_ranks_twice() -> None:
    from megatron.engine import sharding

    def make(reduce: Any) -> Any:
        def reduce_by_world(hook: Any, **kwargs: Any) -> Any:
            work = reduce(hook, **kwargs)
            # The group has half of the data-parallel ranks, and the copies are averaged later.
            kwargs["output_tensor"].mul_(0.5)
            return work

        return reduce_by_world

    wrap(sharding._TimedReduceScatter, "__call__", make)


def leave_copies_apart() -> None:
    from megatron.engine import sharding

    wrap(sharding._CopyReduction, "__call__", lambda _: lambda hook, reduced: None)


def lose_last_microbatch() -> None:
    from megatron.engine.runner import SingleStageRunner

    wrap(
        SingleStageRunner,
        "run",
        lambda run: (
            lambda runner, inputs, factor, train: run(
                runner, [*inputs[:-1], inputs[0]], factor, train=train
            )
        ),
    )


def read_same_samples_on_all_ranks() -> None:
    from megatron.data import position_source

    wrap(
        position_source,
        "compute_sample_positions",
        lambda compute: lambda consumed, batch, rank, *rest: compute(consumed, batch, 0, *rest),
    )


# -- optimizer -------------------------------------------------------------------------------------


def orthogonalise_shards() -> None:
    from megatron.engine.muon import Muon, orthogonalise

    def update(muon: Any, matrices: Any, lr: float) -> None:
        for matrix in matrices:
            if matrix is None:
                continue
            config = muon._config
            piece = muon._advance_momentum(matrix)
            ortho = orthogonalise(piece, config.muon_num_ns_steps, config.muon_coefficient_type)
            matrix.master.weight.mul_(1.0 - lr * config.weight_decay)
            matrix.master.weight.addcmul_(ortho, matrix.scales, value=-lr)

    wrap(Muon, "_update", lambda _: update)


def decay_only_first_shard() -> None:
    from megatron.engine.optimizer import MasterParameter

    wrap(
        MasterParameter,
        "decays",
        lambda decays: property(lambda m: decays.fget(m) and not any(m.offset)),
    )


def rate_of_tied_copy() -> None:
    from megatron.engine.optimizer import MasterParameter

    wrap(
        MasterParameter,
        "decoupled",
        lambda decoupled: property(lambda m: decoupled.fget(m) and m.spec.copy_of is None),
    )


# -- data and resume -------------------------------------------------------------------------------


def shift_labels_of_short_samples() -> None:
    from megatron.data import position_source

    def make(split: Any) -> Any:
        def split_shifted(samples: Any, micro_batch_size: int) -> Any:
            microbatches = split(samples, micro_batch_size)
            if samples.shape[1] < 33:
                microbatches = [dataclasses.replace(m, labels=m.tokens) for m in microbatches]
            return microbatches

        return split_shifted

    wrap(position_source, "split_microbatches", make)


def keep_positions_across_documents() -> None:
    from megatron.data import documents

    wrap(
        documents,
        "make_position_ids",
        lambda _: lambda tokens, eod: torch.arange(tokens.shape[1]).expand(tokens.shape),
    )


def attend_across_documents() -> None:
    from megatron.data import documents

    wrap(
        documents,
        "find_document_bounds",
        lambda _: lambda tokens, eod: tuple((0, tokens.shape[1]) for _ in tokens),
    )


def forget_step_of_adam() -> None:
    from megatron.engine.engine_base import EngineBase

    wrap(
        EngineBase,
        "finish_load",
        lambda finish: (
            lambda engine, scalars: finish(engine, scalars and {**scalars, "optimizer_step": 0})
        ),
    )


def forget_moments() -> None:
    from megatron.engine.engine_base import EngineBase

    def make(finish: Any) -> Any:
        def finish_without(engine: Any, scalars: Any) -> None:
            finish(engine, scalars)
            engine._clear_moments()

        return finish_without

    wrap(EngineBase, "finish_load", make)


def read_samples_again() -> None:
    from megatron.data.position_source import PositionSource

    def make(read: Any) -> Any:
        def read_again(source: Any, batch_size: int, seq_length: Any = None) -> Any:
            # A resumed run begins with the last batch of the earlier launch.
            if source._consumed and not hasattr(source, "has_read"):
                source._consumed -= batch_size
                batch = read(source, batch_size, seq_length)
                source.has_read = True
                return batch
            source.has_read = True
            return read(source, batch_size, seq_length)

        return read_again

    wrap(PositionSource, "read_batch", make)


def restart_learning_rate() -> None:
    from megatron.run.state import TrainState

    wrap(
        TrainState,
        "from_json",
        lambda restore: lambda values: restore({**values, "lr_samples": 0, "lr_tokens": 0}),
    )


MUTATIONS = [
    Mutation(
        "gradients of norms are not summed under sequence parallelism",
        f"{MEGATRON}#1446",
        f"{SP} {NO_DROPOUT}",
        2,
        leave_norm_gradients_partial,
    ),
    Mutation(
        "gradients of a tied embedding are not summed between the stages",
        "uw-syfi/piper#13",
        f"{PP} {NO_DROPOUT}",
        2,
        leave_tied_gradients_apart,
    ),
    Mutation(
        "gradients of query groups that ranks share are not summed",
        "bigcode-project/Megatron-LM#37",
        f"{TP} --num-query-groups 1 {NO_DROPOUT}",
        2,
        leave_shared_groups_apart,
    ),
    Mutation(
        "gradients of a norm inside of attention are not summed",
        f"{MEGATRON}#7452",
        f"{TP} --qk-norm head {NO_DROPOUT}",
        2,
        leave_inner_norms_apart,
    ),
    Mutation(
        "the gradient norm counts replicated parameters on each tensor rank",
        "NVIDIA-NeMo/RL#3788",
        f"{TP} {NO_DROPOUT}",
        2,
        count_replicated_parameters_on_each_rank,
    ),
    Mutation(
        "the gradient norm counts each copy of the model",
        "ByteDance-Seed/VeOmni#862",
        f"--sharding-strategy ddp {NO_DROPOUT}",
        2,
        count_replicated_parameters_on_each_rank,
    ),
    Mutation(
        "the gradient norm counts a tied embedding twice",
        f"{MEGATRON}#7228",
        f"{PP} {NO_DROPOUT}",
        2,
        count_tied_copy,
    ),
    Mutation(
        "the gradient norm omits a stage",
        "deepspeedai/DeepSpeed#1252",
        f"{PP} {NO_DROPOUT}",
        2,
        omit_last_stage_in_norm,
    ),
    Mutation(
        "the gradient norm omits a shard",
        "Modalities/modalities#206",
        NO_DROPOUT,
        2,
        omit_second_shard_in_norm,
    ),
    Mutation(
        "each stage clips by its own gradient norm",
        "Modalities/modalities#206",
        f"{PP} {NO_DROPOUT}",
        2,
        clip_by_norm_of_own_stage,
    ),
    Mutation(
        "an overflow is not seen by another stage",
        "hpcaitech/ColossalAI#1175",
        f"{PP} --untie-embeddings-and-output-weights {NO_DROPOUT}",
        2,
        miss_overflow_of_another_stage,
        caught_by="overflow",
    ),
    Mutation(
        "the loss is summed over tensor ranks",
        "ByteDance-Seed/VeOmni#1079",
        f"{TP} {NO_DROPOUT}",
        2,
        sum_loss_over_tensor_ranks,
        caught_by="loss",
    ),
    Mutation(
        "the z-loss is summed over tensor ranks",
        "allenai/OLMo-core#264",
        f"{TP} --z-loss-coefficient 1e-3 {NO_DROPOUT}",
        2,
        multiply_z_loss_by_tensor_size,
        caught_by="loss",
    ),
    Mutation(
        "the loss is the mean of microbatches with unequal counts",
        "pytorch/torchtitan#2206",
        f"--eod-mask-loss {NO_DROPOUT}",
        1,
        average_microbatches_of_unequal_counts,
        documents=True,
        caught_by="loss",
    ),
    Mutation(
        "the loss is divided by the count of the rank's own tokens",
        "pytorch/torchtitan#2206",
        f"--eod-mask-loss {NO_DROPOUT}",
        2,
        count_tokens_of_own_rank,
        documents=True,
        caught_by="loss",
    ),
    Mutation(
        "padding of the vocabulary takes part in the softmax",
        "unslothai/unsloth#10616",
        NO_DROPOUT,
        1,
        let_padding_take_part_in_softmax,
        caught_by="loss",
    ),
    Mutation(
        "the bias of a row-parallel layer is added on each rank",
        "awslabs/slapo#10",
        f"{TP} {NO_DROPOUT}",
        2,
        add_bias_on_each_rank,
        caught_by="loss",
    ),
    Mutation(
        "the gradient of a column-parallel layer's input is not summed",
        "NovaSky-AI/SkyRL#1886",
        f"{TP} {NO_DROPOUT}",
        2,
        leave_input_gradient_partial,
        first="backward pass, gradient of the output of head.norm",
    ),
    Mutation(
        "learned positions restart on each slice of the sequence",
        "vllm-project/speculators#871",
        f"{SP} {NO_DROPOUT}",
        2,
        restart_positions_on_slice,
        caught_by="loss",
        first="forward pass, output of embedding on rank 1",
    ),
    Mutation(
        "each tensor rank has the ALiBi slopes of the first one",
        "bigscience-workshop/Megatron-DeepSpeed#227",
        f"{TP} --position-embedding-type alibi {NO_DROPOUT}",
        2,
        take_slopes_of_first_rank,
        caught_by="loss",
        first="forward pass, output of blocks.0.attention on rank 0",
    ),
    Mutation(
        "a norm over all heads is computed over those of the rank",
        "EleutherAI/gpt-neox#1424",
        f"{TP} --qk-norm full --normalization RMSNorm {NO_DROPOUT}",
        2,
        normalise_over_own_heads,
        caught_by="loss",
    ),
    Mutation(
        "interleaved stages start from equal weights",
        "pytorch/pytorch#139304",
        f"{PP} --num-layers-per-virtual-pipeline-stage 1 {NO_DROPOUT}",
        2,
        initialise_chunks_equally,
        caught_by="initial weights",
    ),
    Mutation(
        "the initialisation does not depend on the depth",
        "marian-nmt/marian-dev#861",
        NO_DROPOUT,
        1,
        initialise_without_depth,
        caught_by="initial weights",
    ),
    Mutation(
        "gradients are divided by the number of microbatches on each stage",
        "pytorch/torchtitan#1733",
        f"{PP} {NO_DROPOUT}",
        2,
        divide_by_microbatches_again,
    ),
    Mutation(
        "the reduction of one microbatch is lost",
        "pytorch/pytorch#125484",
        f"--zero-stage 2 {NO_DROPOUT}",
        2,
        drop_reduction_of_a_microbatch,
    ),
    Mutation(
        "gradients of a shard are averaged over all data-parallel ranks",
        f"{MEGATRON}#5956",
        f"--sharding-strategy hsdp --hsdp-shard-size 2 {NO_DROPOUT}",
        4,
        average_over_all_ranks_twice,
    ),
    Mutation(
        "gradients are not averaged over the copies",
        "verl-project/verl#7493",
        f"--sharding-strategy ddp {NO_DROPOUT}",
        2,
        leave_copies_apart,
    ),
    Mutation(
        "the last microbatch is replaced by the first one",
        "NVIDIA-NeMo/Automodel#3530",
        NO_DROPOUT,
        1,
        lose_last_microbatch,
        caught_by="loss",
    ),
    Mutation(
        "all data-parallel ranks read the same samples",
        "karpathy/build-nanogpt#26",
        NO_DROPOUT,
        2,
        read_same_samples_on_all_ranks,
        caught_by="samples",
    ),
    Mutation(
        "Muon orthogonalises each shard",
        "deepspeedai/DeepSpeed#8437",
        f"{TP} --optimizer muon {NO_DROPOUT}",
        2,
        orthogonalise_shards,
        caught_by="weights",
    ),
    Mutation(
        "weight decay is missing on some ranks",
        "verl-project/verl#7215",
        f"{TP} {NO_DROPOUT}",
        2,
        decay_only_first_shard,
        caught_by="weights",
    ),
    Mutation(
        "the copy of a tied embedding has another learning rate",
        "unslothai/unsloth-zoo#932",
        f"{PP} --decoupled-lr 3e-3 {NO_DROPOUT}",
        2,
        rate_of_tied_copy,
        caught_by="weights",
    ),
    Mutation(
        "labels of a curriculum's short samples are shifted",
        "okoge-kaz/llm-recipes#5",
        f"--curriculum-schedule-type fixed_linear --curriculum-min-difficulty 16 "
        f"--curriculum-total-step 20 --train-tokens 100000 --lr-decay-tokens 90000 {NO_DROPOUT}",
        1,
        shift_labels_of_short_samples,
        caught_by="labels, masks and positions",
    ),
    Mutation(
        "positions do not restart at a new document",
        f"{MEGATRON}#453",
        f"--reset-position-ids {NO_DROPOUT}",
        1,
        keep_positions_across_documents,
        documents=True,
        caught_by="labels, masks and positions",
    ),
    Mutation(
        "attention reaches into the document before",
        f"{MEGATRON}#2357",
        f"--reset-attention-mask {NO_DROPOUT}",
        1,
        attend_across_documents,
        documents=True,
        caught_by="labels, masks and positions",
    ),
    Mutation(
        "the step of Adam is not restored",
        "TrenTorch/TrenTorch#187",
        NO_DROPOUT,
        1,
        forget_step_of_adam,
        caught_by="step count",
    ),
    Mutation(
        "the moments are not restored",
        "NVIDIA-NeMo/Automodel#763",
        NO_DROPOUT,
        1,
        forget_moments,
        caught_by="state after the resume",
    ),
    Mutation(
        "samples are read twice after a resume",
        "modelscope/ms-swift#10050",
        NO_DROPOUT,
        1,
        read_samples_again,
        caught_by="samples",
    ),
    Mutation(
        "the learning rate restarts after a resume",
        "NVIDIA-NeMo/Automodel#763",
        NO_DROPOUT,
        1,
        restart_learning_rate,
        caught_by="learning rate",
    ),
    *CONTEXT_MUTATIONS,
    *DROPOUT_MUTATIONS,
    *PARAMETRIZATION_MUTATIONS,
    *EXPERT_MUTATIONS,
    *FLOAT8_MUTATIONS,
    *HIDDEN_MUTATIONS,
    *SINK_MUTATIONS,
    *LATENT_MUTATIONS,
    *DELTA_NET_MUTATIONS,
    *MUSEUM_MUTATIONS,
    *ROW_MUTATIONS,
]
