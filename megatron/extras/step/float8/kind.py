"""The kind of the engine with float8, for --fp8-format. This module imports no torch."""

import math
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from megatron.base.errors import ConfigError
from megatron.engine.kind import BuildEngine, EngineKind
from megatron.extras.step.float8.recipe import MULTIPLE
from megatron.plan.rules.finding import Finding, error, warning
from megatron.plan.run_plan import Plan


def _load(device_type: str) -> BuildEngine:
    """Import the engine. This takes seconds.

    Raises:
        ConfigError: torchao is not installed, or its import fails.
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            "--fp8-format needs torchao, which is not installed; install it with "
            'pip install "megatron-3d[fp8]", or leave out --fp8-format'
        )
    try:
        import_module("megatron.extras.step.float8.rounding")
    # A package that does not match torch fails in many ways.
    except Exception as failure:
        raise ConfigError(
            f"--fp8-format: the import of torchao fails ({type(failure).__name__}: {failure}); "
            "install a version that fits your torch with pip install --upgrade torchao, "
            "or leave out --fp8-format"
        ) from failure
    from megatron.extras.step.float8.engine import Float8Engine

    return Float8Engine


def check_settings(plan: Plan) -> Iterator[Finding]:
    """Check that --hidden-size is a multiple of 16."""
    hidden = plan.config.model.hidden_size
    if hidden % MULTIPLE:
        yield error(
            f"--hidden-size {hidden}: it is a size of each weight and must be a multiple of "
            f"{MULTIPLE}, so no product would be in float8; use "
            f"{math.ceil(hidden / MULTIPLE) * MULTIPLE}, or leave out --fp8-format"
        )


_PAYS_FROM = 1024
"""Below this hidden size, the planner predicts that layers gain less than 9 %. The output layer and
the loss gain nothing, and nanochat (width 768) got slower with float8."""


def warn_of_small_layers(plan: Plan) -> Iterator[Finding]:
    """Warn if products are so small that float8 hardly pays."""
    hidden = plan.config.model.hidden_size
    precision = plan.config.precision
    if hidden < _PAYS_FROM and not precision.fp8_emulate:
        yield warning(
            f"--fp8-format {precision.fp8_format} with --hidden-size {hidden}: below {_PAYS_FROM}, "
            "float8 is predicted to save less than 9 % of a layer's time, and may make a step "
            "slower. Compare its time without --fp8-format."
        )


FLOAT8 = EngineKind(
    "float8", _load, flag="--fp8-format", rules=(check_settings, warn_of_small_layers)
)
