"""Writers of Megatron's checkpoint layouts, for tests.

They are written after the published sources: bigscience-workshop/Megatron-DeepSpeed
(megatron/checkpointing.py, megatron/model/gpt_model.py), NVIDIA/Megatron-LM
(megatron/training/checkpointing.py) and DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py,
checkpoint/ds_to_universal.py). They are no output of these programs. The tests with output of
DeepSpeed and of Megatron core are in test_from_megatron_real.py.
"""

import argparse
import enum
import io
import pickle
import random
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import collect_digests
from megatron.checkpoint.tensor_file import TensorReader
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.megatron_names import list_megatron_tensors
from megatron.model.shape import ModelShape

KINDS = ("weight", "exp_avg", "exp_avg_sq")
LEGACY = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.in": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
CORE = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "post_attention_norm": "pre_mlp_layernorm",
    "mlp.in": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
OUTSIDE = {
    "embedding.word.weight": "word_embeddings.weight",
    "embedding.position": "position_embeddings.weight",
    "embedding.norm.weight": "word_embeddings.norm.weight",
    "embedding.norm.bias": "word_embeddings.norm.bias",
}


@dataclass(frozen=True)
class Saved:
    """The state of a checkpoint of this trainer, as complete tensors."""

    model: ModelConfig
    vocab_size: int
    tensors: dict[tuple[str, str], Tensor]
    """(kind, our name) -> tensor."""
    state: dict[str, Any]
    steps: int
    args: dict[str, Any]


def read_tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], Tensor]:
    """Return all tensors of a checkpoint: (kind, our name) -> tensor."""
    index = checkpoint.read_index()
    tensors = {}
    with TensorReader(checkpoint.folder, collect_digests(checkpoint.manifest, index)) as reader:
        for key, entry in index.tensors.items():
            tensor = torch.empty(entry["shape"])
            whole = ((0,) * tensor.dim(), tuple(entry["shape"]))
            reader.read_into(tensor, whole, entry, key)
            kind, _, name = key.partition("/")
            tensors[kind, name] = tensor
    return tensors


def read_saved(checkpoint: Checkpoint, **args: Any) -> Saved:
    """Read a checkpoint of this trainer completely.

    Args:
        checkpoint: The checkpoint.
        args: Further arguments of its run.
    """
    config = checkpoint.read_config()
    tensors = read_tensors(checkpoint)
    vocab_size = len(tensors["weight", "embedding.word.weight"])
    assert checkpoint.optimizer is not None
    return Saved(
        config.model,
        vocab_size,
        tensors,
        checkpoint.state,
        checkpoint.optimizer["optimizer_step"],
        describe_run(config, checkpoint.state) | args,
    )


