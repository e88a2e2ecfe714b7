"""Compare our full training step with bare PyTorch loops, interleaved.

    python benchmarks/step_time.py       CPU: the small shapes of docs/benchmarks.md
    python benchmarks/step_time.py --size 125m --precision bf16 --microbatches 4
                                         GPU: tokens/s, MFU, peak memory

All contestants train the same tokens with AdamW (fused) and gradient clipping at 1.0, and read the
loss every step. Small sizes train real text, and the others random ids.

    trainer          the loop of pretrain_gpt.py: data source, engine, counters, report
    trainer-captured the same with a CUDA graph of a microbatch (--cuda-graph on)
    trainer-plain    the same without the kernels that a GPU uses without a flag
    bare             the fewest lines that train our own model
    hf               the fewest lines that train Hugging Face's model of the same shape
    plain            the fewest lines that train a plain GPT-2 like nanoGPT's
    nanochat         the fewest lines that train a model like nanochat's, without clipping

The last three compute in bf16 by autocast. A name with "-compiled" is the same loop with
torch.compile. The trainer compiles with its own flag, --use-torch-compile. The compiled contestants
need a C++ compiler on a CPU. A trainer that is not called captured has --cuda-graph off. If the
trainer has no such flag, captured contestants are left out.

Each contestant has a process of its own, as in real use. In a common process they would share the
memory that the allocator keeps, and the steps of one would make those of another slower. The
processes take turns, so a drift of the machine's speed affects all of them. Medians are quoted.
On a GPU, a process returns the memory of its activations after its turn, and begins each turn with
a step that is not timed.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import tyro
from plain_gpt import PlainGPT, PlainModernGPT
from results import add_row
from worlds import (
    CORPUS,
    TIMEOUT_SECONDS,
    Case,
    LaunchedWorld,
    WorldFailedError,
    choose_capture,
    one_iteration,
    write_random_tokens,
)

from megatron.commands.parts import choose_parts
from megatron.config.fields import LoadedConfig
from megatron.data.source import TrainSource
from megatron.engine.runner import SingleStageRunner
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_estimates import estimate_memory
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.prediction import predict_plan
from megatron.model.flops import count_model_flops_per_token
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.observe.throughput import find_peak_tflops
from megatron.observe.timers import Timers
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import TensorParallel, build_mesh
from megatron.parallel.ranks import Ranks
from megatron.parallel.rendezvous import choose_device
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan
from megatron.run.run import Run
from megatron.run.start.build import start_run
from megatron.run.start.job import agree_on_job
from megatron.run.start.launch import read_launch
from megatron.run.start.open_data import open_data
from megatron.run.state import TrainState

# layers, hidden, heads, sequence, micro-batch, feed-forward of the Llama shape
SIZES = {
    "smallest": (2, 64, 2, 64, 2, 128),
    "tiny": (6, 384, 6, 256, 8, 1024),
    "125m": (12, 768, 12, 1024, 16, 2048),
    "177m": (10, 1024, 16, 512, 32, 2730),
    "350m": (24, 1024, 16, 1024, 16, 2816),
    "1.3b": (24, 2048, 16, 2048, 8, 5504),
    "7b": (32, 4096, 32, 2048, 2, 11008),
}
MODERN = (
    "--position-embedding-type rotary --normalization RMSNorm --no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)
SHAPES = {
    "gpt2": "",
    "llama": f"{MODERN} --glu-activation swiglu",
    "nanochat": f"{MODERN} --activation squared_relu --qk-norm head",
    # A token uses 4 of 16 experts, each a quarter as wide as the MLP of the Llama shape. So both
    # have about the same FLOPs for a token.
    "olmoe": f"{MODERN} --glu-activation swiglu --qk-norm full --num-experts 16 "
    "--moe-router-topk 4 --moe-router-pre-softmax --moe-aux-loss-coeff 0.01",
}
Contestant = Literal[
    "trainer",
    "trainer-plain",
    "bare",
    "hf",
    "plain",
    "nanochat",
    "trainer-captured",
    "trainer-captured-compiled",
    "trainer-compiled",
    "hf-compiled",
    "plain-compiled",
    "nanochat-compiled",
]
COMPILED = "-compiled"
CAPTURED = "-captured"
TRAINER_FLAGS = {
    "trainer": choose_capture("off"),
    "trainer-compiled": [*choose_capture("off"), "--use-torch-compile"],
    "trainer-captured": choose_capture("on"),
    "trainer-captured-compiled": [*choose_capture("on"), "--use-torch-compile"],
    "trainer-plain": [
        "--no-gradient-accumulation-fusion",
        "--no-rope-fusion",
        "--no-bias-swiglu-fusion",
        "--no-residual-norm-fusion",
        "--no-cross-entropy-loss-fusion",
        "--attention-backend",
        "auto",
    ],
}
"""Contestant with the trainer's own loop -> its flags."""
_SHAPES_OF = {"plain": ("gpt2",), "nanochat": ("nanochat",), "hf": ("gpt2", "llama", "olmoe")}
"""Contestant -> the shapes that its model has. Our own model has all of them."""
_RANDOM_TOKENS = 4_000_000
_RANDOM_VOCAB = 50304
_USABLE = 0.9
"""Share of a device's memory that the models may take. The context and gaps need the rest."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    size: Literal["smallest", "tiny", "125m", "177m", "350m", "1.3b", "7b"] = "tiny"
    """Shape of the model. tiny is for CPUs, and smallest checks that the script runs."""
    shape: tuple[Literal["gpt2", "llama", "nanochat", "olmoe"], ...] = ("gpt2", "llama")
    """Architectures to run."""
    precision: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """Number formats to run."""
    contestants: tuple[Contestant, ...] = ("trainer", "bare", "hf", "plain")
    """The loops to compare. A loop is left out for a shape that its model does not have."""
    rounds: int = 7
    """Interleaved rounds."""
    steps: int = 3
    """Steps of each contestant in a round."""
    compile_seconds: float = 300
    """Time for the compilers, which run at the same time. A contestant that is not compiled by then
    is left out, so that the others are measured."""
    microbatches: int = 1
    """Microbatches of a step. Gradients are summed over them."""
    vocab_size: int | None = None
    """Rows of the embedding. Default: 5120 for the two smallest sizes, else 50304. From 50304 on,
    the tokens are random ids. Below it they are real text, whose ids are below 5000."""

    def get_vocab_size(self) -> int:
        """Return the rows of the embedding."""
        if self.vocab_size is not None:
            return self.vocab_size
        return 5120 if self.size in ("smallest", "tiny") else _RANDOM_VOCAB


def command_line(arguments: Arguments, shape: str, precision: str) -> str:
    """Return the arguments of pretrain_gpt.py for one measurement, without those of files."""
    layers, hidden, heads, seq, micro, ffn = SIZES[arguments.size]
    text = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {seq} --micro-batch-size {micro} "
        f"--global-batch-size {micro * arguments.microbatches} --train-iters 100000 --lr 3e-4 "
        "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 "
        f"--vocab-size {arguments.get_vocab_size()} --log-interval 10 {SHAPES[shape]}"
    )
    text += f" --ffn-hidden-size {ffn}" if shape == "llama" else ""
    text += f" --moe-ffn-hidden-size {ffn // 4}" if shape == "olmoe" else ""
    text += " --bf16" if precision == "bf16" else ""
    return text


def build_trainer(loaded: LoadedConfig, device: torch.device) -> Run:
    """Build the trainer without its output."""
    timers = Timers(device)
    launch = read_launch(loaded, choose_parts(loaded.config))
    job = agree_on_job(launch, Ranks())
    mesh = build_mesh(Grid(1, 1, 1), device, expert_size=job.plan.expert_size)
    run = start_run(launch, job, mesh, timers, None)
    run.reporter.log = lambda line: None  # type: ignore[method-assign]
    return run


class ContestantRank:
    """The process of a contestant. It answers commands, as `worlds.Rank` does."""

    def __init__(self, argv: list[str], *, name: Contestant, shape: str) -> None:
        """Build the contestant for the run that `argv` describes."""
        self._device = choose_device(0)
        if name in TRAINER_FLAGS:
            loaded = load_config([*argv, *TRAINER_FLAGS[name]])
            run = build_trainer(loaded, self._device)
            self._step = lambda: one_iteration(run)
        else:
            batches = open_batches(argv, self._device)
            self._step = build_step(name, shape, batches, self._device)

    def steps(self, count: int) -> tuple[float, int, float]:
        """Return the seconds of a step, the peak bytes of GPU memory, and the seconds to enqueue.

        The last value is the time in which the host calls the microbatches of a step. It includes
        waits if the queue of the GPU is full, so it is the host's own time at most.
        """
        if self._device.type == "cuda":
            # The memory of the activations was returned after the last turn.
            self._step()
            # Kernels run asynchronously. The clock may start only after those of earlier steps.
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        enqueue = 0.0
        start = time.perf_counter()
        with time_microbatches() as spent:
            for _ in range(count):
                self._step()
            enqueue = sum(spent) / count
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / count
        if self._device.type != "cuda":
            return seconds, 0, enqueue
        # The next contestant needs the memory. torch would keep what it has freed.
        torch.cuda.empty_cache()
        return seconds, torch.cuda.max_memory_allocated(), enqueue


@contextmanager
def time_microbatches() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each call that runs the microbatches of a step."""
    spent: list[float] = []

    def measure(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_measure(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = run(*arguments, **options)
            spent.append(time.perf_counter() - start)
            return result

        return run_and_measure

    with (
        mock.patch.object(SingleStageRunner, "run", measure(SingleStageRunner.run)),
        mock.patch.dict(globals(), {"sum_microbatches": measure(sum_microbatches)}),
    ):
        yield spent


@dataclass(frozen=True)
class Batches:
    """The data that the trainer reads, for the other loops."""

    plan: Plan
    source: TrainSource
    device: torch.device

    def read(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the microbatches of the next step as (tokens, labels), each [b, s]."""
        return [
            (batch.tokens.to(self.device), batch.labels.to(self.device))
            for batch in self.source.read_batch(self.plan.batch_size.final)
        ]


def open_batches(argv: list[str], device: torch.device) -> Batches:
    """Open the data of the run that `argv` describes."""
    plan = agree_on_job(read_launch(load_config(argv)), Ranks()).plan
    source = open_data(plan, build_mesh(Grid(1, 1, 1), device), TrainState()).train
    assert source is not None
    return Batches(plan, source, device)


def sum_microbatches(
    microbatches: list[tuple[torch.Tensor, torch.Tensor]],
    compute_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run the forward and backward passes of a step, and return the mean loss."""
    total = torch.zeros((), device=microbatches[0][0].device)
    for tokens, labels in microbatches:
        loss = compute_loss(tokens, labels) / len(microbatches)
        loss.backward()
        total += loss.detach()
    return total


def bare_step(batches: Batches, device: torch.device) -> Callable[[], None]:
    """Return a step of our model with as few lines around it as possible.

    The arithmetic is the trainer's, with fp32 masters of bf16 weights.
    """
    half = batches.plan.config.precision.bf16
    model = GPT(batches.plan.shape, TensorParallel()).to(
        device, torch.bfloat16 if half else torch.float32
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if name.endswith("norm.weight") else torch.nn.init.normal_(
            parameter, std=0.02
        )
        if half:
            # Gradients are accumulated in fp32, as in the trainer. Without this line they would
            # have the dtype of the weights.
            parameter.grad_dtype = torch.float32
    masters = [p.detach().float() if half else p for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-4, fused=True)

    def step() -> None:
        loss = sum_microbatches(
            batches.read(), lambda tokens, labels: model(None, Inputs(tokens, labels))
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if half:
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad
        optimizer.step()
        if half:
            # The optimizer changed the fp32 masters. The model computes with their bf16 copies.
            torch._foreach_copy_([p.data for p in model.parameters()], masters)
        model.zero_grad(set_to_none=True)
        # The trainer reads the loss every step, which waits for the GPU. So all contestants do.
        loss.item()

    return step


def build_hf_model(plan: Plan, shape: str) -> torch.nn.Module:
    """Build Hugging Face's model of the same shape."""
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Under this name, transformers builds no mask. Its own one would keep compiled models from
    # the flash kernel, because a mask that is given is not known to be causal.
    transformers.AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    # The cache of keys and values is for generation.
    options: dict[str, Any] = {"attn_implementation": "sdpa_without_mask", "use_cache": False}
    config = plan.config.model
    vocab = plan.padded_vocab_size
    if shape == "gpt2":
        gpt2 = transformers.GPT2Config(
            vocab_size=vocab, n_positions=config.seq_length, n_embd=config.hidden_size,
            n_layer=config.num_layers, n_head=config.num_attention_heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(gpt2)
    if shape == "olmoe":
        olmoe = transformers.OlmoeConfig(
            vocab_size=vocab, hidden_size=config.hidden_size,
            intermediate_size=plan.shape.expert_width, num_experts=config.num_experts or 0,
            num_experts_per_tok=config.moe_router_topk, output_router_logits=True,
            router_aux_loss_coef=plan.config.loss.moe_aux_loss_coeff,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_attention_heads,
            max_position_embeddings=config.seq_length, tie_word_embeddings=False, **options,
        )  # fmt: skip
        return transformers.OlmoeForCausalLM(olmoe)
    llama = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=config.hidden_size,
        intermediate_size=plan.shape.ffn_hidden_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.seq_length, tie_word_embeddings=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(llama)


class HuggingFaceLoss(torch.nn.Module):
    """Hugging Face's model of a shape, which returns the mean loss of a batch."""

    def __init__(self, plan: Plan, shape: str) -> None:
        """Build the model."""
        super().__init__()
        self.model = build_hf_model(plan, shape)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens and labels, each [b, s]."""
        logits = self.model(tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build_plain_model(plan: Plan, kind: type[PlainGPT | PlainModernGPT]) -> torch.nn.Module:
    """Build a plain model of the same shape."""
    config = plan.config.model
    return kind(
        config.num_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.seq_length,
        plan.padded_vocab_size,
    )


def loop_step(
    batches: Batches, device: torch.device, model: torch.nn.Module, *, compiled: bool, clip: bool
) -> Callable[[], None]:
    """Return a step of a model that returns its loss, in a bare loop."""
    if device.type == "cuda":
        # nanoGPT and nanochat set this too. It concerns products in fp32 only.
        torch.set_float32_matmul_precision("high")
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    compute_loss = torch.compile(model) if compiled else model
    half = batches.plan.config.precision.bf16

    def compute(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss: torch.Tensor = compute_loss(tokens, labels)
        return loss

    def step() -> None:
        loss = sum_microbatches(batches.read(), compute)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def build_step(
    name: Contestant, shape: str, batches: Batches, device: torch.device
) -> Callable[[], None]:
    """Return one training step of a contestant other than the trainer."""
    kind = name.removesuffix(COMPILED)
    if kind == "bare":
        return bare_step(batches, device)
    plan = batches.plan
    model: torch.nn.Module
    # A CPU needs minutes to draw the weights of a model with experts.
    with device:
        if kind == "hf":
            model = HuggingFaceLoss(plan, shape)
        elif kind == "plain":
            model = build_plain_model(plan, PlainGPT)
        else:
            model = build_plain_model(plan, PlainModernGPT)
    if kind == "nanochat" and plan.config.precision.bf16:
        # As in nanochat, so that the residual stream is in bf16.
        model.tokens.to(torch.bfloat16)
    return loop_step(
        batches, device, model, compiled=name.endswith(COMPILED), clip=kind != "nanochat"
    )


def has_shape(name: Contestant, shape: str) -> bool:
    """Return whether a contestant's model can have the shape, and the trainer has its flag."""
    if CAPTURED in name and not choose_capture("on"):
        return False
    return shape in _SHAPES_OF.get(name.removesuffix(COMPILED), (shape,))


def choose_fitting(names: list[Contestant], plan: Plan, memory_bytes: int) -> list[Contestant]:
    """Return the first contestants that fit on a device together, and print which do not.

    All of them hold their weights and optimizer from the start. Their activations take turns.
    """
    # The bytes of a model's tensors do not depend on the hardware.
    peak = predict_plan(plan, load_hardware("h100")).peak_bytes
    one = estimate_memory(plan)["rank"]["total"]
    fitting: list[Contestant] = []
    for name in names:
        more = len(fitting) + 1
        needed = peak + (more - 1) * one
        if needed <= _USABLE * memory_bytes:
            fitting.append(name)
            continue
        print(
            f"SKIPPED: {name}: {more} models of this size need "
            f"{needed / 1e9:.1f} GB, and the device has {memory_bytes / 1e9:.1f} GB"
        )
    return fitting


def measure(arguments: Arguments, shape: str, precision: str) -> bool:
    """Measure all contestants in one shape and precision, print their rows, and return success."""
    device = choose_device(0)
    flags = command_line(arguments, shape, precision)
    plan = resolve(load_config([*flags.split(), "--data-path", str(CORPUS)]).config, 1)
    names = [name for name in arguments.contestants if has_shape(name, shape)]
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        names = choose_fitting(names, plan, memory_bytes)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = CORPUS
        if arguments.get_vocab_size() >= _RANDOM_VOCAB:
            data = Path(folder) / "random"
            write_random_tokens(data, _RANDOM_VOCAB, _RANDOM_TOKENS)
        case = Case(f"{shape} {precision}", flags, threads=torch.get_num_threads(), data=data)
        worlds: dict[Contestant, LaunchedWorld] = {}
        for name in names:
            serve = partial(ContestantRank, name=name, shape=shape)
            worlds[name] = LaunchedWorld(case, folder, serve, wait_for_start=False)
            stack.callback(worlds[name].close)
        described = {
            "size": arguments.size,
            "shape": shape,
            "precision": precision,
            "microbatches": arguments.microbatches,
            "tokens": plan.batch_size.final * plan.config.model.seq_length,
            "tflop": count_model_flops_per_token(plan.shape) / 1e12,
        }
        contest = Contest(worlds, described)
        contest.start()
        contest.warm_up(arguments.steps, arguments.compile_seconds)
        for _ in range(arguments.rounds):
            for name in list(contest.worlds):
                contest.measure(name, arguments.steps)
    print_rows(contest, device)
    return not contest.failed


class Contest:
    """The contestants of one shape, which take turns. One that fails is left out from then on."""

    def __init__(self, worlds: dict[Contestant, LaunchedWorld], described: dict[str, Any]) -> None:
        """Create a contest of worlds that are starting.

        Args:
            worlds: Name -> process.
            described: Values of every row: the shape, and the tokens and TFLOPs of a step.
        """
        self.worlds = worlds
        self.described = described
        self.seconds: dict[str, list[float]] = {}
        self.enqueue: dict[str, list[float]] = {}
        self.gib: dict[str, float] = {}
        self.failed = False

    def start(self) -> None:
        """Wait until all processes are built."""
        for name in list(self.worlds):
            self._receive(name)

    def warm_up(self, steps: int, compile_seconds: float) -> None:
        """Run the first steps, which load kernels, allocate and compile."""
        end = time.perf_counter() + compile_seconds
        compiled = [name for name in self.worlds if name.endswith(COMPILED)]
        # Compilers need the CPU for most of a minute, so they run at the same time.
        sent = [name for name in compiled if self._send(name, steps)]
        for name in sent:
            self._receive(name, max(0.0, end - time.perf_counter()))
        for name in list(self.worlds):
            if name not in compiled and self._send(name, steps):
                self._receive(name)

    def measure(self, name: Contestant, steps: int) -> None:
        """Let a contestant run its steps, and record its time."""
        answers = self._receive(name) if self._send(name, steps) else None
        if answers is None:
            return
        ((seconds, peak, enqueue),) = answers
        self.enqueue.setdefault(name, []).append(enqueue)
        self.seconds.setdefault(name, []).append(seconds)
        self.gib[name] = peak / 2**30
        row = {**self.described, "contestant": name, "seconds": seconds, "gib": self.gib[name]}
        add_row("steps", **row, enqueue_seconds=enqueue)

    def _receive(self, name: Contestant, seconds: float = TIMEOUT_SECONDS) -> list[Any] | None:
        """Return the answers of a contestant. One that fails leaves the contest."""
        try:
            return self.worlds[name].receive(seconds)
        except WorldFailedError as failure:
            self._drop(name, failure)
            return None

    def _send(self, name: Contestant, steps: int) -> bool:
        """Let a contestant begin its steps, and return whether it still runs."""
        try:
            self.worlds[name].send("steps", steps)
        except WorldFailedError as failure:
            self._drop(name, failure)
            return False
        return True

    def _drop(self, name: Contestant, failure: WorldFailedError) -> None:
        self.failed = True
        reason = str(failure).strip().splitlines()[-1]
        print(f"FAILED: {name}: {failure}", flush=True)
        add_row("steps", **self.described, contestant=name, error=reason[:300])
        del self.worlds[name]


def print_rows(contest: Contest, device: torch.device) -> None:
    """Print one row per contestant."""
    peak = find_peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    shown = contest.described
    for name, times in contest.seconds.items():
        rate = shown["tokens"] / statistics.median(times)
        low, middle, high = (1e3 * f(times) for f in (min, statistics.median, max))
        row = (
            f"{shown['shape']:8} {shown['precision']:4} {name:17} {rate:10.0f} tokens/s   "
            f"{low:8.1f} / {middle:8.1f} / {high:8.1f} ms"
        )
        if "bare" in contest.seconds and name != "bare":
            # Ratios within a round cancel a drift of the machine's speed.
            pairs = zip(contest.seconds["bare"], times, strict=False)
            row += f"   {statistics.median([b / t for b, t in pairs]):.3f} of bare"
        row += f"   {rate * shown['tflop']:.2f} TFLOPs"
        row += f"   MFU {rate * shown['tflop'] / peak:.3f}" if peak else ""
        row += f"   enqueued in {1e3 * statistics.median(contest.enqueue[name]):.1f} ms"
        row += f"   {contest.gib[name]:.1f} GiB" if device.type == "cuda" else ""
        print(row, flush=True)


def main() -> int:
    """Run the benchmark and return the exit code, which is 1 if a contestant failed."""
    arguments = tyro.cli(Arguments, description=__doc__)
    device = choose_device(0)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    rounds = f"{arguments.rounds} rounds of {arguments.steps} steps; min / median / max"
    print(f"torch {torch.__version__}, {name}, size {arguments.size}, {rounds}")
    passed = True
    for shape in arguments.shape:
        for precision in arguments.precision:
            passed &= measure(arguments, shape, precision)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
