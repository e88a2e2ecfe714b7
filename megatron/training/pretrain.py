"""Everything that one rank does, from the command line to the end of training."""

from megatron.config.cli import LoadedConfig
from megatron.error_report import host_io_error
from megatron.errors import MegatronError
from megatron.parallel.launcher import read_launcher_world
from megatron.training.agreement import check_agreement
from megatron.training.evaluate import evaluate_only
from megatron.training.job import agree_on_job
from megatron.training.join import join_ranks, make_printer
from megatron.training.leaving import leave_with_error, report_error
from megatron.training.loop import train
from megatron.training.setup import (
    build_roll_call,
    build_timers,
    divide_ranks,
    hold_folder_lease,
    leave,
    start_run,
)


def run_loaded(loaded: LoadedConfig) -> None:
    """Train, and end the process after an error. See `megatron.commands.pretrain`."""
    try:
        pretrain(loaded)
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
    ranks = join_ranks(loaded, world)
    with build_roll_call(config, ranks) as roll_call:
        check_agreement(config, ranks)
        # Mistakes are reported here, before this run touches its folder or waits for the lease.
        job = agree_on_job(loaded, ranks, make_printer(ranks.rank))
        timers = build_timers(world)
        mesh = divide_ranks(job.plan, ranks, world, timers)
        if roll_call is not None:
            roll_call.use_names(mesh.names)
        with hold_folder_lease(config, mesh) as lease:
            run = start_run(loaded, job, mesh, timers, lease)
            try:
                if config.batch.eval_only:
                    evaluate_only(run)
                else:
                    train(run)
            finally:
                run.sources.close()
                run.reporter.close()
