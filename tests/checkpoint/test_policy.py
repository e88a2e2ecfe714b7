"""Test when saves are due and which checkpoints are kept, without files."""

from megatron.checkpoint.save import SavePolicy
from megatron.config.checkpoint import CheckpointConfig


def test_asking_whether_a_save_is_due_changes_nothing() -> None:
    policy = SavePolicy(CheckpointConfig(save_interval=10, save_at=(3,), keep_every=10))
    assert policy.is_due(2, 3)
    assert policy.is_due(2, 3)
    assert not policy.keep_next
    policy.record_iterations(2, 3)
    assert policy.keep_next


def test_the_next_attempt_takes_over_what_must_be_kept() -> None:
    policy = SavePolicy(CheckpointConfig(save_interval=5, keep_every=10))
    policy.record_iterations(4, 5)
    assert not policy.keep_next
    # A jump passes iteration 10.
    policy.record_iterations(5, 12)
    assert policy.keep_next
    policy.record_attempt()
    assert not policy.keep_next
    policy.record_failure(12, keep=True)
    assert policy.keep_next


def test_what_was_passed_during_a_save_is_kept_after_its_failure() -> None:
    policy = SavePolicy(CheckpointConfig(save_at=(3, 4)))
    policy.record_iterations(2, 3)
    policy.record_attempt()
    policy.record_iterations(3, 4)
    policy.record_failure(3, keep=False)
    assert policy.keep_next


def test_a_failed_save_is_due_until_the_next_attempt() -> None:
    policy = SavePolicy(CheckpointConfig(save_retry_interval=7, max_save_failures=2))
    policy.record_attempt()
    policy.record_failure(20, keep=False)
    assert not policy.is_due(25, 26)
    assert policy.is_due(26, 27)
    assert policy.is_due(27, 28)
    assert policy.describe_retry().startswith("after iteration 27,")
    assert not policy.has_failed_too_often
    policy.record_attempt()
    assert not policy.is_due(27, 28)
    policy.record_failure(28, keep=False)
    assert policy.has_failed_too_often
    policy.record_success()
    assert policy.failures == 0
    policy.record_end_of_run()
    assert policy.describe_retry() == "immediately"


def test_the_message_names_the_save_that_comes_first() -> None:
    policy = SavePolicy(CheckpointConfig(save_interval=4, save_at=(9,)))
    for failed, following in ((4, 8), (8, 9), (9, 12), (13, 16)):
        policy.record_iterations(failed - 1, failed)
        policy.record_failure(failed, keep=False)
        assert f"after iteration {following}," in policy.describe_retry()
        assert policy.is_due(following - 1, following)
        assert not any(policy.is_due(at - 1, at) for at in range(failed + 1, following))
