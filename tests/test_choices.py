"""Every choice of a setting has an implementation, and an unknown one is an error.

A value that is added to a `Literal` and nowhere else must not get the behaviour of another value.
"""

import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model.builders import build, tiny_config
from test_plan import with_changes

from megatron.base.errors import ConfigError
from megatron.config.data import TokenizerConfig
from megatron.config.fields import all_fields
from megatron.config.loss import LossConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import EXCHANGES_HEADS, IS_WATCHED, STRATEGY_STAGES
from megatron.config.spike_guard import SpikeGuardConfig
from megatron.engine import muon
from megatron.engine.native import build_optimizer
from megatron.engine.optimizer import MOMENT_DTYPES
from megatron.engine.sharding import STAGES
from megatron.extras.inference.generate.cached_model import TokenPositions
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.layout import TRAINER, RankLayout
from megatron.extras.planner.cost.tensors import TensorCase, measure_tensors
from megatron.extras.samples.kinds import SOURCE_KINDS
from megatron.extras.step.float8.recipe import GRADIENTS, ROWWISE
from megatron.extras.watch.replay import EXCLUDES
from megatron.extras.watch.trackers.trackers import TRACKERS
from megatron.model import flops
from megatron.model.attention_kernels import use_attention_kernels
from megatron.model.execution import Execution
from megatron.model.experts.routing import choose_experts, get_span
from megatron.model.fused_operators import FusedOperators
from megatron.model.norm import describe_norm
from megatron.model.shape import ModelShape
from megatron.observe.log_line import LINE_FORMATS
from megatron.parallel.mesh import TensorParallel
from megatron.plan.kernel_choice import KernelDevice, choose_kernels
from megatron.plan.resolve import resolve
from megatron.plan.rules.data import check_tokenizer_files
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.vocabulary import count_token_ids, find_tokenizer_files


def find_choices() -> dict[str, tuple[Any, ...]]:
    """Return the choices of each field of the configuration whose type has a `Literal`."""

    def find(annotation: Any) -> list[Any]:
        if typing.get_origin(annotation) is typing.Literal:
            return list(typing.get_args(annotation))
        return [each for part in typing.get_args(annotation) for each in find(part)]

    found = {dotted: tuple(find(field.annotation)) for dotted, field in all_fields().items()}
    return {dotted: choices for dotted, choices in found.items() if choices}


CHOICES = find_choices()


def use_model(field: str, **changes: Any) -> Callable[[Any], object]:
    """Return a function that computes logits with a value, and initialises the weights."""

    def use(value: Any) -> torch.Tensor:
        model = build(tiny_config(**(changes | {field: value})))
        return model.compute_logits(torch.zeros((1, 4), dtype=torch.long))

    return use


def use_shape(use: Callable[[ModelShape], object], field: str, **changes: Any) -> Any:
    """Return a function that passes the sizes of a model with a value."""
    return lambda value: use(ModelShape(tiny_config(**(changes | {field: value})), 128, 128))


def make_token_positions(shape: ModelShape) -> TokenPositions:
    return TokenPositions(shape, TensorParallel(), torch.tensor([3]), 4, torch.float32)


def measure_activations(shape: ModelShape) -> object:
    return measure_tensors(TensorCase(shape, RankLayout(), TRAINER, True, True))


def use_tokenizer(use: Callable[[TokenizerConfig], object]) -> Callable[[Any], object]:
    """Return a function that passes a tokenizer without files."""

    def call(value: Any) -> None:
        try:
            use(TokenizerConfig(tokenizer_type=value))
        except ConfigError:
            # Each type says that its files are missing.
            assert use is build_tokenizer

    return call


def use_schedule(field: str, done: int, **changes: Any) -> Callable[[Any], object]:
    """Return a function that computes a learning rate with a value."""
    settings: dict[str, Any] = {
        "max_lr": 1.0,
        "min_lr": 0.0,
        "style": "WSD",
        "warmup_steps": 10,
        "decay_steps": 100,
        "wsd_decay_steps": 50,
    }
    return lambda value: LRSchedule(**(settings | changes | {field: value})).get_lr(done)


