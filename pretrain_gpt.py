"""Pretrain a GPT: read the configuration, resolve the plan, join the other ranks, build, train.

python pretrain_gpt.py --num-layers 12 ...                                        one device
torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...    four, on one node
python pretrain_gpt.py --help                                                     every flag, with its unit and source
"""

import sys

from megatron.training.orphans import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()  # before the slow imports: a launcher that is killed meanwhile must not leave this process behind

from megatron.checkpoint.load import find_start
from megatron.config.cli import LoadedConfig, load_config
from megatron.errors import MegatronError
from megatron.plan import resolve
from megatron.training.agreement import check_agreement
from megatron.training.evaluate import evaluate_only
from megatron.training.loop import train
from megatron.training.resume import choose_curriculum, choose_schedule, choose_skip_ranges, starting_state
from megatron.training.setup import build_run, check_runnable, join_ranks, leave, leave_with_error, world_of_launcher


def main(argv: list[str] | None = None) -> None:
    """Run a command line. Exit code 0: done, or stopped and saved; 2: an error, whose message says how to mend it."""
    try:
        pretrain(load_config(argv, prog="pretrain_gpt.py"))
    except MegatronError as error:
        leave_with_error(error)
    leave()


def pretrain(loaded: LoadedConfig) -> None:
    """Everything between the configuration and the end of training."""
    config = loaded.config
    world = world_of_launcher(config.parallel.local_rank)
    checkpoint = find_start(config.checkpoint)
    state = starting_state(checkpoint, config)
    config, about_curriculum = choose_curriculum(config, checkpoint)
    plan = resolve(
        config,
        world.size,
        loaded.origin,
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_tokens,
        iteration=state.iteration,
    )
    check_runnable(plan)
    plan, about_schedule = choose_schedule(plan, state)
    plan, about_ranges = choose_skip_ranges(plan, state)
    mesh = join_ranks(plan, world)
    check_agreement(config, state.iteration, mesh)
    notes = [*loaded.warnings, *plan.warnings, *about_curriculum, *about_schedule, *about_ranges]
    run = build_run(plan, mesh, state, checkpoint, notes)
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
