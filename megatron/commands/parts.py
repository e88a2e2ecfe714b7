"""Connects the extras with the core: what a configuration asks for becomes the parts of its run."""

import importlib.util

from megatron.config.tree import Config
from megatron.run.parts import Parts


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
    return Parts(exporter=exporter)
