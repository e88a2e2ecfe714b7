"""Everything that one rank does, from the command line to the end of training."""

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
    build_timers,
    hold_folder_lease,
    join_ranks,
    leave,
    leave_with_error,
    report_error,
    start_run,
)


def run_command_line(argv: list[str]) -> None:
    """Run a command line, and end the process after an error. See `megatron.commands.pretrain`."""
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
    timers = build_timers(world)
    mesh = join_ranks(plan, world, timers)
    with build_roll_call(plan, mesh), hold_folder_lease(config, mesh) as lease:
        run = start_run(loaded, mesh, timers, lease)
        try:
            if config.batch.eval_only:
                evaluate_only(run)
            else:
                train(run)
        finally:
            run.sources.close()
            run.reporter.close()