def describe_run(config: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that Megatron would have saved for a run of this trainer."""
    model, batch, optimizer = config.model, config.batch, config.optimizer
    shape = ModelShape(model, 0, 0)
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": shape.head_dim,
        "seq_length": model.seq_length,
        "encoder_seq_length": model.seq_length,
        "max_position_embeddings": shape.position_table_size or model.seq_length,
        "layernorm_epsilon": model.layernorm_epsilon,
        "init_method_std": model.init_method_std,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "bias_gelu_fusion": model.bias_gelu_fusion,
        "openai_gelu": False,
        "num_experts": None,
        "micro_batch_size": batch.micro_batch_size,
        "global_batch_size": batch.global_batch_size,
        "rampup_batch_size": None,
        "train_iters": batch.train_iters,
        "train_samples": None,
        "seed": batch.seed,
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_iters": optimizer.lr_decay_iters,
        "lr_decay_samples": None,
        "lr_warmup_iters": optimizer.lr_warmup_iters or 0,
        "lr_warmup_samples": 0,
        "lr_warmup_fraction": None,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_eps": optimizer.adam_eps,
        "clip_grad": optimizer.clip_grad,
        "fp16": False,
        "bf16": False,
        "params_dtype": torch.float32,
        "eval_interval": 1000,
        "eval_iters": 0,
        "save_interval": 2,
        "tokenizer_type": "GPT2BPETokenizer",
        "make_vocab_size_divisible_by": 128,
        "distributed_backend": "nccl",
        "rank": 0,
        "consumed_train_samples": state["consumed_samples"],
        "consumed_valid_samples": state["consumed_valid_samples"],
    }


def describe_scheduler(saved: Saved, style: str, warmup: str, decay: str) -> dict[str, Any]:
    """Return the state of the learning-rate scheduler, whose keys differ between versions."""
    schedule = saved.state["lr_schedule"]
    return {
        "max_lr": schedule["max_lr"],
        "min_lr": schedule["min_lr"],
        "num_steps": saved.state["lr_samples"],
        style: schedule["style"],
        warmup: schedule["warmup_steps"],
        decay: schedule["decay_steps"],
    }


def pad(rows: Tensor, multiple: int) -> Tensor:
    """Return a matrix with rows of padding, which is no zero, so that a test finds it."""
    missing = -len(rows) % multiple
    return torch.cat((rows, torch.full((missing, *rows.shape[1:]), 7.0)))


def order_qkv(rows: Tensor, heads: int, version: float) -> Tensor:
    """Return one rank's rows in the order of a checkpoint version."""
    if version >= 2:
        return rows
    by_head = rows.unflatten(0, (heads, 3, -1))
    if version == 1:
        return by_head.transpose(1, 2).flatten(0, 2).contiguous()
    return by_head.transpose(0, 1).flatten(0, 2).contiguous()


def list_slices(
    saved: Saved, kind: str, tp: int, version: float = 3.0, first: str = "gate"
) -> dict[tuple[int | None, str], list[Tensor]]:
    """Return the slices of all tensors, by layer and name within it."""
    shape = ModelShape(saved.model, saved.vocab_size, saved.vocab_size)
    found: dict[tuple[int | None, str], list[Tensor]] = {}
    for each in list_megatron_tensors(shape):
        if (each.layer, each.name) in found:
            continue
        tensor = saved.tensors[kind, each.parameter]
        if each.name in ("embedding.word.weight", "head.weight"):
            slices = list(pad(tensor, 128 * tp).chunk(tp))
        elif each.name.startswith("attention.qkv"):
            heads = shape.query_groups // tp
            slices = [order_qkv(part, heads, version) for part in tensor.chunk(tp)]
        elif each.name.startswith("mlp.in") and saved.model.glu_activation:
            second = {"gate": "up", "up": "gate"}[first]
            leaf = each.name.rpartition(".")[2]
            halves = [
                saved.tensors[kind, f"blocks.{each.layer}.mlp.{name}.{leaf}"].chunk(tp)
                for name in (first, second)
            ]
            slices = [torch.cat(pair) for pair in zip(*halves, strict=True)]
        elif each.name.startswith("mlp.in"):
            slices = list(tensor.chunk(tp))
        elif each.name in ("attention.out.weight", "mlp.down.weight"):
            slices = list(tensor.chunk(tp, dim=1))
        else:
            slices = [tensor] * tp
        found[each.layer, each.name] = [part.clone() for part in slices]
    return found


def in_layer(name: str, names: dict[str, str]) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{names[module]}.{leaf}"


class PositionEmbeddingType(enum.Enum):
    rotary = 1
    absolute = 2
    alibi = 3


class fragment_address:  # noqa: N801 - the name that DeepSpeed pickles
    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


class TokenizerConfig:
    """A class of Megatron-LM, whose objects its checkpoints may contain."""


_CLASSES: dict[str, tuple[type, ...]] = {
    "megatron.enums": (PositionEmbeddingType,),
    "megatron.training.config": (TokenizerConfig,),
    "deepspeed": (),
    "deepspeed.utils": (),
    "deepspeed.utils.tensor_fragment": (fragment_address,),
}


@contextmanager
def their_modules() -> Iterator[None]:
    """Make their classes importable while a file is written, as in their programs."""
    before = {name: sys.modules.get(name) for name in _CLASSES}
    for name, classes in _CLASSES.items():
        sys.modules[name] = types.ModuleType(name)
        for each in classes:
            each.__module__ = name
            setattr(sys.modules[name], each.__name__, each)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def make_client_state(saved: Saved, tp: int, pp: int, version: float) -> dict[str, Any]:
    """Return what save_checkpoint of Megatron stores beside the model."""
    args = argparse.Namespace(
        **saved.args, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    return {
        "args": args,
        "checkpoint_version": version,
        "iteration": saved.state["iteration"],
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }


def write_megatron_deepspeed(
    root: Path,
    saved: Saved,
    tp: int,
    pp: int,
    *,
    dp: int = 0,
    prefix: str = "",
    dtype: torch.dtype = torch.float32,
    universal: bool = False,
) -> Path:
    """Write a checkpoint of BigScience's Megatron-DeepSpeed with its pipeline.

    Args:
        root: Folder of the checkpoints.
        saved: The state.
        tp: Tensor-parallel ranks.
        pp: Stages.
        dp: Data-parallel ranks with partitions of ZeRO 1. 0: without optimizer states.
        prefix: Prefix of the optimizer files.
        dtype: Dtype of the weights in the layer files.
        universal: Write a universal checkpoint instead.
    """
    position = PositionEmbeddingType[saved.model.position_embedding_type]
    args = {
        "position_embedding_type": position,
        "glu_activation": saved.model.glu_activation,
        "embed_layernorm": saved.model.embed_layernorm,
        "consumed_train_tokens": saved.state["consumed_tokens"],
        "gigaflos_no_embeds": 1.5,
        "skip_train_iteration_range": None,
        "deepspeed": True,
    }
    saved = Saved(**{**vars(saved), "args": saved.args | args})
    iteration = saved.state["iteration"]
    layers = saved.model.num_layers
    folder = root / f"global_step{iteration}{'_universal' if universal else ''}"
    folder.mkdir(parents=True)
    (root / ("latest_universal" if universal else "latest")).write_text(folder.name)
    modules = {kind: _number_modules(saved, kind, tp) for kind in KINDS}
    if universal:
        _write_universal(folder, saved, {kind: _number_modules(saved, kind, 1) for kind in KINDS})
    else:
        for number, module in modules["weight"].items():
            for rank in range(tp):
                path = folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
                content = {name: slices[rank].to(dtype) for name, slices in module.items()}
                torch.save(OrderedDict(content), path)
    stages = [[n for n in modules["weight"] if _find_stage(n, layers, pp) == s] for s in range(pp)]
    for stage in range(pp):
        for rank in range(tp):
            flat = {
                kind: _name_parameters(modules[kind], stages[stage], rank, tied=stage == pp - 1)
                for kind in KINDS
            }
            shapes = [OrderedDict((name, t.shape) for name, t in flat["weight"].items())]
            number = stage * tp + rank
            with their_modules():
                torch.save(
                    {
                        "module": None,
                        "optimizer": None,
                        "param_shapes": shapes,
                        "dp_world_size": dp or 1,
                        "lr_scheduler": describe_scheduler(
                            saved, "decay_style", "warmup_steps", "decay_steps"
                        )
                        | {
                            "num_tokens": saved.state["lr_tokens"],
                            "warmup_tokens": saved.state["warmup_tokens"],
                        },
                        "tokens": saved.state["consumed_tokens"],
                        "checkpoint_info": {"original_vocab_size": saved.vocab_size},
                        **make_client_state(saved, tp, pp, 3.0),
                    },
                    folder / f"mp_rank_{number:02d}_model_states.pt",
                )
            if not universal:
                _write_partitions(folder, number, flat, dp, prefix, saved.steps)
    return folder


def _find_stage(number: int, layers: int, pp: int) -> int:
    if number < 3:
        return 0
    return min((number - 3) // (layers // pp), pp - 1)


def _number_modules(saved: Saved, kind: str, tp: int) -> dict[int, dict[str, list[Tensor]]]:
    """Return the modules of the pipeline: the number of each, and its tensors."""
    modules: dict[int, dict[str, list[Tensor]]] = {}
    last = saved.model.num_layers + 4
    first = "up" if saved.model.glu_activation else "gate"
    for (layer, name), slices in list_slices(saved, kind, tp, first=first).items():
        if layer is not None:
            number, theirs = layer + 3, in_layer(name, LEGACY)
        elif name.startswith("head.norm"):
            number, theirs = last, name.rpartition(".")[2]
        else:
            number, theirs = 1, OUTSIDE[name]
        modules.setdefault(number, {})[theirs] = slices
    return modules


def _name_parameters(
    modules: dict[int, dict[str, list[Tensor]]], numbers: list[int], rank: int, *, tied: bool
) -> dict[str, Tensor]:
    """Return the parameters of one rank as DeepSpeed names them."""
    found = {
        (f"tied_modules.embed.{name}" if number == 1 else f"{number}.{name}"): slices[rank]
        for number in numbers
        for name, slices in modules[number].items()
    }
    if tied:
        found |= {f"tied_modules.embed.{name}": s[rank] for name, s in modules[1].items()}
    return found


def _write_partitions(
    folder: Path,
    rank: int,
    flat: dict[str, dict[str, Tensor]],
    dp: int,
    prefix: str,
    steps: int,
) -> None:
    """Write the optimizer files of one model-parallel rank.

    As in BigScience's runs, matrices and the rest are two groups. Each is padded so that the
    partitions begin at even addresses.
    """
    if dp == 0:
        return
    names = list(flat["weight"])
    groups = [
        [name for name in names if flat["weight"][name].dim() > 1],
        [name for name in names if flat["weight"][name].dim() == 1],
    ]
    for data_rank in range(dp):
        partitions: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        mappings = []
        for group in groups:
            total = sum(flat["weight"][name].numel() for name in group)
            size = -(-total // (2 * dp)) * 2
            begin = data_rank * size
            for kind in KINDS:
                whole = torch.cat([flat[kind][name].flatten() for name in group])
                padded = torch.cat((whole, torch.full((dp * size - total,), 9.0)))
                partitions[kind].append(padded[begin : begin + size].clone())
            mapping = OrderedDict()
            at = 0
            for name in group:
                numel = flat["weight"][name].numel()
                low, high = max(at, begin), min(at + numel, begin + size)
                if low < high:
                    mapping[name] = fragment_address(high - low, low - begin)
                at += numel
            mappings.append(mapping)
        path = folder / f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{rank:02d}_optim_states.pt"
        content = {
            "optimizer_state_dict": {
                "base_optimizer_state": {
                    "state": {
                        index: {kind: partitions[kind][index] for kind in KINDS[1:]}
                        for index in range(len(groups))
                    },
                    "param_groups": [{"lr": 1e-3, "step": steps} for _ in groups],
                },
                "single_partition_of_fp32_groups": partitions["weight"],
                "param_slice_mappings": mappings,
                "zero_stage": 1,
            },
            "ds_version": "0.19.8",
        }
        with their_modules():
            torch.save(content, path)


def _write_universal(
    folder: Path, saved: Saved, modules: dict[str, dict[int, dict[str, list[Tensor]]]]
) -> None:
    """Write zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt."""
    for kind, file in zip(KINDS, ("fp32", "exp_avg", "exp_avg_sq"), strict=True):
        numbers = list(modules[kind])
        for name, tensor in _name_parameters(modules[kind], numbers, 0, tied=False).items():
            target = folder / "zero" / name
            target.mkdir(parents=True, exist_ok=True)
            content = {"param": tensor, "cat_dim": 0}
            if saved.model.glu_activation and "dense_h_to_4h" in name:
                # ds_to_universal.py joins the first halves of the ranks, and then the second ones.
                content["param_n_sub_params"] = 2
            torch.save(content, target / f"{file}.pt")
            torch.save(saved.steps, target / "step.pt")


def write_megatron_lm(
    root: Path,
    saved: Saved,
    tp: int,
    pp: int,
    *,
    core: bool,
    version: float = 3.0,
    virtual: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write `iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt`.

    Args:
        root: Folder of the checkpoints.
        saved: The state.
        tp: Tensor-parallel ranks.
        pp: Stages.
        core: Use the names of Megatron core.
        version: checkpoint_version.
        virtual: Virtual stages of each rank.
        dtype: Dtype of the weights.
    """
    saved = Saved(**{**vars(saved), "args": saved.args | describe_llama(saved.model)})
    folder = root / f"iter_{saved.state['iteration']:07d}"
    slices = list_slices(saved, "weight", tp, version)
    for rank in range(tp):
        for stage in range(pp):
            state: dict[str, Any] = make_client_state(saved, tp, pp, version)
            for part in range(virtual):
                own = _name_stage(saved, slices, rank, part * pp + stage, pp * virtual, core=core)
                content = {name: tensor.to(dtype) for name, tensor in own.items()}
                key = "model" if virtual == 1 else f"model{part}"
                state[key] = content | make_extra_states(content) if core else _nest(content)
            state["opt_param_scheduler"] = describe_scheduler(
                saved, "lr_decay_style", "lr_warmup_steps", "lr_decay_steps"
            )
            name = f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
            (folder / name).mkdir(parents=True)
            torch.save(state, folder / name / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(saved.state["iteration"]))
    return folder


def make_extra_states(names: Iterable[str]) -> dict[str, io.BytesIO]:
    """Return `_extra_state` of each linear layer, as Transformer Engine before 2.0 stored it."""
    return {
        re.sub(r"(linear_\w+)\.weight", r"\1._extra_state", name): io.BytesIO(pickle.dumps({}))
        for name in names
        if re.search(r"linear_\w+\.weight", name)
    }


def describe_llama(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that describe a model like Llama."""
    kinds = {"absolute": "learned_absolute", "rotary": "rope"}
    return {
        "position_embedding_type": kinds[model.position_embedding_type],
        "normalization": model.normalization,
        "swiglu": model.glu_activation == "swiglu",
        "add_bias_linear": model.add_bias_linear,
        "group_query_attention": model.num_query_groups is not None,
        "num_query_groups": model.num_query_groups or 1,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
    }


def _name_stage(
    saved: Saved,
    slices: dict[tuple[int | None, str], list[Tensor]],
    rank: int,
    stage: int,
    stages: int,
    *,
    core: bool,
) -> dict[str, Tensor]:
    """Return the weights of one stage, with its layers counted from 0."""
    count = saved.model.num_layers // stages
    encoder = "decoder" if core else "language_model.encoder"
    embedding = "embedding" if core else "language_model.embedding"
    found: dict[str, Tensor] = {}
    for (layer, name), parts in slices.items():
        if layer is not None:
            if layer // count == stage:
                inside = in_layer(name, CORE if core else LEGACY)
                found[f"{encoder}.layers.{layer % count}.{inside}"] = parts[rank]
        elif name.startswith("head.norm"):
            if stage == stages - 1:
                found[f"{encoder}.final_layernorm.{name.rpartition('.')[2]}"] = parts[rank]
        elif name == "head.weight":
            if stage == stages - 1:
                prefix = "" if core else "language_model."
                found[f"{prefix}output_layer.weight"] = parts[rank]
        elif stage == 0:
            found[f"{embedding}.{OUTSIDE[name]}"] = parts[rank]
    tied = (None, "head.weight") not in slices
    if tied and stage == stages - 1 and stages > 1:
        copy = "output_layer.weight" if core else "word_embeddings_for_head.weight"
        found[copy] = slices[None, "embedding.word.weight"][rank]
    return found


def _nest(content: dict[str, Tensor]) -> dict[str, Any]:
    """Return the weights in nested dictionaries, as in Megatron-LM before its core."""
    found: dict[str, Any] = {}
    for name, tensor in content.items():
        head, _, rest = name.partition(".")
        if head != "language_model":
            found.setdefault(head, {})[rest] = tensor
            continue
        part, _, rest = rest.partition(".")
        inner = found.setdefault(head, {}).setdefault(part, {})
        if part == "embedding":
            table, _, leaf = rest.partition(".")
            inner.setdefault(table, {})[leaf] = tensor
        else:
            inner[rest] = tensor
    return found


def write_torch_dist(root: Path, saved: Saved, *, states: bool) -> Path:
    """Write a `torch_dist` folder with torch.distributed.checkpoint, as Megatron core names it.

    Args:
        root: Folder of the checkpoints.
        saved: The state.
        states: Write the fp32 weights and Adam's moments too.
    """
    saved = Saved(**{**vars(saved), "args": saved.args | describe_llama(saved.model)})
    folder = root / f"iter_{saved.state['iteration']:07d}"
    content = {}
    for kind in KINDS if states else KINDS[:1]:
        prefix = {"weight": "optimizer.state.fp32_param."}.get(kind, f"optimizer.state.{kind}.")
        for name, tensor in _stack(saved, kind).items():
            if states:
                content[prefix + name] = tensor
            if kind == "weight":
                content[name] = tensor
    dcp.save(content, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    state = make_client_state(saved, 2, 2, 3.0)
    state["opt_param_scheduler"] = describe_scheduler(
        saved, "lr_decay_style", "lr_warmup_steps", "lr_decay_steps"
    )
    if states:
        state["optimizer"] = {"optimizer": {"param_groups": [{"step": saved.steps}]}}
    torch.save(state, folder / "common.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(saved.state["iteration"]))
    return folder


def _stack(saved: Saved, kind: str) -> dict[str, Tensor]:
    """Return whole tensors, those of all layers stacked."""
    stacked: dict[str, list[Tensor]] = {}
    found: dict[str, Tensor] = {}
    for (layer, name), (whole,) in list_slices(saved, kind, 1).items():
        if layer is not None:
            stacked.setdefault(f"decoder.layers.{in_layer(name, CORE)}", []).append(whole)
        elif name.startswith("head.norm"):
            found[f"decoder.final_layernorm.{name.rpartition('.')[2]}"] = whole
        elif name == "head.weight":
            found["output_layer.weight"] = whole
        else:
            found[f"embedding.{OUTSIDE[name]}"] = whole
    return found | {name: torch.stack(parts) for name, parts in stacked.items()}
