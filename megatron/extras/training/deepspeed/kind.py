"""The kind of the engine on DeepSpeed, for --deepspeed.

This module imports neither torch nor DeepSpeed.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.config.tree import Config
from megatron.engine.kind import BuildEngine, EngineKind, FileSettings
from megatron.extras.interop.translators.deepspeed_json import read_json, select_passed_on
from megatron.extras.training.deepspeed.support import RULES
from megatron.plan.rules.finding import Finding, error


def _load(device_type: str) -> BuildEngine:
    """Import DeepSpeed and the engine on it. This takes seconds.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    from megatron.extras.training.deepspeed.deepspeed import DeepSpeedEngine, import_deepspeed

    import_deepspeed(device_type)
    return DeepSpeedEngine


def check_file(config: Config) -> Iterator[Finding]:
    """Check that the file of --deepspeed-config exists."""
    path = config.parallel.deepspeed_config
    if path is not None and not Path(path).is_file():
        yield error(f"--deepspeed-config {path} does not exist; create it, or remove the flag")


def _describe_settings(config: Config) -> FileSettings | None:
    """Return the settings of DeepSpeed's JSON file that are not fields of the configuration.

    They are compared by content, because each machine may have another file of the same name.
    """
    path = config.parallel.deepspeed_config
    if path is None:
        return None
    # A rank that raised here would leave the others waiting. If no rank has the file, rank 0
    # refuses the flag.
    try:
        if not Path(path).is_file():
            return FileSettings(path, "nothing (the file does not exist)")
        stages = config.parallel.pipeline_model_parallel_size
        passed_on = select_passed_on(read_json(path), stages)
        return FileSettings(path, json.dumps(passed_on, sort_keys=True))
    except (ConfigError, OSError) as error:
        return FileSettings(path, f"nothing ({error})")


DEEPSPEED = EngineKind(
    "DeepSpeed",
    _load,
    flag="--deepspeed",
    rules=RULES,
    file_rules=(check_file,),
    describe_settings=_describe_settings,
)
