"""Log lines that scripts parse are compared byte for byte."""

import dataclasses
import math
from dataclasses import replace

import pytest
from observe.reports import full_report, make_report

from megatron.observe import log_line

REPORT = make_report(
    iteration=12695,
    train_iters=115311,
    consumed_samples=9841584,
    consumed_tokens=20155564032,
    global_batch_size=2048,
    learning_rate=5.969e-05,
    seconds=105.22,
    samples_per_second=2048 / 105.22,
    tokens_per_second=2048 * 2048 / 105.22,
    tflops=149.02,
    lm_loss=2.345678901,
    grad_norm=0.1234,
    remaining_seconds=10_799_990.0,
)
GOLDEN = (
    " iteration    12695/  115311 | consumed samples:      9841584"
    " | consumed tokens:  20155564032 | elapsed time per iteration (s): 105.22"
    " | learning rate: 5.969E-05 | global batch size:  2048 | lm loss: 2.345679E+00"
    " | grad norm: 0.123 | number of skipped iterations:   0 | number of nan iterations:   0"
    " | samples per second: 19.464 | TFLOPs: 149.02"
    " | tokens per second: 39862.2 | remaining: 124 d 23 h |"
)
GOLDEN_FULL = (
    " iteration       42/     100 | consumed samples:          672"
    " | consumed tokens:       344064 | elapsed time per iteration (s): 0.50"
    " | learning rate: 1.000E-03 | global batch size:    16 | lm loss: 6.500000E+00"
    " | loss scale: 4096.0 | grad norm: 1.500 | num zeros: 17.0 | params norm: 33.250"
    " | curriculum seqlen:   512 | number of skipped iterations:   1"
    " | number of nan iterations:   2 | samples per second: 32.000 | TFLOPs: 0.01"
    " | tokens per second: 16384.0 |"
)


def test_training_line_is_golden() -> None:
    assert log_line.format_training_line(REPORT) == GOLDEN


def test_training_line_with_every_field_is_golden() -> None:
    assert log_line.format_training_line(full_report()) == GOLDEN_FULL


def test_tflops_that_would_be_zero_are_left_out() -> None:
    line = log_line.format_training_line(replace(REPORT, tflops=0.004))
    assert line == GOLDEN.replace(" | TFLOPs: 149.02", "")
    assert "TFLOPs: 0.01" in log_line.format_training_line(replace(REPORT, tflops=0.005001))


def test_validation_line_is_golden() -> None:
    assert log_line.format_validation_line(1000, 2.5) == (
        " validation loss at iteration 1000"
        " | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 |"
    )
    assert log_line.format_validation_line(7, 2.5, "wiki").startswith(
        " wiki loss at iteration 7 | lm loss value: "
    )


def test_perplexity_has_no_limit_and_does_not_overflow() -> None:
    assert log_line.compute_perplexity(30.0) == math.exp(30)
    assert log_line.compute_perplexity(5000.0) == math.inf
    assert math.isnan(log_line.compute_perplexity(math.nan))
    parsed = log_line.parse_validation_log_line(log_line.format_validation_line(3, 5000.0))
    assert parsed == {"name": "validation", "iteration": 3, "lm_loss": 5000.0, "ppl": math.inf}


def test_a_decoupled_rate_follows_the_other_one() -> None:
    report = replace(REPORT, decoupled_learning_rate=2.5e-3)
    for form in (log_line.format_training_line, log_line.format_short_training_line):
        line = form(report)
        assert "E-05 | decoupled l" in line
        parsed = log_line.parse_log_line(line)
        before = log_line.parse_log_line(form(REPORT))
        assert before is not None
        assert parsed == before | {"decoupled_learning_rate": 2.5e-3}


def test_short_line_fits_into_a_terminal_and_is_parsed() -> None:
    line = log_line.format_short_training_line(REPORT)
    assert len(line) <= 112
    assert line.endswith(" | tokens/s: 39862 | remaining: 124 d 23 h |")
    assert log_line.parse_log_line(f"[default7]:{line}") == {
        "iteration": 12695,
        "train_iters": 115311,
        "lm_loss": 2.3457,
        "learning_rate": 5.969e-05,
        "grad_norm": 0.123,
        "tokens_per_second": 39862.0,
    }
    parsed = log_line.parse_log_line(log_line.format_short_training_line(full_report()))
    assert parsed is not None
    assert parsed["skipped_iterations"] == 1
    assert parsed["nan_iterations"] == 2
    assert parsed["loss_scale"] == 4096
    assert parsed["curriculum_seqlen"] == 512


@pytest.mark.parametrize("prefix", ["", "[default7]:", "[rank0]: ", "3: ", "2026-01-31 12:00:00 "])
def test_parser_returns_the_numbers_that_were_printed(prefix: str) -> None:
    parsed = log_line.parse_log_line(prefix + GOLDEN_FULL + "\n")
    assert parsed is not None
    report = full_report()
    for key, value in parsed.items():
        assert value == pytest.approx(getattr(report, key), abs=0.005), key
    optional_or_derived = {
        "decoupled_learning_rate",
        "remaining_seconds",
        "dropped_loss",
        "mfu",
        "phase_seconds",
        "layer_statistics",
        "experts",
        "gigaflops_without_embeddings",
        "goodput",
        "batch_digest",
        "peak_memory_bytes",
    }
    assert set(parsed) == set(vars(report)) - optional_or_derived