def use_curriculum(value: Any) -> object:
    lists = {"difficulties": (8, 16), "max_steps": (5,)} if value == "fixed_discrete" else {}
    made = Curriculum(
        value, 8, 16, total_curriculum_step=10, difficulty_step=8, root_degree=2, **lists
    )
    return made.get_seq_length(5), str(made)


def use_optimizer(value: Any) -> object:
    plan = resolve(with_changes(optimizer={"optimizer": value}), 1)
    mesh = types.SimpleNamespace(
        build_stage_group=lambda: None,
        sharding=types.SimpleNamespace(rank=0, size=1),
        grid=types.SimpleNamespace(tensor=1),
        coordinate=types.SimpleNamespace(tensor=0),
    )
    return build_optimizer([], plan, typing.cast(Any, mesh), FusedOperators())


def use_kernels(value: Any) -> object:
    config = with_changes(kernels={"attention_backend": (value,)})
    return use_attention_kernels(
        Execution.from_config(config, dynamic_shapes=False).attention_kernels
    )


def use_state_bytes(field: str) -> Callable[[Any], object]:
    return lambda value: flops.count_state_bytes(OptimizerConfig(**{field: value}), 4, 2)


def use_muon(use: Callable[[OptimizerConfig], object], field: str) -> Callable[[Any], object]:
    return lambda value: use(OptimizerConfig(**{field: value}))


