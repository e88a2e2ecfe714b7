"""Mistakes in a table, a layout or a config.json, which export and import share.

The comparison with `transformers` must find each, in both directions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from model.builders import tiny_config
from model.reference_models import FAMILIES, HEADS
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.config.batch import BatchConfig
from megatron.config.tree import Config
from megatron.extras.interop.convert import architectures, export
from megatron.extras.interop.convert.architectures import ARCHITECTURES, find_architecture
from megatron.extras.interop.convert.expert_fields import ExpertNames
from megatron.extras.interop.convert.export import ExportOptions, export_checkpoint
from megatron.extras.interop.convert.fields import Cases, Needed, Training
from megatron.extras.interop.convert.importing import import_model
from megatron.extras.interop.convert.tensors import TensorPair
from megatron.extras.interop.convert.tokenizer_files import SpecialIds

pytest.importorskip("transformers")


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that saves a model of `transformers`, and imports it without a mistake."""

    def save(family: str) -> Path:
        FAMILIES[family].build().save_pretrained(tmp_path / "source")
        import_model(tmp_path / "source", tmp_path / "right")
        return tmp_path

    return save


def check_that_both_directions_fail(
    folder: Path, message: str = "layer 0", *, complete: bool = True
) -> None:
    """Check that import and export fail in the comparison, and that nothing is left."""
    message = f"{message}: transformers and this trainer differ"
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match=message):
        import_model(folder / "source", folder / "ours", compare_complete=complete)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(
            open_checkpoint(folder / "right", 0),
            folder / "back",
            ExportOptions(compare_complete=complete),
        )
    assert sorted(folder.iterdir()) == before


def replace_architecture(monkeypatch: pytest.MonkeyPatch, model_type: str, **changes: Any) -> None:
    """Give an architecture a wrong table, which export and import share."""
    changed = tuple(
        dataclasses.replace(each, **changes) if each.model_type == model_type else each
        for each in ARCHITECTURES
    )
    monkeypatch.setattr(architectures, "ARCHITECTURES", changed)


def swap_modules(model_type: str, one: str, other: str) -> dict[str, Any]:
    modules = dict(find_architecture(model_type).modules)
    return {"modules": modules | {one: modules[other], other: modules[one]}}


def swap_gelu(model_type: str) -> dict[str, Any]:
    """Return a table in which the exact GELU and its approximation are exchanged."""

    def swap(fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("activation") != "gelu":
            return fields
        return fields | {"bias_gelu_fusion": not fields["bias_gelu_fusion"]}

    pairs: list[Any] = []
    for pair in find_architecture(model_type).pairs:
        if isinstance(pair, Cases):
            cases = tuple((theirs, swap(dict(ours))) for theirs, ours in pair.cases)
            pairs.append(dataclasses.replace(pair, cases=cases))
        elif isinstance(pair, Needed):
            pairs.append(dataclasses.replace(pair, values=swap(dict(pair.values))))
        else:
            pairs.append(pair)
    return {"pairs": tuple(pairs)}


KEYS_AND_VALUES = {"qkv": ("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj")}
TABLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom: queries, keys and values in thirds": ("bloom", "bloom", {"fused": "thirds"}),
    "gpt-neox: queries, keys and values in thirds": ("gpt-neox", "gpt_neox", {"fused": "thirds"}),
    "llama: keys and values exchanged": ("llama", "llama", KEYS_AND_VALUES),
    "olmo3: keys and values exchanged": ("olmo3", "olmo3", KEYS_AND_VALUES),
    "llama: gate and up exchanged": (
        "llama",
        "llama",
        swap_modules("llama", "mlp.gate", "mlp.up"),
    ),
    "llama: norms exchanged": (
        "llama",
        "llama",
        swap_modules("llama", "input_norm", "post_attention_norm"),
    ),
    "qwen3: norms of queries and keys exchanged": (
        "qwen3",
        "qwen3",
        swap_modules("qwen3", "attention.q_norm", "attention.k_norm"),
    ),
    "mixtral: gate and up of experts exchanged": (
        "mixtral",
        "mixtral",
        {"experts": ExpertNames("w3", "w1", "w2", "block_sparse_moe")},
    ),
    "olmoe: gate and up of experts exchanged": (
        "olmoe",
        "olmoe",
        {"experts": ExpertNames("up_proj", "gate_proj", "down_proj")},
    ),
    "gpt-neox: GELU of the other form": ("gpt-neox", "gpt_neox", swap_gelu("gpt_neox")),
    "gpt2: GELU of the other form": ("gpt2", "gpt2", swap_gelu("gpt2")),
    "bloom: GELU of the other form": ("bloom", "bloom", swap_gelu("bloom")),
}


