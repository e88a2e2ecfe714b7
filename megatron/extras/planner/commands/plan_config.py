"""The file of --write-config: a planned run as a YAML file in this trainer's names.

Invariant: `pretrain_gpt.py --config FILE` has the configuration that was planned. The file is read
again to check this.
"""

from collections.abc import Callable
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_text
from megatron.config.compare import compute_config_digest, find_config_differences
from megatron.config.fields import LoadedConfig, all_fields, flatten
from megatron.config.yaml_file import dump_fields
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_source import CommandSource
from megatron.plan.run_plan import Plan

_DEEPSPEED_CONFIG = "parallel.deepspeed_config"


def write_config(
    path: Path,
    plan: Plan,
    loaded: LoadedConfig,
    source: CommandSource,
    show: Callable[[str], str],
) -> str:
    """Write the values that differ from the defaults to `path`, and return the file's digest.

    A DeepSpeed JSON that the script itself writes becomes a file beside `path`.

    Args:
        path: The new file.
        plan: The plan of the run.
        loaded: The configuration of `plan`, with the origin of each value.
        source: Where the training command was found.
        show: Returns a text with the script's names of its documents.

    Raises:
        ConfigError: A file exists already or cannot be written, or the plan has errors.
    """
    if plan.errors:
        raise ConfigError(f"--write-config {path}: the plan has errors, so nothing is written.")
    values = flatten(loaded.config)
    origin = {dotted: show(text) for dotted, text in loaded.origin.items()}
    files = {path: ""}
    document = values[_DEEPSPEED_CONFIG]
    if source.documents and document and Path(document).is_file():
        beside = path.with_suffix(".deepspeed.json")
        files[beside] = load_text(document, decoding="surrogateescape")
        values[_DEEPSPEED_CONFIG] = str(beside)
    if existing := [file for file in files if file.exists()]:
        raise ConfigError(
            f"--write-config {path}: {existing[0]} exists already. Remove it, or name another file."
        )
    defaults = {field.dotted: field.default for field in all_fields().values()}
    chosen = {dotted for dotted, value in values.items() if value != defaults[dotted]}
    head = _write_head(path, plan, source)
    try:
        for file, text in files.items():
            file.write_text(text, errors="surrogateescape")
        # A value may follow from others if it is not given. Such a default is written too.
        while True:
            path.write_text(head + dump_fields(values, origin, chosen))
            written = load_config(["--config", str(path)])
            read = flatten(written.config)
            differing = {d for d, *_ in find_config_differences(loaded.config, written.config)}
            differing = {dotted for dotted in differing if read[dotted] != values[dotted]}
            if not differing - chosen:
                break
            chosen |= differing
    except OSError as failure:
        raise ConfigError(f"--write-config {path} cannot be written: {failure}.") from None
    if differing:
        raise ConfigError(
            f"--write-config {path}: {', '.join(sorted(differing))} differ from the planned values "
            "when the file is read. Report this as an error of the planner."
        )
    return compute_config_digest(written.config)


def _write_head(path: Path, plan: Plan, source: CommandSource) -> str:
    """Return the comments at the start of the file."""
    origin = "a command line" if source.script is None else source.script.name
    lines = [
        f"# Written by tools/plan.py --write-config from {origin}. It has only the values that",
        "# differ from the defaults. The comment of each value names the flag or file that gave",
        f"# it. Planned for {plan.world_size} processes. Start each with:",
        f"#   pretrain_gpt.py --config {path.name}",
    ]
    command = source.command
    if command is not None:
        missing = [
            *(f"${name}" for name in (*command.unresolved, *command.parameters)),
            *command.placeholders,
            *command.commands,
        ]
        text = " ".join(", ".join(missing).split())
        if missing:
            lines.append(f"# Replace before training: {text}")
    return "\n".join(lines) + "\n"
