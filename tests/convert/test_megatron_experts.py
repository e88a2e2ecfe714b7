"""Import of Megatron-LM's checkpoints with experts, and its commands for them.

The writer follows NVIDIA/Megatron-LM at 022bcb5a: get_checkpoint_name of
megatron/training/checkpointing.py, and the modules of megatron/core/transformer/moe (experts.py,
router.py, shared_experts.py). It is no output of that program.
"""

import json
import re
import shlex
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.megatron_writers import (
    KINDS,
    Saved,
    list_slices,
    make_client_state,
    read_saved,
    read_tensors,
)
from convert.test_from_megatron import MODELS, SIZES, name_paths, run_import
from process_pool import ProcessPool, pretrain, succeed
from shared_data import shared_dir
from tiny_corpus import MERGES, VOCAB
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.extras.interop.convert.fields import normalise_model
from megatron.extras.interop.convert.megatron_names import rename
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve

EXPERTS, WIDTH, SHARED, HIDDEN = 4, 20, 12, 32
FLAGS = (
    f"{MODELS['llama']} --num-experts {EXPERTS} --moe-ffn-hidden-size {WIDTH} "
    "--moe-layer-freq ([0]*1+[1]*3) --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    f"--moe-shared-expert-intermediate-size {SHARED} --moe-shared-expert-gate "
    "--moe-z-loss-coeff 0.001 --moe-router-load-balancing-type none"
)
ARGS = {
    "num_experts": EXPERTS,
    "moe_ffn_hidden_size": WIDTH,
    # Megatron-LM stores what it has made of the text.
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
    "moe_shared_expert_intermediate_size": SHARED,
    "moe_shared_expert_gate": True,
    "moe_z_loss_coeff": 0.001,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": None,
    "moe_grouped_gemm": True,
}


@pytest.fixture(scope="module")
def saved(pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("experts")
    flags = (
        f"{SIZES} {FLAGS} {name_paths(corpus, folder)} --vocab-file {VOCAB} --merge-file {MERGES}"
    )
    succeed(pool.run(1, pretrain, flags.split()))
    return read_saved(open_checkpoint(folder, 2))


def write(root: Path, saved: Saved, tp: int, pp: int, ep: int, experts: str, **args: Any) -> Path:
    """Write a checkpoint. `experts`: SequentialMLP, TEGroupedMLP or GroupedMLP."""
    llama = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "group_query_attention": True,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
    }
    sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp}
    described = Saved(**{**vars(saved), "args": saved.args | llama | ARGS | sizes | args})
    folder = root / f"iter_{saved.state['iteration']:07d}"
    dense = list_slices(saved, "weight", tp)
    layers = saved.model.num_layers // pp
    for rank in range(tp):
        for stage in range(pp):
            for expert in range(ep):
                model: dict[str, Tensor] = {}
                for local in range(layers):
                    number = stage * layers + local
                    parts = _name_layer(saved, dense, number, rank, tp, expert, ep, experts)
                    model |= {f"decoder.layers.{local}.{name}": t for name, t in parts.items()}
                if stage == 0:
                    model["embedding.word_embeddings.weight"] = dense[
                        None, "embedding.word.weight"
                    ][rank]
                if stage == pp - 1:
                    model["decoder.final_layernorm.weight"] = dense[None, "head.norm.weight"][rank]
                    model["output_layer.weight"] = dense[None, "head.weight"][rank]
                name = f"mp_rank_{rank:02d}"
                name += f"_{stage:03d}" * (pp > 1) + f"_{expert:03d}" * (ep > 1)
                (folder / name).mkdir(parents=True)
                state = make_client_state(described, tp, pp, 3.0) | {"model": model}
                torch.save(state, folder / name / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(saved.state["iteration"]))
    return folder