@pytest.mark.parametrize("mistake", TABLES)
def test_a_mistake_in_a_table_is_found(
    mistake: str, prepare: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, model_type, changes = TABLES[mistake]
    folder = prepare(family)
    replace_architecture(monkeypatch, model_type, **changes)
    if mistake != "bloom: GELU of the other form":
        check_that_both_directions_fail(folder)
        return
    # BLOOM has one form only. With the other one in the table, an export does not begin.
    with pytest.raises(CheckpointError, match="layer 0: transformers and this trainer differ"):
        import_model(folder / "source", folder / "ours")
    with pytest.raises(ConfigError, match="no architecture of transformers can express"):
        export_checkpoint(open_checkpoint(folder / "right", 0), folder / "back", ExportOptions())


Change = Callable[[str, Tensor, int, bool], Tensor]
"""Changes one of our tensors: its name, the tensor, the query groups, and whether to undo it."""


def exchange_keys_and_values(name: str, tensor: Tensor, groups: int, undo: bool) -> Tensor:
    if not name.startswith("attention.qkv."):
        return tensor
    heads = HEADS // groups
    order = [*range(heads), heads + 1, heads]
    rows = tensor.reshape(groups, heads + 2, -1, *tensor.shape[1:])[:, order]
    return rows.reshape(tensor.shape).contiguous()


def permute_rotation(name: str, tensor: Tensor, groups: int, undo: bool) -> Tensor:
    """Put the two channels that are rotated together beside each other, as the first Llama did."""
    if not name.startswith("attention.qkv."):
        return tensor
    heads = HEADS // groups
    rows = tensor.reshape(groups, heads + 2, -1, *tensor.shape[1:]).clone()
    width = rows.shape[2]
    halves = (width // 2, 2) if undo else (2, width // 2)
    turned = rows[:, : heads + 1].unflatten(2, halves).transpose(2, 3).flatten(2, 3)
    rows[:, : heads + 1] = turned
    return rows.reshape(tensor.shape).contiguous()


def transpose_output(name: str, tensor: Tensor, groups: int, undo: bool) -> Tensor:
    return tensor.t().contiguous() if name == "attention.out.weight" else tensor


def shift_rows(name: str, tensor: Tensor, groups: int, undo: bool) -> Tensor:
    """Move the rows of the vocabulary by one, as if a row of padding were at the other end."""
    if name in ("embedding.word.weight", "head.weight"):
        return tensor.roll(-1 if undo else 1, dims=0)
    return tensor


ROTARY = ["llama", "gpt-neox", "qwen2", "qwen3", "olmo2", "apertus"]
CHANGES: list[tuple[Change, str]] = [
    *((exchange_keys_and_values, name) for name in ("gpt2", "bloom", "gpt-neox", "qwen2")),
    *((permute_rotation, name) for name in ROTARY),
    *((transpose_output, name) for name in ("gpt2", "bloom", "gpt-neox", "llama", "olmo3")),
    *((shift_rows, name) for name in ("gpt2", "bloom", "llama", "gpt-neox")),
]


@pytest.mark.parametrize(("change", "family"), CHANGES)
def test_a_mistake_in_a_layout_is_found(
    change: Change,
    family: str,
    prepare: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = prepare(family)
    groups = int(FAMILIES[family].ours.get("num_query_groups", HEADS))
    from_hf = TensorPair.from_hf
    to_hf = TensorPair.to_hf

    def name_inside(pair: TensorPair) -> str:
        return pair.name if pair.layer is None else pair.name.split(".", 2)[2]

    def read(pair: TensorPair, parts: Sequence[Tensor]) -> Tensor:
        return change(name_inside(pair), from_hf(pair, parts), groups, False)

    def write(pair: TensorPair, tensor: Tensor) -> tuple[Tensor, ...]:
        return to_hf(pair, change(name_inside(pair), tensor, groups, True))

    monkeypatch.setattr(TensorPair, "from_hf", read)
    monkeypatch.setattr(TensorPair, "to_hf", write)
    if change is not shift_rows:
        check_that_both_directions_fail(folder)
        return
    check_that_both_directions_fail(folder, "the logits of the complete model")
    # Without the complete model, the embedding and the head are compared without layers.
    check_that_both_directions_fail(folder, "output matrix together", complete=False)


def test_a_wish_that_cannot_be_met_and_a_missing_folder_are_named(
    prepare: Callable[[str], Path],
) -> None:
    folder = prepare("qwen3")
    with pytest.raises(ConfigError, match="--architecture gpt2 cannot express this model"):
        export_checkpoint(
            open_checkpoint(folder / "right", 0),
            folder / "back",
            ExportOptions(architecture="gpt2"),
        )
    with pytest.raises(CheckpointError, match="the folder does not exist"):
        import_model(folder / "nowhere", folder / "ours")
    said: list[str] = []
    import_model(folder / "source", folder / "again", log=said.append)
    assert any("no tokenizer is imported" in line for line in said)


def test_a_dropout_that_is_not_written_is_found(
    prepare: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare("gpt2")
    monkeypatch.setattr(Training, "write", lambda self, model: {})
    with pytest.raises(CheckpointError, match=r"attention_dropout 0\.1, and the checkpoint has 0"):
        export_checkpoint(open_checkpoint(folder / "right", 0), folder / "back", ExportOptions())
    # One of two names of a dropout is left out, so the class has its default of 0.1 for it.
    monkeypatch.undo()
    write = Training.write
    monkeypatch.setattr(
        Training, "write", lambda self, model: write(self, model) | {"embd_pdrop": 0.1}
    )
    with pytest.raises(ConfigError, match=r"resid_pdrop and embd_pdrop are \[0\.0, 0\.1\]"):
        export_checkpoint(open_checkpoint(folder / "right", 0), folder / "back", ExportOptions())


def test_special_ids_that_are_not_written_are_found(
    prepare: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare("gpt2")
    monkeypatch.setattr(export, "_export_tokenizer", lambda *args: WrongIds())
    with pytest.raises(CheckpointError, match="bos_token_id 50256, and the tokenizer None"):
        export_checkpoint(open_checkpoint(folder / "right", 0), folder / "back", ExportOptions())


class WrongIds(SpecialIds):
    """Ids that are left out in the first call, which writes them."""

    calls: ClassVar[list[None]] = []

    def to_fields(self) -> dict[str, Any]:
        self.calls.append(None)
        return {} if len(self.calls) == 1 else super().to_fields()


@pytest.mark.parametrize(("family", "warnings"), [("llama", 1), ("gpt_neox", 0)])
def test_a_dropout_that_the_class_lacks_is_a_warning(family: str, warnings: int) -> None:
    said: list[str] = []
    config = Config(model=tiny_config(hidden_dropout=0.1), batch=BatchConfig(micro_batch_size=1))
    export._warn_about_dropout(find_architecture(family), config, said.append)
    assert len(said) == warnings
    assert all("no field for --hidden-dropout 0.1" in line for line in said)