USES: dict[str, list[Callable[[Any], object]]] = {
    "model.position_embedding_type": [
        use_model("position_embedding_type"),
        use_shape(flops.count_parameters, "position_embedding_type"),
        use_shape(make_token_positions, "position_embedding_type"),
    ],
    "model.rope_scaling": [use_model("rope_scaling", position_embedding_type="rotary")],
    "model.normalization": [
        use_model("normalization"),
        use_shape(flops.count_parameters, "normalization"),
        use_shape(measure_activations, "normalization"),
        use_shape(lambda shape: describe_norm(shape.config, "cuda"), "normalization"),
        use_shape(lambda shape: describe_norm(shape.config, "cpu"), "normalization"),
    ],
    "model.norm_placement": [
        use_model("norm_placement"),
        use_shape(measure_activations, "norm_placement"),
    ],
    "model.parametrization": [
        use_shape(
            lambda shape: (shape.width_ratio, shape.depth_ratio),
            "parametrization",
            base_width=8,
            base_depth=1,
        )
    ],
    "model.moe_router_score_function": [use_model("moe_router_score_function", num_experts=4)],
    "loss.moe_router_load_balancing_type": [
        lambda value: get_span(LossConfig(moe_router_load_balancing_type=value))
    ],
    "model.qk_norm": [
        use_model("qk_norm", normalization="RMSNorm"),
        use_shape(flops.count_parameters, "qk_norm", normalization="RMSNorm"),
        use_shape(measure_activations, "qk_norm", normalization="RMSNorm"),
    ],
    "model.glu_activation": [
        use_model("glu_activation"),
        use_shape(measure_activations, "glu_activation"),
    ],
    "model.moe_router_group_score": [
        lambda value: choose_experts(
            torch.zeros(2, 4),
            tiny_config(
                num_experts=4,
                moe_router_num_groups=2,
                moe_router_group_topk=1,
                moe_router_group_score=value,
            ),
        )
    ],
    "model.softmax_type": [use_model("softmax_type")],
    "model.experimental_attention_variant": [
        use_model("experimental_attention_variant", linear_attention_freq="2")
    ],
    "model.linear_norm_placement": [
        use_model(
            "linear_norm_placement",
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq="2",
        )
    ],
    "model.linear_time_step": [
        use_model(
            "linear_time_step",
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq="2",
        )
    ],
    "model.activation": [
        use_model("activation"),
        use_shape(flops.count_parameters, "activation"),
        use_shape(measure_activations, "activation"),
    ],
    "model.init_method_std": [use_model("init_method_std")],
    "model.output_init_method_std": [use_model("output_init_method_std")],
    "kernels.attention_backend": [use_kernels],
    "curriculum.curriculum_schedule_type": [use_curriculum],
    "optimizer.optimizer": [use_optimizer, use_state_bytes("optimizer")],
    "optimizer.exp_avg_dtype": [
        lambda value: MOMENT_DTYPES[value],
        use_state_bytes("exp_avg_dtype"),
    ],
    "optimizer.exp_avg_sq_dtype": [
        lambda value: MOMENT_DTYPES[value],
        use_state_bytes("exp_avg_sq_dtype"),
    ],
    "optimizer.lr_decay_style": [use_schedule("style", 20)],
    "optimizer.lr_warmup_style": [use_schedule("warmup_style", 5)],
    "optimizer.lr_wsd_decay_style": [use_schedule("wsd_decay_style", 80)],
    "optimizer.muon_scale_mode": [
        use_muon(lambda config: muon.compute_scale(4, 2, config), "muon_scale_mode")
    ],
    "optimizer.muon_coefficient_type": [lambda value: muon.orthogonalise(torch.eye(2), 1, value)],
    "optimizer.muon_fp32_matmul_prec": [
        use_muon(
            lambda config: muon.choose_precision(config, in_fp32=True), "muon_fp32_matmul_prec"
        )
    ],
    "guard.spike_guard": [lambda value: SpikeGuardConfig(spike_guard=value).drops_steps],
    "guard.spike_guard_signals": [
        lambda value: SpikeGuardConfig(spike_guard_signals=value).watches_gradient_norm
    ],
    "data.dataset_format": [lambda value: SOURCE_KINDS[value]],
    "tokenizer.tokenizer_type": [
        *(use_tokenizer(use) for use in (build_tokenizer, find_tokenizer_files, count_token_ids)),
        lambda value: TokenizerConfig(tokenizer_type=value).has_two_files,
        lambda value: list(
            check_tokenizer_files(
                TokenizerConfig(tokenizer_type=value, tokenizer_name_or_path="/no/folder")
            )
        ),
    ],
    "parallel.zero_stage": [lambda value: STAGES[value]],
    "parallel.hang_timeout": [lambda value: IS_WATCHED[value]],
    "parallel.cp_comm_type": [lambda value: EXCHANGES_HEADS[value]],
    "parallel.sharding_strategy": [
        lambda value: STRATEGY_STAGES[value],
        lambda value: resolve(with_changes(parallel={"sharding_strategy": value}), 1),
    ],
    "kernels.cuda_graph": [
        lambda value: choose_kernels(
            resolve(with_changes(kernels={"cuda_graph": value}), 1), KernelDevice("9.0")
        )
    ],
    "parallel.replay_action": [lambda value: EXCLUDES[value]],
    "precision.fp8_format": [lambda value: GRADIENTS[value]],
    "precision.fp8_recipe": [lambda value: ROWWISE[value]],
    "logging.log_format": [lambda value: LINE_FORMATS[value]],
    "logging.tracker": [lambda value: TRACKERS[value]],
    "loss.loss_mean": [
        lambda value: resolve(with_changes(loss={"loss_mean": value}), 1).counts_tokens_of_step(
            training=True
        ),
        lambda value: resolve(
            with_changes(loss={"loss_mean": value, "goldfish_loss": True}), 1
        ).describe_loss_mean(),
    ],
}
"""Field -> what is computed with its value."""
NOT_USED = {
    # Each value saves nothing. One of them also changes the loaded weights.
    "checkpoint.rehearsal",
    # All data files are mapped.
    "data.data_impl",
    # The name is passed to torch, which refuses an unknown one.
    "parallel.distributed_backend",
}


@pytest.mark.parametrize("dotted", CHOICES)
def test_every_choice_is_implemented_and_an_unknown_one_raises(dotted: str) -> None:
    assert (dotted in USES) != (dotted in NOT_USED), "a new choice needs a row in USES"
    for use in USES.get(dotted, []):
        for choice in CHOICES[dotted]:
            use(choice)
        # The errors of a missing key, of `assert_never` and of a curriculum.
        with pytest.raises((KeyError, AssertionError, ConfigError), match="unknown"):
            use("unknown")


@pytest.mark.parametrize("dotted", CHOICES)
def test_the_command_line_refuses_an_unknown_choice(dotted: str) -> None:
    flag = all_fields()[dotted].flag
    with pytest.raises(ConfigError, match=f"{flag} unknown.* must be .*{CHOICES[dotted][-1]}"):
        load_config([flag, "unknown"])
