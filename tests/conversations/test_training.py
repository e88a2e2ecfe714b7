"""Runs on packed conversations: against transformers, over layouts, resumed, with new tokens."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conversations.chat_files import (
    make_config,
    write_conversations,
    write_tokenizer,
)
from equivalence.test_context_layouts import BOUND, find_worst, join_state, train_cases
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import JSONL

from megatron.checkpoint.load import open_checkpoint
from megatron.extras.interop.convert.importing import import_model
from megatron.extras.preparation.conversations.build import ConversationJob, prepare_conversations
from megatron.extras.preparation.preprocess.build_dataset import PreprocessJob, preprocess
from megatron.observe.metrics import read_metrics
from megatron.tokenizer.build import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 96
FLAGS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
MODEL = (
    f"--num-layers 3 --hidden-size 48 --num-attention-heads 4 --num-query-groups 2 --seq-length "
    f"{LENGTH} --position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--ffn-hidden-size 64 --no-add-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 7 --lr 1e-3 "
    "--lr-decay-style constant --eval-iters 1"
)


class Files:
    """A tokenizer, conversations, documents and a mixture of both."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = write_tokenizer(folder / "tokenizer")
        self.plain = write_tokenizer(folder / "plain", chat=False)
        source = write_conversations(folder / "chat.jsonl", 240)
        job = ConversationJob(
            (str(source),), str(folder / "chat"), make_config(self.tokenizer),
            longest=LENGTH + 1, on_long="drop",
        )  # fmt: skip
        self.summary = prepare_conversations(job, lambda line: None)
        self.chat = job.prefix
        texts = PreprocessJob(
            (str(JSONL),), str(folder / "text"), make_config(self.tokenizer), append_eod=True
        )
        preprocess(texts, log=lambda line: None)
        self.text = texts.prefixes["text"]
        self.named = f"--tokenizer-type PretrainedFromHF --tokenizer-name-or-path {self.tokenizer}"
        self.cache = f"--data-cache-path {folder}/cache"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def read_gradients(case: str) -> Any:
    """Return the batch of a run's first step, its loss and norm, and its gradients by name."""
    from megatron.commands.parts import choose_parts
    from megatron.extras.interop.translators.translator import load_config
    from megatron.parallel.launcher import read_launcher_world
    from megatron.run.start.build import build_timers, divide_ranks, start_run
    from megatron.run.start.job import agree_on_job
    from megatron.run.start.launch import read_launch
    from megatron.run.start.meet import join_ranks

    loaded = load_config(case.split())
    launch = read_launch(loaded, choose_parts(loaded.config))
    ranks = join_ranks(launch)
    job = agree_on_job(launch, ranks)
    world = read_launcher_world()
    timers = build_timers(world)
    run = start_run(launch, job, divide_ranks(job.plan, ranks, world, timers), timers, None)
    assert run.sources.train is not None
    batch = run.sources.train.read_batch(8)
    result = run.engine.train_batch(batch, iteration=1, lr=0.0)
    moments = {
        shard.name: shard.tensor.clone() / (1 - 0.9)
        for shard in run.engine.shards(optimizer=True)
        if shard.kind == "exp_avg"
    }
    run.reporter.close()
    run.sources.close()
    rows = [(each.tokens, each.labels, each.loss_mask, each.documents) for each in batch]
    return rows, result.loss, result.grad_norm, moments


