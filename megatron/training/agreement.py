"""All ranks must run the same configuration from the same iteration: a rank that differs is named before anything is trained."""

import json

from megatron.code_version import get_code_version
from megatron.config.cli import load_yaml
from megatron.config.compare import compute_config_digest, list_config_differences
from megatron.config.deepspeed_json import read_json, select_passed_on
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml
from megatron.errors import ConfigError, LayoutError
from megatron.parallel.mesh import Mesh
from megatron.parallel.messages import gather_json


def check_agreement(config: Config, iteration: int, mesh: Mesh) -> None:
    """
    Raises:
        LayoutError: on every rank, naming the first rank that differs from rank 0, its host, and what differs.
    """
    if mesh.grid.world_size == 1:
        return
    everyone = gather_json(
        [
            compute_config_digest(config),
            iteration,
            get_code_version(),
            _read_deepspeed_settings(config),
        ],
        mesh.control,
    )
    if all(other == everyone[0] for other in everyone):
        return
    texts = gather_json(dump_yaml(config), mesh.control)
    rank = next(r for r, other in enumerate(everyone) if other != everyone[0])
    differing = _differences(texts[0], texts[rank])
    if everyone[rank][1] != everyone[0][1]:
        differing.append(
            f"it starts behind iteration {everyone[rank][1]}, rank 0 behind {everyone[0][1]}: do both see the same --load?"
        )
    if everyone[rank][2] != everyone[0][2]:
        differing.append(f"its version is {everyone[rank][2]}, rank 0's {everyone[0][2]}")
    if everyone[rank][3] != everyone[0][3]:
        differing.append(
            f"its {config.parallel.deepspeed_config} has {everyone[rank][3]} for DeepSpeed itself, rank 0's {everyone[0][3]}"
        )
    raise LayoutError(
        f"{mesh.names[rank]} differs from rank 0:\n  "
        + "\n  ".join(differing)
        + "\nstart every rank with the same command line and files"
    )


def _differences(rank_0: str, other: str) -> list[str]:
    """Between two configurations that `dump_yaml` wrote, maybe of other versions than this one."""
    try:
        return list_config_differences(load_yaml(rank_0), load_yaml(other))
    except ConfigError as error:
        return [f"a configuration is not of this rank's version: {error}"]


def _read_deepspeed_settings(config: Config) -> str:
    """What of DeepSpeed's JSON is no field of the configuration; a file of that name may be another on each machine."""
    path = config.parallel.deepspeed_config if config.parallel.deepspeed else None
    return json.dumps(select_passed_on(read_json(path)) if path else {}, sort_keys=True)
