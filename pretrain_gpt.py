"""Pretrain a GPT: read the configuration, resolve the plan, join the ranks, start or resume, train.

On one device:
    python pretrain_gpt.py --num-layers 12 ...
On four devices of one node:
    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...
Every flag, with its unit and source:
    python pretrain_gpt.py --help
"""

import sys

from megatron.standard_streams import protect_standard_streams
from megatron.training.orphans import die_with_launcher

if __name__ == "__main__":
    # Before the slow imports. A launcher that is killed during them must not leave this process.
    die_with_launcher()
    # Before libraries keep references to the streams.
    protect_standard_streams()

from megatron.checkpoint.start import find_start
from megatron.config.cli import LoadedConfig, load_config
from megatron.error_report import host_io_error
from megatron.errors import MegatronError
from megatron.parallel.launcher import read_launcher_world
from megatron.training.evaluate import evaluate_only
from megatron.training.loop import train
from megatron.training.resume import resolve_job, select_checkpoint_config
from megatron.training.setup import (
    build_roll_call,
    hold_folder_lease,
    join_ranks,
    leave,
    leave_with_error,
    report_error,
    start_run,
)


def main(argv: list[str] | None = None) -> None:
    """Run a command line.

    The exit code is 0 if training is done, or stopped and saved. It is 2 after an error whose
    message explains how to fix it. It is 1 after a crash of this rank, or of another one without
    which this rank cannot continue.
    """
    protect_standard_streams()
    try:
        pretrain(load_config(argv, prog="pretrain_gpt.py"))
    except MegatronError as error:
        leave_with_error(error)
    except OSError as error:
        if host_io_error(error) is not None:
            # A fault of this host, though not one that has its own message.
            report_error(error, f"{type(error).__name__}: {error}")
        raise
    leave()


def pretrain(loaded: LoadedConfig) -> None:
    """Run everything between the configuration and the end of training."""
    config = loaded.config
    world = read_launcher_world(config.parallel.local_rank)
    # This plan is preliminary. Most mistakes are found without the other ranks, so they are
    # reported before the ranks join. `start_run` repeats it with the checkpoint that rank 0 finds
    # once it holds the folder.
    plan = resolve_job(
        loaded, world.size, find_start(select_checkpoint_config(config)).checkpoint
    ).plan
    mesh = join_ranks(plan, world)
    with build_roll_call(plan, mesh), hold_folder_lease(config, mesh) as lease:
        run = start_run(loaded, mesh, lease)
        try:
            if config.batch.eval_only:
                evaluate_only(run)
            else:
                train(run)
        finally:
            run.sources.close()
            run.reporter.close()


if __name__ == "__main__":
    main(sys.argv[1:])