def test_a_packed_batch_equals_its_conversations_one_by_one_in_transformers(
    files: Files, pool: ProcessPool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    size = build_tokenizer(make_config(files.tokenizer)).vocab_size
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "imported", log=lambda line: None)
    norms = f"--layernorm-epsilon {config.rms_norm_eps} --clip-grad 0 --adam-beta1 0.9"
    case = (
        f"{MODEL} {norms} {FLAGS} {files.named} {files.cache} --data-path {files.chat} "
        f"--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --split 1 "
        f"--load {tmp_path}/imported --finetune"
    )
    outcomes = pool.run(1, read_gradients, case)
    succeed(outcomes)
    rows, loss, norm, gradients = outcomes[0].value
    total, count = torch.zeros(()), 0
    conversations = 0
    for tokens, labels, mask, documents in rows:
        for row, bounds in enumerate(documents):
            for begin, end in pairwise(bounds):
                counted = mask[row, begin:end] > 0
                if not counted.any():
                    continue
                conversations += 1
                # Only this conversation, with positions from 0.
                logits = model(tokens[row : row + 1, begin:end]).logits[0]
                target = labels[row, begin:end]
                each = torch.nn.functional.cross_entropy(logits, target, reduction="none")
                total = total + each[counted].sum()
                count += int(counted.sum())
    assert conversations > 8
    (total / count).backward()
    assert loss == pytest.approx(float(total / count), rel=1e-5)
    theirs = {name: each.grad for name, each in model.named_parameters()}
    complete = torch.stack([each.square().sum() for each in theirs.values()]).sum().sqrt()
    assert norm == pytest.approx(float(complete), rel=1e-5)
    compared = 0
    for ours, name in (
        ("embedding.word.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("head.norm.weight", "model.norm.weight"),
        ("blocks.0.mlp.down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blocks.1.attention.output.weight", "model.layers.1.self_attn.o_proj.weight"),
    ):
        if ours not in gradients:
            continue
        compared += 1
        error = (gradients[ours] - theirs[name]).abs().max() / theirs[name].abs().max()
        assert float(error) < 1e-5, ours
    assert compared >= 3, sorted(gradients)


@pytest.fixture(scope="module")
def train_world(files: Files, pool: ProcessPool) -> Callable[..., Any]:
    """Return a function that trains on conversations, and on a mixture with documents."""

    def run(ranks: int, flags: str) -> Any:
        mixed = f"0.6 {files.text} 0.4 {files.chat}"
        cases = [
            f"{MODEL} {FLAGS} {files.named} {files.cache} --global-batch-size 8 --train-iters 10 "
            f"--split 80,20,0 --data-path {data} {flags}"
            for data in (files.chat, mixed)
        ]
        outcomes = pool.run(ranks, train_cases_as_they_are, cases)
        succeed(outcomes)
        return [join_state([each.value[case] for each in outcomes]) for case in range(len(cases))]

    return run


def train_cases_as_they_are(cases: list[str]) -> Any:
    """Train the cases on their own documents."""
    import equivalence.test_context_layouts as harness

    divide = harness.divide_otherwise
    harness.divide_otherwise = lambda microbatch: microbatch
    try:
        return train_cases(cases)
    finally:
        harness.divide_otherwise = divide


@pytest.fixture(scope="module")
def alone(train_world: Callable[..., Any]) -> Any:
    return train_world(1, "--micro-batch-size 2")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (
            4,
            "--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel "
            "--pipeline-model-parallel-size 2",
        ),
        pytest.param(
            3, "--micro-batch-size 1 --pipeline-model-parallel-size 3", marks=pytest.mark.full
        ),
        (4, "--micro-batch-size 2 --context-parallel-size 2 --zero-stage 3"),
        pytest.param(2, "--micro-batch-size 4 --zero-stage 1", marks=pytest.mark.full),
        pytest.param(
            8,
            "--micro-batch-size 2 --tensor-model-parallel-size 2 --context-parallel-size 2 "
            "--pipeline-model-parallel-size 2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            2, "--micro-batch-size 2 --context-parallel-size 2 --cp-comm-type a2a",
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_layouts_equal_one_process(
    ranks: int, flags: str, train_world: Callable[..., Any], alone: Any
) -> None:
    for found, expected in zip(train_world(ranks, flags), alone, strict=True):
        for name, difference in find_worst(found, expected).items():
            assert difference < BOUND, name


def read_losses(folder: Path) -> dict[int, float]:
    return {
        entry["iteration"]: entry["lm_loss"]
        for entry in read_metrics(folder / "metrics.jsonl")
        if "lm_loss" in entry
    }


def test_a_run_with_new_tokens_resumes_exactly_and_answers(
    files: Files, pool: ProcessPool, tmp_path: Path
) -> None:
    plain = f"--tokenizer-type PretrainedFromHF --tokenizer-name-or-path {files.plain}"
    common = f"{MODEL} --split 80,20,0 --micro-batch-size 2 --global-batch-size 8 {files.cache}"
    base = f"{common} {plain} --mock-data --train-iters 2 --save {tmp_path}/base"
    succeed(pool.run(1, pretrain, base.split()))
    tuned = f"{common} {files.named} {FLAGS} --data-path {files.chat} --train-iters 8"
    new = f"--load {tmp_path}/base --finetune --train-iters 8"
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    output = succeed(pool.run(4, pretrain, f"{tuned} {new} {layout}".split()))
    assert "the vocabulary has 2 tokens more" in output
    for name, ranks, first, second in (
        ("once", 1, "", None),
        ("parts", 4, f"{layout} --exit-interval 3", ""),
    ):
        save = f"--save {tmp_path}/{name} --save-interval 3"
        succeed(pool.run(ranks, pretrain, f"{tuned} {save} {new} {first}".split()))
        if second is not None:
            # The second resume is on another layout.
            resumed = f"{tuned} {save} --load {tmp_path}/{name}"
            succeed(pool.run(1, pretrain, f"{resumed} --exit-interval 6".split()))
            succeed(pool.run(2, pretrain, f"{resumed} --zero-stage 3".split()))
    expected, found = (read_losses(tmp_path / name) for name in ("once", "parts"))
    assert sorted(found) == [*range(1, 9)]
    for iteration, loss in expected.items():
        assert found[iteration] == pytest.approx(loss, rel=BOUND)
    # The new rows began as the mean of the old ones. A smaller vocabulary is still refused.
    refused = f"{common} {plain} --mock-data --load {tmp_path}/once --finetune --train-iters 2"
    outcomes = pool.run(1, pretrain, refused.split())
    assert "embedding.word.weight is" in str(outcomes[0].error)
    command = f"tools/generate.py --load {tmp_path}/once --chat --prompt city --max-new-tokens 5"
    done = subprocess.run(
        [sys.executable, *command.split(), "--json", "--temperature", "0"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "city"


def test_new_rows_are_the_mean(files: Files, pool: ProcessPool, tmp_path: Path) -> None:
    plain = f"--tokenizer-type PretrainedFromHF --tokenizer-name-or-path {files.plain}"
    common = (
        f"{MODEL} --micro-batch-size 1 --global-batch-size 1 --mock-data --lr 1e-30 --train-iters 1"
    )
    first = f"{common} {plain} --save {tmp_path}/base"
    second = f"{common} {files.named} --load {tmp_path}/base --finetune --save {tmp_path}/more"
    succeed(pool.run(1, pretrain, first.split()))
    succeed(pool.run(2, pretrain, f"{second} --tensor-model-parallel-size 2".split()))
    for name in ("embedding.word.weight", "head.weight"):
        before, after = (read_weight(tmp_path / each, name) for each in ("base", "more"))
        assert len(after) == len(before) + 2
        assert torch.equal(after[: len(before)], before)
        mean = before.double().mean(0).float()
        assert torch.equal(after[len(before) :], mean.expand(2, -1))


def read_weight(folder: Path, name: str) -> torch.Tensor:
    """Return a weight of a run's first checkpoint."""
    from megatron.parallel.shard import TensorShard

    checkpoint = open_checkpoint(folder, 1)
    shape = tuple(checkpoint.read_index().tensors[f"weight/{name}"]["shape"])
    shard = TensorShard("weight", name, shape, (0,) * len(shape), torch.empty(shape), True)
    checkpoint.load_into([shard])
    return shard.tensor
