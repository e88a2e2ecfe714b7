"""All commands of docs/migrating.md, with small checkpoints of each trainer.

A command runs in this process or in the pool. A command for several GPUs is planned as it is
printed, at its full size. Sizes in the other commands are replaced, and each replacement must be
found on the page.
"""

import os
import re
import shlex
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tiny_corpus
from convert.megatron_writers import read_saved, write_megatron_deepspeed, write_megatron_lm
from convert.neox_writer import write_neox
from convert.other_trainers import (
    NANOGPT_CONFIG,
    Model,
    build_llm_baselines_optimizer,
    build_nanogpt,
    build_nanogpt_optimizer,
    fill_states,
    save_llm_baselines,
    save_nanogpt,
)
from convert.test_from_fms import FIXTURES, MODEL
from convert.test_from_megatron import SIZES
from convert.test_from_neox import RUN, build
from process_pool import ProcessPool, pretrain, succeed

from megatron.checkpoint.folder import list_saved_iterations
from megatron.checkpoint.load import open_checkpoint
from megatron.commands import plan
from megatron.data.indexed import IndexedDatasetWriter
from megatron.extras.interop.commands import convert_checkpoint
from megatron.extras.interop.convert.fields import normalise_model
from megatron.extras.interop.convert.from_trainer import write_nanogpt_words
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.preparation.commands import import_tokens

PAGE = tiny_corpus.ROOT / "docs" / "migrating.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TOOLS: dict[str, Callable[[list[str]], int]] = {
    "tools/convert_checkpoint.py": convert_checkpoint.main,
    "tools/import_tokens.py": import_tokens.main,
}
GPT2_ROWS = 50304
FMS_ROWS = 48
"""Ids of the model in the fixtures of fms-fsdp."""


@dataclass(frozen=True)
class Origin:
    """A section of the page."""

    prepare: Callable[[Path, ProcessPool], None]
    """Makes the files that the commands name, in a folder."""
    replaced: dict[str, str]
    """Text on the page -> text that is run."""


