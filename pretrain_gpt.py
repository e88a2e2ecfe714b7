"""Pretrain a GPT: read the configuration, resolve the plan, join the other ranks, start or resume, train.

python pretrain_gpt.py --num-layers 12 ...                                        one device
torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...    four, on one node
python pretrain_gpt.py --help                                                     every flag, with its unit and source
"""

import sys

from megatron.standard_streams import protect_standard_streams
from megatron.training.orphans import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()  # before the slow imports: a launcher that is killed meanwhile must not leave this process behind
    protect_standard_streams()  # before libraries take hold of the streams

from megatron.checkpoint.start import find_start
from megatron.config.cli import LoadedConfig, load_config
from megatron.error_report import host_io_error
from megatron.errors import MegatronError
from megatron.parallel.launcher import read_launcher_world
from megatron.training.evaluate import evaluate_only
from megatron.training.loop import train
from megatron.training.resume import resolve_job, select_checkpoint_config
from megatron.training.setup import (
    answer_roll_call,
    hold_folder_lease,
    join_ranks,
    leave,
    leave_with_error,
    report_error,
    start_run,
)


def main(argv: list[str] | None = None) -> None:
    """Run a command line.

    Exit codes: 0: done, or stopped and saved. 2: an error, whose message says how to fix it. 1: a
    crash of this rank, or of another one without which it cannot continue.
    """
    protect_standard_streams()
    try:
        pretrain(load_config(argv, prog="pretrain_gpt.py"))
    except MegatronError as error:
        leave_with_error(error)
    except OSError as error:
        if host_io_error(error) is not None:
            report_error(
                error, f"{type(error).__name__}: {error}"
            )  # a fault of this host, though not one that has a message
        raise
    leave()


def pretrain(loaded: LoadedConfig) -> None:
    """Everything between the configuration and the end of training."""
    config = loaded.config
    world = read_launcher_world(config.parallel.local_rank)
    # As seen from here: most mistakes show without the other ranks. What holds is what rank 0 finds when the folder is its own.
    plan = resolve_job(
        loaded, world.size, find_start(select_checkpoint_config(config)).checkpoint
    ).plan
    mesh = join_ranks(plan, world)
    with answer_roll_call(plan, mesh), hold_folder_lease(config, mesh) as lease:
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
