"""The law of a ladder: exact where it is known, near published runs, refused for bad results."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpus import JSONL

from megatron.base.errors import ConfigError, DataError
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands import ladder
from megatron.extras.planner.ladder.law import (
    Law,
    Runs,
    bootstrap,
    find_interval,
    fit,
    measure_noise,
)
from megatron.extras.planner.ladder.prediction import design, fit_rows, predict
from megatron.extras.planner.ladder.runs import (
    LadderRow,
    choose_best,
    count_inner_parameters,
    find_rates,
    measure_seeds,
    read_ladder,
    read_table,
)
from megatron.plan.resolve import resolve

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
OLMO = FIXTURES / "ladder/olmo.csv"
SIZES = np.array([2e7, 5e7, 1e8, 4e8, 1e9])


def make_runs(law: Law, noise: float = 0.0, seed: int = 1) -> Runs:
    parameters, tokens = (each.ravel() for each in np.meshgrid(SIZES, SIZES * 20))
    loss = law.predict(parameters, tokens)
    return Runs(parameters, tokens, loss * np.exp(np.random.default_rng(seed).normal(0, noise, 25)))


@settings(max_examples=25, deadline=None)
@given(
    st.floats(1.0, 2.5), st.floats(100, 900), st.floats(300, 3000), st.floats(0.25, 0.6),
    st.floats(0.25, 0.6),
)  # fmt: skip
def test_a_law_without_noise_is_found(e: float, a: float, b: float, c: float, d: float) -> None:
    law = Law(e, a, b, c, d)
    runs = make_runs(law)
    found = fit(runs)
    # Terms of less than a thousandth cannot be told apart.
    assert measure_noise(runs, found) < 1e-6
    assert float(found.predict(5e9, 1e11)) == pytest.approx(float(law.predict(5e9, 1e11)), rel=2e-3)


def test_a_law_whose_terms_are_hard_to_tell_apart_is_found() -> None:
    """The refinement needs more than 300 steps."""
    law = Law(1.0, 460.0, 302.0, 0.265625, 0.59375)
    runs = make_runs(law)
    assert measure_noise(runs, fit(runs)) < 1e-9


def test_a_bad_run_does_not_bend_the_law() -> None:
    law = Law(1.8, 480, 2100, 0.35, 0.37)
    runs = make_runs(law, 0.002)
    runs.loss[3] *= 1.3
    found = fit(runs)
    assert float(found.predict(5e9, 1e11)) == pytest.approx(float(law.predict(5e9, 1e11)), rel=0.02)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    law = Law(1.8, 480, 2100, 0.35, 0.37)
    truth = float(law.predict(4e9, 8e10))
    inside = 0
    for seed in range(30):
        runs = make_runs(law, 0.004, seed)
        found = fit(runs)
        low, high = find_interval(bootstrap(runs, found, 60, seed), runs, found, 4e9, 8e10)
        inside += low < truth < high
    assert inside >= 26


def test_the_interval_is_that_of_a_single_run() -> None:
    """Among many rungs the law is known well, and a single run still differs from it."""
    law = Law(1.8, 480, 2100, 0.35, 0.37)
    runs = make_runs(law, 0.01)
    found = fit(runs)
    low, high = find_interval(bootstrap(runs, found, 60), runs, found, 1e8, 2e9)
    drawn = float(law.predict(1e8, 2e9)) * np.exp(np.random.default_rng(7).normal(0, 0.01, 500))
    assert 0.88 < np.mean((drawn > low) & (drawn < high)) < 1


def test_the_published_ladder_of_olmo() -> None:
    rows = read_table(str(OLMO))
    small, targets = rows[:16], rows[16:]
    fitted = fit_rows(small)
    assert fitted.noise < 0.004
    for row, missed in zip(targets, (-0.019, -0.037), strict=True):
        found = predict(fitted, row.parameters, row.tokens)
        assert found.loss / row.loss - 1 == pytest.approx(missed, abs=0.001)
        assert found.low < row.loss < found.high
        assert found.warning is not None
        assert "extrapolates" in found.warning
    below = [row for row in small if row.parameters < 1e9]
    law = fit(choose_best(below))
    for row in small:
        if row.parameters > 1e9:
            assert float(law.predict(row.parameters, row.tokens)) == pytest.approx(
                row.loss, rel=0.0092
            )


def test_a_ladder_of_a_laptop_foretells_its_largest_size() -> None:
    rows = read_table(str(FIXTURES / "ladder/laptop.csv"))
    largest = max(row.parameters for row in rows)
    fitted = fit_rows([row for row in rows if row.parameters < largest])
    targets = [row for row in rows if row.parameters == largest]
    assert len(targets) == 4
    for row in targets:
        found = predict(fitted, row.parameters, row.tokens)
        assert found.loss == pytest.approx(row.loss, rel=0.007)
        assert found.low < row.loss < found.high


def test_the_optimal_tokens_are_a_minimum_for_their_compute() -> None:
    law = Law(1.8, 480, 2100, 0.35, 0.37)
    tokens = law.find_optimal_tokens(1e9)
    best = float(law.predict(1e9, tokens))
    for factor in (0.8, 1.25):
        assert float(law.predict(1e9 * factor, tokens / factor)) > best


def make_rows(lr: float = 1e-3) -> list[LadderRow]:
    runs = make_runs(Law(1.8, 480, 2100, 0.35, 0.37))
    table = zip(runs.parameters, runs.tokens, runs.loss, strict=True)
    return [LadderRow("x", float(n), float(d), lr, 1, float(loss)) for n, d, loss in table]


def test_rates_and_seeds() -> None:
    rows = make_rows()
    size, tokens, best = rows[7].parameters, rows[7].tokens, 2e-3
    for lr in (5e-4, 1e-3, 4e-3, 8e-3):
        for seed, more in ((1, -0.01), (2, 0.01)):
            loss = rows[7].loss + 0.1 * np.log(lr / best) ** 2 + more
            rows.append(LadderRow("x", size, tokens, lr, seed, float(loss)))
    assert find_rates(rows[25:]) == {(size, tokens): pytest.approx(best, rel=1e-6)}
    assert measure_seeds(rows[25:]) == pytest.approx(0.02 / 2**0.5)
    fitted = fit_rows(rows)
    assert len(fitted.runs.loss) == 25
    found = predict(fitted, size, tokens)
    assert "best rates of 1 run " in found.lr_reason
    assert found.warning is None
    assert "published step law" in predict(fit_rows(make_rows()), size, tokens).lr_reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("parameters,tokens\n1,2\n", "it has no column loss"),
        ("parameters,tokens,loss\n1,2,three\n", "a value is no number"),
        ("parameters,tokens,loss\n1\n", "a value is no number"),
    ],
)
def test_a_table_without_its_numbers_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "results.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"cannot be read as results: {reason}. It must be CSV"):
        read_table(str(path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows[:5], "5 runs are too few"),
        (lambda rows: [row for row in rows if row.parameters < 6e7], "have 2 sizes"),
        (lambda rows: [row for row in rows if row.tokens < 6e7 * 20], "have 2 numbers of tokens"),
        (lambda rows: [*rows[:-1], LadderRow("x", 1e9, 1e10, 1e-3, 1, float("nan"))], "diverged"),
        (lambda rows: [*rows[:-1], LadderRow("x", 1e9, 1e10, 1e-3, 1, float("inf"))], "diverged"),
        (lambda rows: [*rows[:-1], LadderRow("x", 0.0, 1e10, 1e-3, 1, 3.0)], "has 0 parameters"),
    ],
)
def test_results_that_give_no_law_are_refused(change: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        fit_rows(change(make_rows()))


def test_the_command_foretells_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ladder.main(["fit", str(OLMO)]) == 0
    assert "runs differ from it by" in capfd.readouterr().out
    size = ["--parameters", "7e9", "--tokens", "4e12"]
    assert ladder.main(["predict", str(OLMO), *size]) == 0
    printed = capfd.readouterr().out
    assert "(95 %)" in printed
    flags = ["--preset", "pythia-1b", "--vocab-size", "50304", "--micro-batch-size", "1"]
    assert ladder.main(["predict", str(OLMO), "--json", "--", *flags]) == 0
    found = json.loads(capfd.readouterr().out)["prediction"]
    assert 0.7e9 < found["parameters"] < 1.1e9
    assert found["tokens"] == found["optimal_tokens"]
    for wrong in (
        ["predict", str(OLMO)],
        ["predict", str(OLMO), "--parameters", "-1", "--tokens", "5"],
        ["predict", str(OLMO), *size, "--", *flags],
        ["fit", str(OLMO), "--", *flags],
        ["fit", str(tmp_path / "none.csv")],
        ["run", str(tmp_path / "none.yaml")],
    ):
        assert ladder.main(wrong) == 2, wrong
        assert "error" in capfd.readouterr().err.lower()


def describe(tmp_path: Path, **changes: object) -> str:
    rung = {
        "flags": "--num-layers 1 --hidden-size 16 --num-attention-heads 1",
        "tokens": [512, 1024],
    }
    found = {
        "folder": str(tmp_path / "runs"),
        "flags": "--data-path x --vocab-size 300 --seq-length 32 --micro-batch-size 2",
        "rungs": [{**rung, "lr": 1e-3}],
        **changes,
    }
    path = tmp_path / "ladder.yaml"
    path.write_text(yaml.safe_dump(found))
    return str(path)


def test_a_ladder_lists_its_runs(tmp_path: Path) -> None:
    rungs = read_ladder(describe(tmp_path, seeds=[1, 2]))
    assert [(rung.tokens, rung.seed) for rung in rungs] == [
        (512, 1),
        (512, 2),
        (1024, 1),
        (1024, 2),
    ]
    # One layer of width 16, the learned positions and the last norm.
    assert rungs[0].parameters == 12 * 16**2 + 13 * 16 + 32 * 16 + 2 * 16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flags": "--train-iters 5"}, "--train-iters, which the ladder sets"),
        ({"rung": 1}, "must have the keys"),
        ({"rungs": 5}, "rungs is 5, and must be a list"),
        ({"flags": "--data-path 'x"}, "No closing quotation"),
        ({"rungs": [{"flags": "x"}]}, "rung 0 must have the keys"),
        ({"rungs": [{"flags": "--no-such-flag", "tokens": 5, "lr": 1}]}, "no-such-flag"),
        ({"rungs": [{"flags": "--hidden-size 15 --num-attention-heads 2 --num-layers 1",
                     "tokens": 512, "lr": 1e-3}]}, "rung 0"),
        ({"seeds": [1, 1]}, "twice"),
    ],
)  # fmt: skip
def test_a_wrong_ladder_is_refused(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_ladder(describe(tmp_path, **changes))


@pytest.mark.full
def test_a_ladder_of_real_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from megatron.config.data import TokenizerConfig
    from megatron.extras.preparation.preprocess.build_dataset import PreprocessJob, preprocess

    vocabulary = FIXTURES / "openwebtext-100/gpt2-tiny-vocab.json"
    merges = FIXTURES / "openwebtext-100/gpt2-tiny-merges.txt"
    tokenizer = TokenizerConfig(vocab_file=str(vocabulary), merge_file=str(merges))
    job = PreprocessJob((str(JSONL),), str(tmp_path / "text"), tokenizer, append_eod=True)
    preprocess(job, log=lambda line: None)
    path = describe(
        tmp_path,
        flags=f"--data-path {tmp_path}/text_text_document --vocab-file {vocabulary} --merge-file "
        f"{merges} --seq-length 32 --micro-batch-size 4 --split 90,10,0 --eval-iters 2 "
        "--hidden-dropout 0 --attention-dropout 0 --distributed-backend gloo",
        rungs=[
            {"flags": "--num-layers 1 --num-attention-heads 1 --hidden-size 16", "lr": 1e-2,
             "tokens": [512, 1024]},
            {"flags": "--num-layers 1 --num-attention-heads 1 --hidden-size 32", "lr": 1e-2,
             "tokens": [512]},
        ],
    )  # fmt: skip
    assert ladder.main(["run", path, "--only", "1"]) == 0
    assert "1 of 3 runs are complete" in capfd.readouterr().out
    assert ladder.main(["run", path]) == 0
    printed = capfd.readouterr().out
    assert "3 of 3 runs are complete" in printed
    assert printed.count("training, see") == 2
    assert len(read_table(str(tmp_path / "runs/results.csv"))) == 3
    assert ladder.main(["fit", path]) == 2
    assert "3 runs are too few" in capfd.readouterr().err
    # A run that fails is named, and the others go on.
    rungs = read_ladder(path)
    (rungs[0].folder / "metrics.jsonl").unlink()
    for checkpoint in rungs[0].folder.glob("latest*"):
        checkpoint.write_text("nonsense")
    assert ladder.main(["run", path]) == 1
    assert f"{rungs[0].name} failed" in capfd.readouterr().err


def test_a_number_of_layers_gives_a_configuration(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    given = ["--vocab-size", "50304", "--weight-decay", "0.2", "--num-query-groups", "1"]
    command = ["design", "--depth", "9", str(OLMO), "--write", str(path)]
    assert ladder.main([*command, "--", *given]) == 0
    printed = capfd.readouterr().out
    assert "64 for each layer" in printed
    assert "(95 %)" in printed
    loaded = load_config(["--config", str(path)])
    plan = resolve(loaded.config, 1)
    plan.raise_on_errors()
    model = loaded.config.model
    # 640 is 5 heads of 128. 576 is none.
    assert (model.hidden_size, model.num_attention_heads) == (640, 5)
    assert model.ffn_hidden_size == 1792
    assert (model.num_query_groups, loaded.config.optimizer.weight_decay) == (1, 0.2)
    size = count_inner_parameters(plan)
    assert plan.train_tokens == pytest.approx(20 * size, rel=1e-3)
    rate = 1.79 * size**-0.713 * (20 * size) ** 0.307
    assert loaded.config.optimizer.lr == pytest.approx(rate, rel=5e-3)
    assert "weight_decay: 0.2  # --weight-decay" in path.read_text()
    for wrong in (["--depth", "0"], ["--depth", "4", "--tokens-per-parameter", "nan"]):
        assert ladder.main(["design", *wrong]) == 2
        assert "--tokens-per-parameter" in capfd.readouterr().err


def test_rates_of_a_ladder_with_a_parametrization_transfer() -> None:
    rows = [
        LadderRow("x", n, d, lr, 1, 3 + 1 / np.log10(n) + 1 / np.log10(d) + np.log(lr / 4e-3) ** 2)
        for n in (1e5, 1e6, 1e7) for d in (1e7, 3e7, 1e8) for lr in (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
    ]  # fmt: skip
    fitted = fit_rows(rows, "mup")
    flags = ["--parametrization", "mup", "--base-width", "64", "--vocab-size", "300"]
    transferred = design(8, 20, flags, fitted).loaded.config.optimizer.lr
    assert transferred == pytest.approx(4e-3, rel=1e-3)
    assert design(8, 20, flags[4:], fit_rows(rows)).loaded.config.optimizer.lr != transferred
    kept = design(8, 20, flags, fitted, keep_architecture=True).loaded.config.model
    assert kept.glu_activation is None
    assert kept.normalization == "LayerNorm"


def test_a_ladder_is_submitted_as_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ladder.main(["run", describe(tmp_path), "--submit=--time=10"]) == 2
    assert "needs the command sbatch" in capfd.readouterr().err


def write_rows(path: Path, rows: list[str], columns: str = "parameters,tokens,loss") -> str:
    path.write_text("\n".join([columns, *rows]) + "\n")
    return str(path)


def test_results_without_rates_are_fitted(tmp_path: Path) -> None:
    """Three runs of a size may be three seeds of another program."""
    rows = [
        f"{n:g},{d:g},{1.8 + 500 / n**0.35 + 2000 / d**0.37 + seed / 1000}"
        for n in (1e6, 1e7, 1e8) for d in (1e8, 1e9, 1e10) for seed in range(3)
    ]  # fmt: skip
    assert ladder.main(["fit", write_rows(tmp_path / "a.csv", rows)]) == 0


def test_runs_that_show_no_law_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The losses do not fall with the size."""
    rows = [
        f"{n:g},{d:g},{3 + number % 3 / 100}"
        for number, (n, d) in enumerate((n, d) for n in (1e4, 2e4, 3e4) for d in (1e5, 2e5, 3e5))
    ]
    assert ladder.main(["fit", write_rows(tmp_path / "a.csv", rows)]) == 2
    assert "do not determine a law" in capfd.readouterr().err


