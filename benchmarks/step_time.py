"""Compare our full training step with bare PyTorch loops, interleaved.

    python benchmarks/step_time.py       CPU: the small shapes of docs/benchmarks.md
    python benchmarks/step_time.py --size 125m --precision bf16
                                         GPU: tokens/s, MFU, peak memory

All contestants train the same real tokens with AdamW (fused) and gradient clipping at 1.0, and read
the loss every step.

    trainer   the loop of pretrain_gpt.py: data source, engine, counters, report
    bare      the fewest lines that train our own model
    hf        the fewest lines that train Hugging Face's model of the same shape (bf16 by autocast)
    plain     the fewest lines that train a plain GPT-2 like nanoGPT's (bf16 by autocast)

A name with "-compiled" is the same loop with torch.compile. The trainer compiles with its own flag,
--use-torch-compile. The compiled contestants need a C++ compiler on a CPU.

Each contestant has a process of its own, as in real use. In a common process they would share the
memory that the allocator keeps, and the steps of one would make those of another slower. The
processes take turns, so a drift of the machine's speed affects all of them. Medians are quoted.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import tyro
from plain_gpt import PlainGPT
from worlds import CORPUS, Case, LaunchedWorld, one_iteration

from megatron.checkpoint.ranks import Ranks
from megatron.commands.plan_estimates import estimate_memory
from megatron.config.cli import LoadedConfig, load_config
from megatron.data.source import TrainSource
from megatron.model.flops import count_model_flops_per_token
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.observe.throughput import find_peak_tflops
from megatron.observe.timers import Timers
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import TensorParallel, build_mesh
from megatron.parallel.rendezvous import choose_device
from megatron.parallel.rng import RandomStreams
from megatron.plan import Plan, resolve
from megatron.training.job import agree_on_job
from megatron.training.run import Run
from megatron.training.setup import open_data, start_run
from megatron.training.state import TrainState

# layers, hidden, heads, sequence, micro-batch, feed-forward of the Llama shape
SIZES = {
    "tiny": (6, 384, 6, 256, 8, 1024),
    "125m": (12, 768, 12, 1024, 16, 2048),
    "350m": (24, 1024, 16, 1024, 16, 2816),
    "1.3b": (24, 2048, 16, 2048, 8, 5504),
    "7b": (32, 4096, 32, 2048, 2, 11008),
}
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)


Contestant = Literal[
    "trainer",
    "bare",
    "hf",
    "plain",
    "trainer-compiled",
    "hf-compiled",
    "plain-compiled",
]
COMPILED = "-compiled"
_USABLE = 0.9
"""Share of a device's memory that the models may take. The context and gaps need the rest."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    size: Literal["tiny", "125m", "350m", "1.3b", "7b"] = "tiny"
    """Shape of the model. tiny is for CPUs."""
    shape: tuple[Literal["gpt2", "llama"], ...] = ("gpt2", "llama")
    """Architectures to run."""
    precision: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """Number formats to run."""
    contestants: tuple[Contestant, ...] = ("trainer", "bare", "hf", "plain")
    """The loops to compare. plain is left out for the Llama shape."""
    rounds: int = 7
    """Interleaved rounds."""
    steps: int = 3
    """Steps of each contestant in a round."""
    vocab_size: int = 5120
    """Rows of the embedding. The corpus has ids below 5000."""


def command_line(arguments: Arguments, shape: str, precision: str) -> str:
    """Return the arguments of pretrain_gpt.py for one measurement, without those of files."""
    layers, hidden, heads, seq, micro, ffn = SIZES[arguments.size]
    text = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {seq} --micro-batch-size {micro} "
        f"--global-batch-size {micro} --train-iters 100000 --lr 3e-4 --hidden-dropout 0 "
        "--attention-dropout 0 --eval-iters 0 "
        f"--vocab-size {arguments.vocab_size} --log-interval 10"
    )
    text += f" {LLAMA} --ffn-hidden-size {ffn}" if shape == "llama" else ""
    text += " --bf16" if precision == "bf16" else ""
    return text


