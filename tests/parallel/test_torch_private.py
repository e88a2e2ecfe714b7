"""A version of torch without a private name that the core needs gives a clear message."""

import runpy

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.pipelining import PipelineStage

from megatron.base.errors import ConfigError
from megatron.parallel.torch_private import StageInternals, find

MESSAGE = (
    rf"torch {torch.__version__.split('+')[0]}.* has no %s in .*%s.*is tested with torch 2\.11 to"
)


def test_the_first_name_that_exists_is_found() -> None:
    assert find(torch, "no_such_name", "_foreach_add_", "add") is torch._foreach_add_


@pytest.mark.parametrize(
    ("owner", "names", "where"),
    [
        (torch, ["_foreach_lerp_"], "torch"),
        (functional, ["all_gather_single", "all_gather_tensor"], functional.__name__),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_a_missing_function_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: object, names: list[str], where: str
) -> None:
    for name in names:
        monkeypatch.delattr(owner, name, raising=False)
    with pytest.raises(ConfigError, match=MESSAGE % (" or ".join(names), where)):
        runpy.run_module(find.__module__)


def test_a_stage_without_a_method_that_is_replaced_is_refused() -> None:
    with pytest.raises(ConfigError, match=MESSAGE % ("_prepare_forward_infra", "object")):

        class Bare(StageInternals):
            """A stage without a class of torch."""

    class Complete(StageInternals, PipelineStage):
        """A stage with the class of the installed version."""

    incomplete = Complete.__new__(Complete)
    with pytest.raises(ConfigError, match=MESSAGE % ("device", "Complete")):
        incomplete.check_internals()
    incomplete.device = torch.device("cpu")
    incomplete.args_recv_info = {}
    incomplete.grad_recv_info = {}
    names = "fwd_cache or _forward_chunk_states"
    with pytest.raises(ConfigError, match=MESSAGE % (names, "Complete")):
        incomplete.check_internals()