def _name_layer(
    saved: Saved,
    dense: dict[tuple[int | None, str], list[Tensor]],
    number: int,
    rank: int,
    tp: int,
    expert: int,
    ep: int,
    experts: str,
) -> dict[str, Tensor]:
    """Return the tensors of a layer of one rank."""
    theirs = {
        "input_norm.weight": "input_layernorm.weight",
        "attention.qkv.weight": "self_attention.linear_qkv.weight",
        "attention.out.weight": "self_attention.linear_proj.weight",
        "post_attention_norm.weight": "pre_mlp_layernorm.weight",
    }
    found = {their: dense[number, our][rank] for our, their in theirs.items()}
    if number == 0:
        found["mlp.linear_fc1.weight"] = dense[0, "mlp.in.weight"][rank]
        found["mlp.linear_fc2.weight"] = dense[0, "mlp.down.weight"][rank]
        return found

    def ours(name: str) -> Tensor:
        return saved.tensors["weight", f"blocks.{number}.mlp.{name}"]

    def divide(gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Return a rank's rows of gate and up, one below the other, and its columns of down."""
        rows = torch.cat((gate.chunk(tp)[rank], up.chunk(tp)[rank]))
        return rows, down.chunk(tp, dim=1)[rank].contiguous()

    found["mlp.router.weight"] = ours("router.weight")
    found["mlp.router.expert_bias"] = ours("router.balance")
    first, second = divide(*(ours(f"shared.{name}.weight") for name in ("gate", "up", "down")))
    found["mlp.shared_experts.linear_fc1.weight"] = first
    found["mlp.shared_experts.linear_fc2.weight"] = second
    found["mlp.shared_experts.gate_weight"] = ours("shared_gate")
    local = EXPERTS // ep
    pairs = [
        divide(
            *(
                ours(f"experts.{name}").view(EXPERTS, -1, columns)[expert * local + i]
                for name, columns in (("gate", HIDDEN), ("up", HIDDEN), ("down", WIDTH))
            )
        )
        for i in range(local)
    ]
    if experts == "GroupedMLP":
        # Its products read [h, 2 f] and [f, h] of each expert from one tensor each.
        found["mlp.experts.weight1"] = torch.stack([a.t() for a, _ in pairs]).view(HIDDEN, -1)
        found["mlp.experts.weight2"] = torch.stack([b.t() for _, b in pairs]).view(-1, HIDDEN)
        return found
    for i, (a, b) in enumerate(pairs):
        if experts == "SequentialMLP":
            found[f"mlp.experts.local_experts.{i}.linear_fc1.weight"] = a
            found[f"mlp.experts.local_experts.{i}.linear_fc2.weight"] = b
        else:
            found[f"mlp.experts.linear_fc1.weight{i}"] = a
            found[f"mlp.experts.linear_fc2.weight{i}"] = b
    return found


LAYOUTS = [
    (1, 1, 1, "SequentialMLP"),
    (1, 1, 2, "TEGroupedMLP"),
    (2, 2, 2, "GroupedMLP"),
    (2, 1, 4, "SequentialMLP"),
    (2, 1, 1, "GroupedMLP"),
    (1, 4, 2, "TEGroupedMLP"),
]


@pytest.mark.parametrize(("tp", "pp", "ep", "experts"), LAYOUTS)
def test_imported_experts_are_equal(
    tp: int, pp: int, ep: int, experts: str, saved: Saved, tmp_path: Path
) -> None:
    write(tmp_path / "theirs", saved, tp, pp, ep, experts)
    out = tmp_path / "imported"
    size = str(saved.vocab_size)
    assert run_import("megatron-lm", tmp_path / "theirs", out, "--vocab-size", size) == 0
    checkpoint = open_checkpoint(out, 2)
    found = read_tensors(checkpoint)
    expected = {key: each for key, each in saved.tensors.items() if key[0] == KINDS[0]}
    assert found.keys() == expected.keys()
    assert any(key[1].endswith(".mlp.router.balance") for key in expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    config = checkpoint.read_config()
    assert normalise_model(config.model) == normalise_model(saved.model)
    assert config.loss.moe_z_loss_coeff == 0.001
    assert config.loss.moe_router_bias_update_rate == 0.01


BAD: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "experts that tensor ranks divide otherwise": (
        {"expert_tensor_parallel_size": 1},
        None,
        "--expert-tensor-parallel-size 1 and --tensor-model-parallel-size 2",
    ),
    "tokens are dropped": (
        {"moe_expert_capacity_factor": 1.5},
        None,
        "--moe-expert-capacity-factor",
    ),
    "a rank is missing": ({}, "mp_rank_01_001", "has 3 of mp_rank_\\*"),
    "more experts than the files have": ({"num_experts": 8}, None, "is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused(
    case: str, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, missing, message = BAD[case]
    folder = write(tmp_path / "theirs", saved, 2, 1, 2, "SequentialMLP", **args)
    if missing is not None:
        shutil.rmtree(folder / missing)
    size = str(saved.vocab_size)
    out = tmp_path / "imported"
    assert run_import("megatron-lm", tmp_path / "theirs", out, "--vocab-size", size) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


def test_a_missing_expert_is_named(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "theirs", saved, 1, 1, 2, "TEGroupedMLP")
    path = folder / "mp_rank_00_001/model_optim_rng.pt"
    torch.serialization.add_safe_globals([Namespace])
    state = torch.load(path, weights_only=False)
    del state["model"]["decoder.layers.2.mlp.experts.linear_fc2.weight1"]
    torch.save(state, path)
    size = str(saved.vocab_size)
    out = tmp_path / "imported"
    assert run_import("megatron-lm", tmp_path / "theirs", out, "--vocab-size", size) == 2
    assert "mlp.experts.3.down of layer 2 is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        # torch_dist has all experts of all layers in one tensor, under names of its own.
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.bias",
        "decoder.layers.0.mlp.router.bias",
    ],
)
def test_other_tensors_of_experts_are_not_known(name: str) -> None:
    assert rename(name) is None


def test_states_of_the_optimizer_need_weights_only(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "theirs", saved, 1, 1, 1, "TEGroupedMLP")
    path = folder / "mp_rank_00/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    torch.save(state | {"optimizer": [{"state": {}}, {"state": {}}]}, path)
    size = str(saved.vocab_size)
    out = tmp_path / "imported"
    words = ("megatron-lm", tmp_path / "theirs", out, "--vocab-size", size)
    assert run_import(*words) == 2
    assert "give --weights-only" in capsys.readouterr().err
    assert run_import(*words, "--weights-only") == 0


# ---- Commands ----

README = shlex.split(
    # All flags of megatron/core/transformer/moe/README.md at 022bcb5a that keep each token.
    "--num-experts 8 --expert-model-parallel-size 8 --moe-grouped-gemm --moe-permute-fusion "
    "--moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--use-distributed-optimizer --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 14336 "
    "--expert-tensor-parallel-size 1 --moe-layer-freq ([1]*3+[0]*1)*8 --moe-router-dtype fp32 "
    "--moe-router-score-function softmax --moe-router-pre-softmax --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-z-loss-coeff 1e-3 "
    "--moe-per-layer-logging --moe-layer-recompute --moe-shared-expert-intermediate-size 4096 "
    "--moe-shared-expert-overlap --moe-token-drop-policy probs --moe-router-bias-update-rate 1e-3"
)
REFUSED = {
    "--moe-expert-capacity-factor 1.0": "--moe-expert-capacity-factor",
    "--moe-router-load-balancing-type sinkhorn": "sinkhorn",
    "--moe-token-dispatcher-type flex": "use alltoall",
    "--moe-input-jitter-eps 0.01": "--moe-input-jitter-eps",
    "--moe-use-upcycling": "--moe-use-upcycling",
    "--moe-router-force-load-balancing": "--moe-router-force-load-balancing",
}


def _read_mixtral() -> tuple[list[str], int]:
    """Return the arguments of a published script, and its number of GPUs.

    It is examples/mixtral/train_mixtral_8x7b_distributed.sh of NVIDIA/Megatron-LM at d98e8a64.
    """
    for row in json.loads(shared_dir("data", "migrants.json").read_text()):
        if row["path"] == "examples/mixtral/train_mixtral_8x7b_distributed.sh":
            return row["arguments"], row["world_size"]
    raise AssertionError("the script is among the commands")


def test_the_published_command_of_mixtral_resolves() -> None:
    arguments, world = _read_mixtral()
    # The file of the tokenizer is not here.
    loaded = load_config([*arguments, "--vocab-size", "32000"])
    plan = resolve(loaded.config, world)
    assert not plan.errors
    assert plan.parameters == 46_702_792_704
    assert plan.expert_size == 8
    assert plan.config.loss.moe_aux_loss_coeff == 0.01


def test_the_flags_of_the_readme_on_experts_resolve() -> None:
    arguments, world = _read_mixtral()
    loaded = load_config([*arguments, *README, "--vocab-size", "32000"])
    plan = resolve(loaded.config, world)
    assert not plan.errors
    assert len(plan.shape.expert_layers) == 24
    model = loaded.config.model
    assert (model.moe_router_num_groups, model.moe_router_group_topk) == (4, 2)
    assert model.moe_shared_expert_intermediate_size == 4096


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_would_change_the_numbers_are_refused_by_name(flags: str) -> None:
    arguments, _ = _read_mixtral()
    with pytest.raises(ConfigError, match=REFUSED[flags]):
        load_config([*arguments, *flags.split(), "--vocab-size", "32000"])
