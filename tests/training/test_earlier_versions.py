"""What a run takes over from checkpoints of earlier versions."""

from test_plan import with_changes

from megatron.plan.resolve import resolve
from megatron.run.start.resume import keep_earlier_choices
from megatron.run.state import TrainState


def test_other_masks_are_in_the_log_once() -> None:
    config = with_changes(model={"hidden_dropout": 0.1})
    plan = resolve(config, 1)
    lines: list[str] = []
    # A new run, and the first start from a checkpoint of an earlier version.
    new = TrainState()
    keep_earlier_choices(plan, new, None, lines.append)
    assert not lines
    old = TrainState(iteration=5)
    assert old.dropout_masks == ""
    keep_earlier_choices(plan, old, config, lines.append)
    assert len(lines) == 1
    assert "other masks" in lines[0]
    assert old.dropout_masks == new.dropout_masks
    keep_earlier_choices(plan, old, config, lines.append)
    assert len(lines) == 1
    plain = with_changes(model={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    keep_earlier_choices(resolve(plain, 1), TrainState(iteration=5), plain, lines.append)
    assert len(lines) == 1


def test_muon_keeps_the_precision_of_its_checkpoint() -> None:
    saved = with_changes(optimizer={"muon_fp32_matmul_prec": "medium"})
    for given, iteration, expected in (
        ("auto", 5, "medium"),
        ("high", 5, "high"),
        ("auto", 0, "auto"),
    ):
        plan = resolve(with_changes(optimizer={"muon_fp32_matmul_prec": given}), 1)
        state = TrainState(iteration=iteration)
        kept = keep_earlier_choices(plan, state, saved, print).config.optimizer
        assert kept.muon_fp32_matmul_prec == expected