def build_trainer(loaded: LoadedConfig, device: torch.device) -> Run:
    """Build the trainer without its output."""
    timers = Timers(device)
    job = agree_on_job(loaded, Ranks(), print)
    run = start_run(loaded, job, build_mesh(Grid(1, 1, 1), device), timers, None)
    run.reporter.say = lambda line: None  # type: ignore[method-assign]
    return run


class ContestantRank:
    """The process of a contestant. It answers commands, as `worlds.Rank` does."""

    def __init__(self, argv: list[str], *, name: Contestant) -> None:
        """Build the contestant for the run that `argv` describes."""
        self._device = choose_device(0)
        if name.removesuffix(COMPILED) == "trainer":
            flags = ["--use-torch-compile"] if name.endswith(COMPILED) else []
            run = build_trainer(load_config([*argv, *flags]), self._device)
            self._step = lambda: one_iteration(run)
        else:
            self._step = build_step(name, open_batches(argv, self._device), self._device)

    def steps(self, count: int) -> tuple[float, int]:
        """Return the seconds of a step, and the peak bytes of GPU memory."""
        if self._device.type == "cuda":
            # Kernels run asynchronously. The clock may start only after those of earlier steps.
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(count):
            self._step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / count
        return seconds, torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0


@dataclass(frozen=True)
class Batches:
    """The data that the trainer reads, for the other loops."""

    plan: Plan
    source: TrainSource
    device: torch.device

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next real batch as (tokens, labels), each [b, s]."""
        batch = self.source.read_batch(self.plan.batch_size.final)[0]
        return batch.tokens.to(self.device), batch.labels.to(self.device)


def open_batches(argv: list[str], device: torch.device) -> Batches:
    """Open the data of the run that `argv` describes."""
    plan = agree_on_job(load_config(argv), Ranks(), lambda line: None).plan
    source = open_data(plan, build_mesh(Grid(1, 1, 1), device), TrainState()).train
    assert source is not None
    return Batches(plan, source, device)


def bare_step(batches: Batches, device: torch.device) -> Callable[[], None]:
    """Return a step of our model with as few lines around it as possible.

    The arithmetic is the trainer's, with fp32 masters of bf16 weights.
    """
    half = batches.plan.config.precision.bf16
    model = GPT(batches.plan.shape, TensorParallel(), RandomStreams(0, device)).to(
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
        tokens, labels = batches.read()
        loss = model(None, Inputs(tokens, labels))
        loss.backward()
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

    config = plan.config.model
    vocab = plan.padded_vocab_size
    if shape == "gpt2":
        gpt2 = transformers.GPT2Config(
            vocab_size=vocab, n_positions=config.seq_length, n_embd=config.hidden_size,
            n_layer=config.num_layers, n_head=config.num_attention_heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(gpt2)
    llama = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=config.hidden_size,
        intermediate_size=plan.ffn_hidden_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.seq_length, tie_word_embeddings=False,
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


def build_plain_model(plan: Plan) -> torch.nn.Module:
    """Build the plain GPT-2 of the same shape."""
    config = plan.config.model
    return PlainGPT(
        config.num_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.seq_length,
        plan.padded_vocab_size,
    )


def loop_step(
    batches: Batches, device: torch.device, model: torch.nn.Module, *, compiled: bool
) -> Callable[[], None]:
    """Return a step of a model that returns its loss, in a bare loop."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    compute_loss = torch.compile(model) if compiled else model
    half = batches.plan.config.precision.bf16

    def step() -> None:
        tokens, labels = batches.read()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = compute_loss(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def build_step(name: Contestant, batches: Batches, device: torch.device) -> Callable[[], None]:
    """Return one training step of a contestant other than the trainer."""
    kind = name.removesuffix(COMPILED)
    if kind == "bare":
        return bare_step(batches, device)
    plan = batches.plan
    shape = "llama" if plan.config.model.glu_activation else "gpt2"
    model = HuggingFaceLoss(plan, shape) if kind == "hf" else build_plain_model(plan)
    return loop_step(batches, device, model, compiled=name.endswith(COMPILED))


def choose_fitting(names: list[Contestant], plan: Plan, memory_bytes: int) -> list[Contestant]:
    """Return the first contestants that fit on a device together, and print which do not.

    All of them hold their weights and optimizer from the start. Their activations take turns.
    """
    needed = estimate_memory(plan)
    one = needed["rank"]["total"]
    fitting: list[Contestant] = []
    for name in names:
        more = len(fitting) + 1
        if more * one + needed["activations"] <= _USABLE * memory_bytes:
            fitting.append(name)
            continue
        print(
            f"SKIPPED: {name}: {more} models of this size need "
            f"{(more * one + needed['activations']) / 1e9:.1f} GB, and the device has "
            f"{memory_bytes / 1e9:.1f} GB"
        )
    return fitting


def measure(arguments: Arguments, shape: str, precision: str) -> None:
    """Measure all contestants in one shape and precision, and print their rows."""
    device = choose_device(0)
    flags = command_line(arguments, shape, precision)
    plan = resolve(load_config([*flags.split(), "--data-path", str(CORPUS)]).config, 1)
    names = [n for n in arguments.contestants if shape == "gpt2" or not n.startswith("plain")]
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        names = choose_fitting(names, plan, memory_bytes)
    if not names:
        return
    case = Case(f"{shape} {precision}", flags, threads=torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        worlds = {
            name: LaunchedWorld(case, folder, partial(ContestantRank, name=name)) for name in names
        }
        seconds: dict[str, list[float]] = {name: [] for name in worlds}
        memory: dict[str, float] = {}
        # Round 0 warms up and is not counted.
        for round_number in range(arguments.rounds + 1):
            for name, world in worlds.items():
                ((took, peak),) = world.ask("steps", arguments.steps)
                memory[name] = peak / 2**30
                if round_number:
                    seconds[name].append(took)
        for world in worlds.values():
            world.close()
    print_rows(plan, shape, precision, seconds, memory, device)


def print_rows(
    plan: Plan,
    shape: str,
    precision: str,
    seconds: dict[str, list[float]],
    memory: dict[str, float],
    device: torch.device,
) -> None:
    """Print one row per contestant."""
    tokens = plan.batch_size.final * plan.config.model.seq_length
    flops = count_model_flops_per_token(plan.shape)
    peak = find_peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    for name, times in seconds.items():
        rate = tokens / statistics.median(times)
        low, middle, high = (1e3 * f(times) for f in (min, statistics.median, max))
        row = (
            f"{shape:5} {precision:4} {name:16} {rate:10.0f} tokens/s   {low:8.1f} / "
            f"{middle:8.1f} "
            f"/ {high:8.1f} ms"
        )
        if "bare" in seconds and name != "bare":
            # Ratios within a round cancel a drift of the machine's speed.
            ratios = [b / t for b, t in zip(seconds["bare"], times, strict=True)]
            row += f"   {statistics.median(ratios):.3f} of bare"
        row += f"   {rate * flops / 1e12:.2f} TFLOPs"
        row += f"   MFU {rate * flops / 1e12 / peak:.3f}" if peak else ""
        row += f"   {memory[name]:.1f} GiB" if device.type == "cuda" else ""
        print(row, flush=True)


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    device = choose_device(0)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    rounds = f"{arguments.rounds} rounds of {arguments.steps} steps; min / median / max"
    print(f"torch {torch.__version__}, {name}, size {arguments.size}, {rounds}")
    for shape in arguments.shape:
        for precision in arguments.precision:
            measure(arguments, shape, precision)
    return 0


if __name__ == "__main__":
    sys.exit(main())