def pretrain_in(folder: str, argv: list[str]) -> None:
    """Run a command line on this rank, with relative paths."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        pretrain(argv)
    finally:
        os.chdir(before)


def prepare_megatron(folder: Path, pool: ProcessPool) -> None:
    """Train here, and write the checkpoint as Megatron would. The tests of the writers compare."""
    (folder / "gpt2-vocab.json").symlink_to(tiny_corpus.VOCAB)
    (folder / "gpt2-merges.txt").symlink_to(tiny_corpus.MERGES)
    for suffix in (".bin", ".idx"):
        link = folder / "data" / f"corpus_text_document{suffix}"
        link.symlink_to(f"{tiny_corpus.REFERENCE_PREFIX}{suffix}")
    flags = (
        f"{SIZES} --data-path data/corpus_text_document --save own --vocab-file gpt2-vocab.json "
        "--merge-file gpt2-merges.txt --exit-interval 2"
    )
    succeed(pool.run(1, pretrain_in, str(folder), flags.split()))


def prepare_megatron_deepspeed(folder: Path, pool: ProcessPool) -> None:
    prepare_megatron(folder, pool)
    saved = read_saved(open_checkpoint(folder / "own", 2))
    write_megatron_deepspeed(folder / "old" / "checkpoints", saved, 2, 1, dp=2, prefix="bf16_")


def prepare_megatron_lm(folder: Path, pool: ProcessPool) -> None:
    prepare_megatron(folder, pool)
    saved = read_saved(open_checkpoint(folder / "own", 2))
    write_megatron_lm(folder / "old" / "checkpoints", saved, 2, 1, core=True)


def write_tokens(path: Path) -> None:
    """Write a token file with documents of 40 tokens, the last of which ends the document."""
    tokens = np.random.default_rng(0).integers(0, 50256, (30, 40), dtype=np.uint16)
    tokens[:, -1] = 50256
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens.tofile(path)


def prepare_nanogpt(folder: Path, pool: ProcessPool) -> None:
    data = folder / "nanoGPT" / "data" / "openwebtext"
    write_tokens(data / "train.bin")
    write_tokens(data / "val.bin")
    config = NANOGPT_CONFIG | {"max_iters": 2002, "lr_decay_iters": 2002, "eval_iters": 2}
    model = build_nanogpt(config, GPT2_ROWS)
    optimizer = build_nanogpt_optimizer(model, config)
    fill_states(model, optimizer, 2000)
    save_nanogpt(folder / "nanoGPT" / "out" / "ckpt.pt", model, optimizer, config, 2000)


def prepare_neox(folder: Path, pool: ProcessPool) -> None:
    model, keys = build("neox", parallel=True, tied=False)
    text = RUN.format(pipe=1, ranks=2) + keys
    write_neox(folder / "old" / "checkpoints", model, 2, text, layer_files=True)
    with IndexedDatasetWriter(folder / "data" / "pile_text_document", np.uint16) as writer:
        for _ in range(40):
            writer.add_document(np.arange(60, dtype=np.uint16))
    # The two files of the first command, which is planned.
    (folder / "125M.yml").write_text(text)
    (folder / "local_setup.yml").write_text(
        f"vocab-file: {tiny_corpus.VOCAB}\nmerge-file: {tiny_corpus.MERGES}\n"
    )


def prepare_llm_baselines(folder: Path, pool: ProcessPool) -> None:
    root = folder / "llm-baselines"
    write_tokens(root / "src" / "data" / "datasets" / "slimpajama6B" / "train.bin")
    model = Model(12, 24, 16, GPT2_ROWS, bias=False, inner=256)
    optimizer = build_llm_baselines_optimizer(model)
    fill_states(model, optimizer, 20000)
    path = root / "exps" / "llama" / "ckpts" / "latest" / "main.pt"
    # 12 heads of 2 channels, as on the page.
    save_llm_baselines(path, model, optimizer, 20000)


def write_arrow(path: Path) -> None:
    """Write an Arrow file of fms-fsdp: each record batch is one document in the column tokens."""
    path.parent.mkdir(parents=True)
    schema = pa.schema([("tokens", pa.uint32())])
    generator = np.random.default_rng(0)
    with pa.ipc.new_file(str(path), schema) as file:
        # More documents than logical shards.
        for length in generator.integers(1, 60, 400):
            tokens = generator.integers(1, FMS_ROWS, length, dtype=np.uint32)
            file.write(pa.record_batch([pa.array(tokens)], schema=schema))


def prepare_fms(folder: Path, pool: ProcessPool) -> None:
    for name in ("web", "code"):
        write_arrow(folder / "data" / "tokens" / name / "part0.arrow")
    with tarfile.open(FIXTURES / "step_5_ckp.tar.gz") as archive:
        archive.extractall(folder / "ckpt" / "checkpoints")


ORIGINS = {
    "Megatron-DeepSpeed": Origin(prepare_megatron_deepspeed, {"global_step2000": "global_step2"}),
    "Megatron-LM": Origin(
        prepare_megatron_lm,
        {"global_step2000": "global_step2", "--vocab-size 50257": "--vocab-size 5000"},
    ),
    "GPT-NeoX": Origin(
        prepare_neox,
        {
            "global_step143000": "global_step3",
            "--vocab-size 50277": "--vocab-size 60",
            "data/pile_text_document": "data/pile_text_document --exit-interval 5",
        },
    ),
    "nanoGPT": Origin(prepare_nanogpt, {}),
    "llm-baselines": Origin(
        prepare_llm_baselines,
        {
            "--n_embd 768": "--n_embd 24",
            "--sequence_length 512": "--sequence_length 16",
            "--iterations 25000": "--iterations 20002",
            "--batch_size 32 --acc_steps 8": "--batch_size 2 --acc_steps 1 --eval_batches 1",
        },
    ),
    "fms-fsdp": Origin(
        prepare_fms,
        {
            "step_20000_ckp": "step_5_ckp",
            "global_step20000": "global_step5",
            "--model_variant=llama2_7b --seq_length=4096 --batch_size=2": MODEL,
            "--num_steps=1000000": "--num_steps=7 --eval-iters 1",
        },
    ),
}


def read_sections() -> dict[str, list[str]]:
    """Return the blocks of commands below each heading."""
    sections: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]:
        title = section.partition("\n")[0]
        blocks = _BLOCK.findall(section)
        assert all(language == "bash" for language, _ in blocks), title
        if blocks:
            sections[title] = [code for _, code in blocks]
    return sections


def run_command(words: Sequence[str], folder: Path, pool: ProcessPool) -> None:
    """Run a command of the page.

    Raises:
        AssertionError: it fails, or it is no command that this test can run.
    """
    assert words[0] == "python", f"no runner for {words}"
    script = words[1]
    arguments = list(words[2:])
    if script == "pretrain_gpt.py":
        succeed(pool.run(1, pretrain_in, str(folder), arguments))
    else:
        assert script in TOOLS, f"no runner for {words}"
        assert TOOLS[script](arguments) == 0, words


def test_every_section_with_commands_has_an_origin() -> None:
    assert read_sections().keys() == ORIGINS.keys()


@pytest.mark.parametrize("title", ORIGINS)
def test_the_commands_of_the_page(
    title: str,
    pool: ProcessPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    origin = ORIGINS[title]
    origin.prepare(tmp_path, pool)
    missing = set(origin.replaced)
    for number, block in enumerate(read_sections()[title]):
        if block.startswith("torchrun "):
            script = tmp_path / f"block{number}.sh"
            script.write_text(block, encoding="utf-8")
            assert plan.main([str(script)]) == 0
            continue
        for theirs, ours in origin.replaced.items():
            if theirs in block:
                missing.discard(theirs)
                block = block.replace(theirs, ours)
        for line in block.replace("\\\n", " ").splitlines():
            run_command(shlex.split(line), tmp_path, pool)
    assert not missing, "these texts are no longer on the page"
    # The run went on where the other trainer's had ended.
    (start,) = list_saved_iterations(tmp_path / "runs" / "imported")
    assert max(list_saved_iterations(tmp_path / "runs" / "new")) == start + 2


def test_the_recipe_of_nanogpt_is_its_default_configuration() -> None:
    """The command on the page, and what the import makes of train.py's defaults, are the same."""
    defaults = NANOGPT_CONFIG | {
        "gradient_accumulation_steps": 40,
        "batch_size": 12,
        "block_size": 1024,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "learning_rate": 6e-4,
        "max_iters": 600000,
        "warmup_iters": 2000,
        "lr_decay_iters": 600000,
        "min_lr": 6e-5,
        "dtype": "bfloat16",
    }
    (recipe,) = (each for each in read_sections()["nanoGPT"] if each.startswith("torchrun"))
    words = shlex.split(recipe.replace("\\\n", " "))
    ours = load_config(words[words.index("pretrain_gpt.py") + 1 :]).config
    theirs = load_config(
        [*write_nanogpt_words(Path("ckpt.pt"), defaults), "--vocab-size", "50257"]
    ).config
    assert normalise_model(ours.model) == normalise_model(theirs.model)
    # The preset has them, or they are the same by default.
    assert replace(ours.optimizer, lr_decay_iters=600000) == theirs.optimizer
    assert ours.batch == replace(theirs.batch, seed=ours.batch.seed)
    assert ours.precision == theirs.precision
    assert ours.tokenizer == theirs.tokenizer