def test_a_question_far_from_all_runs_is_marked(capfd: pytest.CaptureFixture[str]) -> None:
    assert ladder.main(["predict", str(OLMO), "--parameters", "1e6", "--tokens", "1e8"]) == 0
    printed = capfd.readouterr().out
    assert "Laws do not hold for such small runs" in printed
    assert "not known, as it is far" in printed
    assert ladder.main(["predict", str(OLMO), "--parameters", "1e6"]) == 2
    assert "give --tokens" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--num-layers 3", "Leave out --num-layers"),
        ("--bf16 --fp16", "exclude each other"),
        ("--parametrization completep --base-width 64", "needs --base-depth"),
        ("--num-query-groups 3", "must divide"),
    ],
)
def test_a_design_with_errors_is_not_written(
    flags: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    command = ["design", "--depth", "4", "--write", str(path)]
    assert ladder.main([*command, "--", "--vocab-size", "300", *flags.split()]) == 2
    assert reason in capfd.readouterr().err
    assert not path.exists()
    assert ladder.main(["design", "--depth", "4", "--write", str(tmp_path / "x/y.yaml")]) == 2
    assert "its folder does not exist" in capfd.readouterr().err
    path.write_text("of somebody")
    assert ladder.main([*command, "--", "--vocab-size", "300"]) == 2
    assert f"{path} exists. Give another name" in capfd.readouterr().err
    assert path.read_text() == "of somebody"


def test_a_given_length_and_schedule_are_kept() -> None:
    flags = [
        "--vocab-size",
        "300",
        "--train-iters",
        "50",
        "--lr-decay-style",
        "constant",
        "--lr",
        "2e-3",
    ]
    found = design(4, 20, flags, None)
    assert found.tokens == 50 * found.loaded.config.batch.global_batch_size * 2048  # type: ignore[operator]
    assert found.loaded.config.batch.train_samples is None
    assert found.loaded.config.optimizer.min_lr == 0


def test_a_run_of_other_flags_is_no_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = describe(tmp_path)
    folder = read_ladder(path)[0].folder
    folder.mkdir(parents=True)
    (folder / "flags.json").write_text('["--other"]')
    # A start that failed may be corrected.
    assert ladder.main(["run", path, "--list"]) == 0
    assert "not complete" in capfd.readouterr().out
    (folder / "metrics.jsonl").write_text("")
    assert ladder.main(["run", path, "--list"]) == 2
    assert "are not those of its training" in capfd.readouterr().err


def test_the_best_rate_moves_with_the_width_only_without_mup() -> None:
    """162 real runs of widths 32 to 256."""
    best = {}
    for name in ("standard", "mup"):
        rates = find_rates(read_table(str(FIXTURES / f"ladder/rates_{name}.csv")))
        smallest, *_, largest = [rates[key] for key in sorted(rates)]
        best[name] = smallest / largest
    assert 1 / 1.5 < best["mup"] < 1.5
    assert best["standard"] > 5