def test_a_line_about_experts_has_their_numbers_at_its_end() -> None:
    numbers = {
        "largest_expert_load": 1.5,
        "smallest_expert_load": 0.25,
        "router_entropy": 2.0,
        "expert_balancing_loss": 1.0625,
        "router_z_loss": 4.5,
    }
    report = dataclasses.replace(full_report(), experts=numbers)
    line = log_line.format_training_line(report)
    assert line.startswith(log_line.format_training_line(full_report()).rstrip("|").rstrip())
    parsed = log_line.parse_log_line(line)
    assert parsed is not None
    assert {name: parsed[name] for name in numbers} == numbers


def test_parser_accepts_milliseconds_nan_and_truncated_lines() -> None:
    old = (
        "[default0]: iteration        3/     100"
        " | elapsed time per iteration (ms): 1500.5 | lm loss: NAN |"
    )
    parsed = log_line.parse_log_line(old)
    assert parsed is not None
    assert parsed["seconds"] == pytest.approx(1.5005)
    assert math.isnan(parsed["lm_loss"])
    truncated = log_line.parse_log_line(GOLDEN[: GOLDEN.index("E+00")])
    assert truncated is not None
    assert "lm_loss" not in truncated
    assert truncated["global_batch_size"] == 2048


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        log_line.format_validation_line(10, 2.0),
        GOLDEN.replace("2.345679E+00", "2.34[default3]: hi"),
    ],
)
def test_parser_rejects_other_lines(text: str) -> None:
    assert log_line.parse_log_line(text) is None


@pytest.mark.parametrize("prefix", ["", "[default7]:", "[rank0]: ", "12: "])
@pytest.mark.parametrize("name", ["validation", "wiki-en", "test"])
def test_parser_of_validation_lines(prefix: str, name: str) -> None:
    parsed = log_line.parse_validation_log_line(
        prefix + log_line.format_validation_line(1000, 2.5, name)
    )
    assert parsed == {
        "name": name,
        "iteration": 1000,
        "lm_loss": 2.5,
        "ppl": pytest.approx(12.18249),
    }
    assert log_line.parse_validation_log_line(GOLDEN) is None


def test_other_lines_that_scripts_search_are_golden() -> None:
    assert (
        log_line.format_saved_checkpoint_line(300, "/ckpt")
        == "successfully saved checkpoint at iteration     300 to /ckpt"
    )
    assert (
        log_line.format_loaded_checkpoint_line("/ckpt", 300)
        == "successfully loaded checkpoint from /ckpt at iteration 300"
    )
    assert (
        log_line.format_no_checkpoint_line("/ckpt") == "Unable to find latest file at /ckpt/latest"
    )
    assert log_line.format_kill_switch_line("/tmp/kill") == "Detected kill switch at /tmp/kill"
    assert log_line.format_exit_duration_line(1190.0) == "exiting program after 1190 minutes"
    assert log_line.format_exit_iteration_line(20) == "exiting program at iteration 20"
    assert (
        log_line.format_skipped_range_line(8401, 8800)
        == "Skipped iterations 8401 to 8800 due to --skip-train-iteration-range flag."
    )
    assert "spike guard" in log_line.format_skipped_range_line(51, 75, by_guard=True)


def test_task_line_has_each_score_with_six_digits() -> None:
    line = log_line.format_task_line(40, "arc_easy", {"acc": 0.25, "acc_norm": 1 / 3})
    assert line == " task arc_easy at iteration 40 | acc: 0.25 | acc_norm: 0.333333 |"


def test_line_of_slow_ranks_names_the_first_eight_and_counts_the_others() -> None:
    slow = {f"rank {rank} on n{rank}": 2.0 - rank / 100 for rank in range(11)}
    line = log_line.format_slow_ranks_line(7, slow, ("rank 0 on n0", 2.0), 0.0012)
    assert "slow ranks at iteration 7: rank 0 on n0 takes 2.00, rank 1 on n1 takes 1.99" in line
    assert "rank 7 on n7 takes 1.93, and 3 more ranks, which take less x the median" in line
    assert "rank 8" not in line
    assert "of 1.2 ms for the forward pass of a block" in line
    assert log_line.parse_slow_ranks_line(f"[n0] {line}\n") == line
    assert log_line.parse_slow_ranks_line("a line about something else") is None
    none = log_line.format_slow_ranks_line(7, {}, ("rank 3 on n3", 1.02), 0.0012)
    assert log_line.parse_slow_ranks_line(none) == ""
    assert "the slowest, rank 3 on n3, takes 1.02" in none


@pytest.mark.parametrize("before_start", [False, True])
def test_line_of_the_kill_switch_gives_its_path_back(before_start: bool) -> None:
    line = log_line.format_kill_switch_line("/runs/a b/stop", before_start=before_start)
    assert log_line.parse_kill_switch_line(f"[default0]:{line}\n") == "/runs/a b/stop"
    assert log_line.parse_kill_switch_line("another line") is None
