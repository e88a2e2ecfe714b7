"""The model card of an exported model."""

import contextlib
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.checkpoint.load import Checkpoint
from megatron.config.data import DataConfig
from megatron.data.blend import parse_shares
from megatron.data.phases import read_phases, use_phase
from megatron.data.splits import find_train_mixture
from megatron.extras.interop.convert.compare import Comparison
from megatron.model.flops import count_parameters
from megatron.model.shape import ModelShape
from megatron.observe.metrics import read_metrics


def write_card(
    folder: Path,
    checkpoint: Checkpoint,
    class_name: str,
    dtype: str,
    comparison: Comparison,
    licence: str | None,
) -> None:
    """Write README.md, the model card, with the facts of the run.

    Args:
        folder: The folder of the exported model.
        checkpoint: What was exported.
        class_name: The class of `transformers`.
        dtype: The type of the tensors.
        comparison: How the exported model compares with the checkpoint.
        licence: The licence of the model, or None if it is not known.
    """
    state = checkpoint.state
    config = checkpoint.read_config()
    rows = int(checkpoint.read_index().tensors["weight/embedding.word.weight"]["shape"][0])
    parameters = count_parameters(ModelShape(config.model, rows, rows))
    losses = _find_losses(checkpoint)
    facts = [
        f"- architecture: {class_name}",
        f"- parameters: {parameters:,}, in {dtype.removeprefix('torch.')}",
        f"- layers: {config.model.num_layers}, hidden size: {config.model.hidden_size}, "
        f"sequence length: {config.model.seq_length}",
        f"- iteration: {checkpoint.iteration:,}",
        f"- consumed samples: {state.get('consumed_samples', 0):,}",
        f"- consumed tokens: {state.get('consumed_tokens', 0):,}",
        # Only names, because the folders of a cluster are nobody's business.
        f"- data: {', '.join(list_data_names(config.data)) or 'not recorded'}",
        *(f"- loss on {name}: {loss:.4f}" for name, loss in losses.items()),
        f"- licence: {licence or 'not stated; ask who trained the model before you use it'}",
        f"- trainer: megatron-3d {checkpoint.manifest.version}",
    ]
    # The Hub shows a licence only from this list.
    license_lines = [] if licence is None else [f"license: {licence}"]
    checks = [f"- {line}" for line in comparison.describe()]
    text = "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            *license_lines,
            "---",
            "",
            "# A model trained with megatron-3d",
            "",
            *facts,
            "",
            "The tensors equal those of the checkpoint, rounded to the dtype of the files. The",
            "comparison of this trainer with transformers on these files gave:",
            "",
            *checks,
            "",
        ]
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def list_data_names(data: DataConfig) -> list[str]:
    """Return the names of the training data, without weights and folders.

    The list is empty if a file that lists the data cannot be read any more.
    """
    streamed = data.dataset_format is not None
    paths: list[str] = []
    with contextlib.suppress(ConfigError):
        sections = [data]
        if data.data_phases is not None:
            phases = read_phases(data.data_phases, streamed=streamed)
            sections = [use_phase(data, phase) for phase in phases]
        for section in sections:
            if streamed:
                # Without --datasets, the name is ".", and --data-path itself is meant.
                paths += [f"{section.data_path[0]}/{name}" for name in parse_shares(section)]
            elif mixture := find_train_mixture(section):
                paths += [part.prefix for part in mixture.parts]
    return list(dict.fromkeys(Path(path).name for path in paths))


def _find_losses(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the losses of the last step and evaluation, or nothing without metrics of the run."""
    training: dict[str, float] = {}
    evaluation: dict[str, float] = {}
    # The checkpoint may have been copied without the run's metrics.
    with contextlib.suppress(OSError):
        for entry in read_metrics(checkpoint.folder.parent / "metrics.jsonl"):
            if entry["iteration"] <= checkpoint.iteration:
                evaluation = entry.get("validation", evaluation)
                if entry.get("lm_loss") is not None:
                    training = {"training data": entry["lm_loss"]}
    return training | evaluation
