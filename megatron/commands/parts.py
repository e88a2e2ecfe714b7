"""Connects the extras with the core: what a configuration asks for becomes the parts of its run."""

import importlib.util
from collections.abc import Sequence

from megatron.config.cli import load_config
from megatron.config.config_with_origin import LoadedConfig
from megatron.config.tree import Config
from megatron.engine.kind import EngineKind
from megatron.engine.native_kind import NATIVE
from megatron.run.parts import Parts


def load_command_line(argv: Sequence[str], prog: str) -> LoadedConfig:
    """Load a command line, with the flags of other trainers if their translator is installed.

    Raises:
        ConfigError: The command line has errors.
    """
    if importlib.util.find_spec("megatron.extras") is None:
        return load_config(argv, prog=prog)
    from megatron.extras.translators.translator import OtherTrainers

    return load_config(argv, prog=prog, translator=OtherTrainers())


def choose_engine(config: Config) -> EngineKind:
    """Return the kind of engine that a configuration asks for. This imports no torch."""
    # Without the package, `check_parts` refuses the flag.
    if config.parallel.deepspeed and importlib.util.find_spec("megatron.extras") is not None:
        from megatron.extras.deepspeed.kind import DEEPSPEED

        return DEEPSPEED
    return NATIVE


def choose_parts(config: Config) -> Parts:
    """Return the parts that a configuration asks for. Others are not imported.

    A part whose package is missing is None, and `check_parts` explains that.
    """
    if importlib.util.find_spec("megatron.extras") is None:
        return Parts()
    exporter = None
    if config.checkpoint.hf_export_interval is not None:
        from megatron.extras.convert.hf_export import HFExporter

        exporter = HFExporter
    return Parts(exporter=exporter, engine=choose_engine(config))
