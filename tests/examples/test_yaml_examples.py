"""The YAML files of examples/: each is planned for its GPUs, and the smallest trains."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_corpus

from megatron.base.errors import ConfigError
from megatron.commands import plan
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.memory import Verdict
from megatron.extras.planner.prediction import predict_plan
from megatron.observe.metrics import read_metrics
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
GPUS = {
    "laptop": 1,
    "laptop-experts": 1,
    "gpt-oss-20b": 8,
    "olmoe-1b-7b": 64,
    "llama3-160m": 1,
    "llama3-1b": 8,
    "llama3-8b": 64,
    "llama3-70b": 512,
    "hybrid-1b": 8,
}
MEMORY_GIB = {"llama3-160m": 23.5}
"""Memory of the GPUs that a file is for, if it is not that of an A100 of 80 GB."""
PARAMETERS = {
    "llama3-160m": 159_861_504,
    "olmoe-1b-7b": 6_919_161_856,
    # The published sizes of Llama 3. The 70B is padded to 129,024 ids for 8 tensor-parallel ranks.
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496 + 2 * (129_024 - 128_256) * 8192,
}


def read_example(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text()


def plan_example(name: str) -> Plan:
    loaded = load_config(["--config", str(FOLDER / f"{name}.yaml")])
    plan = resolve(loaded.config, GPUS[name], loaded.origin)
    assert plan.errors == ()
    assert [text for text in plan.warnings if "no effect" in text] == []
    return plan


def find_number(name: str, pattern: str) -> int:
    """Return the number that a comment of the file gives."""
    found = re.search(pattern, read_example(name))
    assert found is not None, pattern
    return int(found[1].replace(",", ""))


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(GPUS)


@pytest.mark.parametrize("name", GPUS)
def test_the_command_of_a_file_starts_its_processes(name: str) -> None:
    text = read_example(name)
    command = re.search(rf"^#     ((?:.* \\\n#  )?.*)--config examples/{name}.yaml$", text, re.M)
    assert command is not None
    processes = 1
    for flag in ("--nnodes", "--nproc-per-node"):
        found = re.search(rf"{flag} (\d+)", command[1])
        processes *= 1 if found is None else int(found[1])
    assert processes == GPUS[name]
    # One device needs no launcher.
    assert ("torchrun" in command[1]) == (processes > 1)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_file_has_the_numbers_of_its_comments(name: str) -> None:
    plan = plan_example(name)
    assert plan.parameters == PARAMETERS[name]
    batch = plan.config.batch
    tokens = plan.batch_size.final * plan.config.model.seq_length
    assert tokens == find_number(name, r"global_batch_size: .* # ([\d,]+) tokens")
    if name != "llama3-160m":
        assert plan.train_iters == find_number(name, r"train_samples: .*, ([\d,]+) iterations")
        microbatches = find_number(name, r"global_batch_size: .*: (\d+) microbatches")
        assert plan.get_num_microbatches(plan.batch_size.final) == microbatches
    # Nothing of the last batch is left out, except in the first file.
    assert name == "llama3-160m" or batch.train_samples == plan.train_iters * plan.batch_size.final
    ranks = predict_plan(plan, load_hardware("a100-80g")).memory
    tensors = max(rank.total - rank.fixed for rank in ranks)
    assert round(tensors / 2**30) == find_number(name, r"micro_batch_size: .* # (\d+) GiB")
    # The total has what lies outside of tensors, such as the context.
    assert max(rank.total for rank in ranks) / 1e9 < find_number(name, r"(\d+) GB\b")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_file_says_if_it_only_may_fit(name: str) -> None:
    hardware = load_hardware("a100-80g")
    memory = MEMORY_GIB.get(name, hardware.memory_gib)
    verdict = predict_plan(plan_example(name), replace(hardware, memory_gib=memory)).verdict
    assert verdict is not Verdict.DOES_NOT_FIT
    assert ("may fit" in read_example(name)) == (verdict is Verdict.MAY_FIT)


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt-oss-20b", 20_914_757_184), ("hybrid-1b", 1_279_726_848)]
)
def test_a_file_fits_on_the_gpus_that_it_names(name: str, parameters: int) -> None:
    plan = plan_example(name)
    assert plan.parameters == parameters
    prediction = predict_plan(plan, load_hardware("h100"))
    assert prediction.verdict is Verdict.FITS
    peak = max(rank.total for rank in prediction.memory) / 2**30
    text = re.sub(r"\n# ", " ", read_example(name))
    assert f"{peak:.1f} GiB and {prediction.seconds:.1f} s" in text


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with the files that the smallest example names."""
    for name in ("pretrain_gpt.py", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(
            f"{tiny_corpus.REFERENCE_PREFIX}{suffix}",
            tmp_path / "data" / f"corpus_text_document{suffix}",
        )
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(tiny_corpus.VOCAB, tmp_path / "tokenizer" / "vocab.json")
    shutil.copy(tiny_corpus.MERGES, tmp_path / "tokenizer" / "merges.txt")
    return tmp_path


@pytest.mark.parametrize("name", ["laptop", "laptop-experts"])
def test_the_smallest_file_is_planned_for_a_cpu(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([str(FOLDER / f"{name}.yaml"), "--world-size", "1"]) == 0
    assert "devices             CPUs. The run has no GPU" in capsys.readouterr().out


@pytest.mark.when_changed("examples/*", "tests/examples/test_yaml_examples.py")
@pytest.mark.parametrize(
    ("name", "saved"), [("laptop", "laptop-llama"), ("laptop-experts", "laptop-experts")]
)
def test_the_smallest_file_trains_without_a_launcher(name: str, saved: str, clone: Path) -> None:
    words = f"pretrain_gpt.py --config examples/{name}.yaml --train-iters 20 --log-interval 1"
    process = tiny_corpus.command(*words.split(), "--lr-warmup-iters", "2", folder=clone)
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, printed + errors
    assert "training is complete at iteration 20" in printed
    # Values of the flags win, and the file gives the rest.
    losses = [
        entry["lm_loss"]
        for entry in read_metrics(clone / "runs" / saved / "metrics.jsonl")
        if "lm_loss" in entry
    ]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.3
    assert (clone / "runs" / saved / "global_step20").is_dir()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  hidden_size: 128", "  hiden_size: 128", r"laptop.yaml:11 has an unknown key"),
        ("  lr: 1e-3", "  lr: fast", r"optimizer.lr: 'fast' \(.*laptop.yaml:39\)"),
        ("  lr: 1e-3", "  lr: 1e-3\n  lr: 2e-3", r"laptop.yaml:40 gives 'lr' again \(.* line 39\)"),
        ("batch:", "batches:", r"laptop.yaml:31 has an unknown group 'batches'.*'batch'"),
    ],
)
def test_a_mistake_is_reported_with_file_and_line(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    text = read_example("laptop")
    assert text.count(f"{old}\n") == 1
    path = tmp_path / "laptop.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_config(["--config", str(path)])
