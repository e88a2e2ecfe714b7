"""Comparison of the configuration and the start iteration between ranks.

All ranks must run the same configuration from the same iteration. A rank that differs is named
before anything is trained.
"""

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
    """Compare configuration, start iteration, code version and DeepSpeed's settings between ranks.

    All ranks call it together.

    Raises:
        LayoutError: A rank differs from rank 0. The error is raised on every rank. It names the
            first such rank, its host, and what differs.
    """
    if mesh.grid.world_size == 1:
        return
    # A digest is enough to find a difference. Gathering every rank's YAML file here would send
    # megabytes over the control group in a large job.
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
    # Every rank holds the same list of digests, so every rank reaches this second gather or none.
    texts = gather_json(dump_yaml(config), mesh.control)
    rank = next(r for r, other in enumerate(everyone) if other != everyone[0])
    differing = _differences(texts[0], texts[rank])
    # The digest (index 0) is explained by the differences in the YAML files. The others are not
    # part of the configuration, so each needs its own line.
    if everyone[rank][1] != everyone[0][1]:
        differing.append(
            f"it starts after iteration {everyone[rank][1]}, and rank 0 after {everyone[0][1]}. "
            "Check that both see the same --load"
        )
    if everyone[rank][2] != everyone[0][2]:
        differing.append(f"its version is {everyone[rank][2]}, and rank 0's is {everyone[0][2]}")
    if everyone[rank][3] != everyone[0][3]:
        differing.append(
            f"its {config.parallel.deepspeed_config} passes {everyone[rank][3]} to DeepSpeed, and "
            f"rank 0's passes {everyone[0][3]}"
        )
    raise LayoutError(
        f"{mesh.names[rank]} differs from rank 0:\n  "
        + "\n  ".join(differing)
        + "\nstart every rank with the same command line and files"
    )


def _differences(rank_0: str, other: str) -> list[str]:
    """Return the fields in which two YAML files written by `dump_yaml` differ.

    The other rank may run another version of the code. Its file may then have fields that this
    rank cannot read.
    """
    try:
        return list_config_differences(load_yaml(rank_0), load_yaml(other))
    except ConfigError as error:
        return [f"this rank cannot read a configuration of another version: {error}"]


def _read_deepspeed_settings(config: Config) -> str:
    """Return the settings of DeepSpeed's JSON file that are not fields of the configuration.

    They are compared by content, because each machine may have another file of the same name.
    """
    if config.parallel.deepspeed:
        path = config.parallel.deepspeed_config
    else:
        path = None
    return json.dumps(select_passed_on(read_json(path)) if path else {}, sort_keys=True)
