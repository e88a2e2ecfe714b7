"""A writer of GPT-NeoX's checkpoints, for tests.

It is written after the published source: megatron/checkpointing.py, megatron/model/transformer.py
and tools/ckpts/convert_neox_to_hf.py of EleutherAI/gpt-neox, and PipelineModule of DeepSpeed. It is
no output of these programs.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEGACY = {"mlp.linear1": "mlp.dense_h_to_4h", "mlp.linear2": "mlp.dense_4h_to_h"}
"""Names of newer versions -> those of older ones."""
ITERATION = 3
DATA_RANKS = 2


def split_layer_of_neox(layer: Any, ranks: int, *, parallel: bool) -> list[dict[str, Tensor]]:
    """Return each rank's tensors of a layer of `GPTNeoXForCausalLM`.

    With parallel residuals, each rank has its own bias after a row-parallel matrix, and their sum
    is that of the model. The biases of `layer` are set to it.
    """
    found: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    columns = {"attention.query_key_value": layer.attention.query_key_value}
    columns["mlp.linear1"] = layer.mlp.dense_h_to_4h
    rows = {"attention.dense": layer.attention.dense, "mlp.linear2": layer.mlp.dense_4h_to_h}
    for rank, tensors in enumerate(found):
        for name, module in columns.items():
            tensors[f"{name}.weight"] = module.weight.chunk(ranks)[rank]
            tensors[f"{name}.bias"] = module.bias.chunk(ranks)[rank]
        for name, module in rows.items():
            tensors[f"{name}.weight"] = module.weight.chunk(ranks, dim=1)[rank]
        for name in ("input_layernorm", "post_attention_layernorm"):
            for leaf in ("weight", "bias"):
                tensors[f"{name}.{leaf}"] = getattr(getattr(layer, name), leaf)
        tensors["attention.rotary_emb.inv_freq"] = torch.ones(1)
    for name, module in rows.items():
        parts = [torch.randn_like(module.bias).half().float() for _ in found]
        if not parallel:
            parts = parts[:1] * ranks
        with torch.no_grad():
            module.bias.copy_(sum(parts) if parallel else parts[0])
        for tensors, part in zip(found, parts, strict=True):
            tensors[f"{name}.bias"] = part
    return found


def split_layer_of_llama(layer: Any, ranks: int) -> list[dict[str, Tensor]]:
    """Return each rank's tensors of a layer of `LlamaForCausalLM`."""
    attention = layer.self_attn
    found = []
    for rank in range(ranks):

        def take(module: Any, dim: int = 0, rank: int = rank) -> Tensor:
            part: Tensor = module.weight.chunk(ranks, dim=dim)[rank]
            return part

        qkv = [take(each) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        found.append(
            {
                "attention.query_key_value.weight": torch.cat(qkv),
                "attention.dense.weight": take(attention.o_proj, 1),
                # The activation is that of the second half.
                "mlp.linear1.weight": torch.cat(
                    [take(layer.mlp.up_proj), take(layer.mlp.gate_proj)]
                ),
                "mlp.linear2.weight": take(layer.mlp.down_proj, 1),
                "input_layernorm.scale": layer.input_layernorm.weight,
                "post_attention_layernorm.scale": layer.post_attention_layernorm.weight,
            }
        )
    return found


def split_model(model: Any, ranks: int) -> dict[int, list[dict[str, Tensor]]]:
    """Return the tensors of each module of the pipeline, for each rank.

    Module 0 is the embedding. Functions without weights are modules 1 and N + 2.
    """
    if type(model).__name__ == "LlamaForCausalLM":
        word, norm = model.model.embed_tokens, model.model.norm
        layers = [split_layer_of_llama(layer, ranks) for layer in model.model.layers]
        final = {"norm.scale": norm.weight}
        head = model.lm_head
    else:
        word, norm = model.gpt_neox.embed_in, model.gpt_neox.final_layer_norm
        parallel = model.config.use_parallel_residual
        layers = [
            split_layer_of_neox(layer, ranks, parallel=parallel) for layer in model.gpt_neox.layers
        ]
        final = {"norm.weight": norm.weight, "norm.bias": norm.bias}
        head = model.get_output_embeddings()
    modules = {0: [{"word_embeddings.weight": part} for part in word.weight.chunk(ranks)]}
    modules |= {index + 2: layer for index, layer in enumerate(layers)}
    modules[len(layers) + 3] = [final] * ranks
    if head.weight is not word.weight:
        parts = head.weight.chunk(ranks)
        modules[len(layers) + 4] = [{"final_linear.weight": part} for part in parts]
    return modules


def write_neox(
    root: Path,
    model: Any,
    ranks: int,
    config: str | None,
    *,
    layer_files: bool,
    renamed: dict[str, str] | None = None,
) -> Path:
    """Write a model of `transformers` in fp16 as GPT-NeoX does, and return the folder of the step.

    Args:
        root: Folder of the checkpoints.
        model: The model. Its biases may be changed.
        ranks: Model-parallel size.
        config: The text of the run's YAML file. None: the version that does not copy it.
        layer_files: Write a file for each module, as with a pipeline.
        renamed: Names of another version.
    """
    folder = root / f"global_step{ITERATION}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    modules = split_model(model, ranks)
    for rank in range(ranks):
        sequential: dict[str, Tensor] = {}
        for number, parts in modules.items():
            state = {}
            for name, tensor in parts[rank].items():
                for new, old in (renamed or {}).items():
                    name = name.replace(new, old)
                state[name] = tensor.detach().half().clone()
            if layer_files:
                name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
                torch.save(state, folder / name)
            sequential |= {f"sequential.{number}.{name}": each for name, each in state.items()}
        contents = {
            "module": None if layer_files else sequential,
            "global_steps": ITERATION,
            "global_samples": ITERATION * 8,
            "skipped_steps": 1,
            "dp_world_size": DATA_RANKS,
            "iteration": ITERATION,
            "args": {"num_layers": len(modules) - 3, "model_parallel_size": ranks},
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
        }
        torch.save(contents, folder / f"mp_rank_{rank:02d}_model_states.pt")
    if config is not None:
        (folder / "configs").mkdir()
        (folder / "configs" / "run.yml").write_text(config)
    return folder
