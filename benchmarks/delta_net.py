"""Compare a gated delta net with that of transformers, and with attention of the same width.

    python benchmarks/delta_net.py                     forward and backward pass, in turn
    python benchmarks/delta_net.py --device cuda       the same on a GPU, also with fla-core
    python benchmarks/delta_net.py --counts            launches and bytes, on the fake GPU

The first table has one layer, as in Olmo-Hybrid, with the same weights. transformers runs its
PyTorch code, with the same chunks of 64 tokens. Times of a CPU are CPU times. Each round runs all
contestants once, and the ratio of a round compares neighbours in time. The second table has the
work of a layer in a training step in bf16, of a model with these layers only.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import tyro
from operator_work import Counts, Work
from results import add_row

from megatron.extras.planner.dry_run.process import call_in_pool, open_pool

_LAYERS = 4


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the layers run. On a GPU they run in bf16."""
    rounds: int = 7
    """Interleaved rounds, after one that warms up."""
    hidden: int = 512
    """Width of the model."""
    heads: int = 8
    """Heads of keys and of values. Keys have 3/4, and values 3/2, of the width of a head."""
    length: int = 1024
    """Tokens of a sample."""
    samples: int = 1
    """Samples of a microbatch."""
    counts: bool = False
    """Count launches and bytes on the fake GPU instead."""


def list_flags(arguments: Arguments) -> str:
    """Return the flags of the layer, and of a model of this width."""
    head = arguments.hidden // arguments.heads
    return (
        f"--hidden-size {arguments.hidden} --num-attention-heads {arguments.heads} "
        f"--seq-length {arguments.length} --micro-batch-size {arguments.samples} "
        "--position-embedding-type rotary --normalization RMSNorm --no-add-bias-linear "
        "--train-iters 1 --lr 1e-3 --mock-data --vocab-size 1000 --hidden-dropout 0 "
        "--attention-dropout 0 "
        f"--num-layers {_LAYERS} --linear-num-key-heads {arguments.heads} "
        f"--linear-num-value-heads {arguments.heads} --linear-key-head-dim {head * 3 // 4} "
        f"--linear-value-head-dim {head * 3 // 2}"
    )


LINEAR = f" --experimental-attention-variant gated_delta_net --linear-attention-freq [1]*{_LAYERS}"


def build_contestants(arguments: Arguments) -> dict[str, Callable[[], Any]]:
    """Return a function for each contestant that runs a forward and a backward pass."""
    import torch
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo

    from megatron.extras.interop.translators.translator import load_config
    from megatron.model.gpt import GPT
    from megatron.model.inputs import START
    from megatron.model.positions import Positions
    from megatron.parallel.mesh import TensorParallel
    from megatron.plan.resolve import resolve

    torch.manual_seed(1)
    plan = resolve(load_config((list_flags(arguments) + LINEAR).split()).config, 1)
    model = GPT(plan.shape, TensorParallel())
    ours: Any = model.get_blocks()[0].attention
    c = plan.config.model
    theirs = olmo.OlmoHybridGatedDeltaNet(
        olmo.OlmoHybridConfig(
            hidden_size=c.hidden_size,
            num_attention_heads=c.num_attention_heads,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=c.linear_num_key_heads,
            linear_num_value_heads=c.linear_num_value_heads,
            linear_key_head_dim=c.linear_key_head_dim,
            linear_value_head_dim=c.linear_value_head_dim,
            linear_conv_kernel_dim=c.linear_conv_kernel_dim,
            linear_allow_neg_eigval=False,
            rms_norm_eps=c.layernorm_epsilon,
        ),
        0,
    )
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "g_proj": "gate"}
    names |= {"b_proj": "beta", "a_proj": "alpha", "o_proj": "out"}
    with torch.no_grad():
        for their_name, our_name in names.items():
            getattr(ours, our_name).weight.copy_(getattr(theirs, their_name).weight)
        ours.A_log.copy_(theirs.A_log)
        ours.dt_bias.copy_(theirs.dt_bias)
        ours.norm.weight.fill_(1)
        parts = theirs.conv1d.weight.squeeze(1).split(
            [len(ours.query_convolution), len(ours.key_convolution), len(ours.value_convolution)]
        )
        for part, weight in zip(("query", "key", "value"), parts, strict=True):
            getattr(ours, f"{part}_convolution").copy_(weight)
    ours.to(arguments.device)
    theirs.to(arguments.device)
    x = torch.randn(arguments.length, arguments.samples, c.hidden_size, device=arguments.device)
    if arguments.device == "cuda":
        ours, theirs, x = ours.bfloat16(), theirs.bfloat16(), x.bfloat16()
    turned = x.transpose(0, 1).contiguous()
    grad = torch.randn_like(x)

    def run_ours(rule: Any = None) -> Any:
        ours.operators = type(ours.operators)(delta_rule=rule)
        ours.zero_grad()
        out = ours(x, Positions(), START)
        out.backward(grad)
        return out.detach().transpose(0, 1)

    def run_theirs() -> Any:
        theirs.zero_grad()
        out = theirs(turned)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(grad.transpose(0, 1))
        return out.detach()

    difference = (run_ours() - run_theirs()).abs().max() / run_theirs().abs().max()
    print(f"largest difference of the results, relative to the largest: {float(difference):.1e}")
    contestants: dict[str, Callable[[], Any]] = {"transformers": run_theirs, "trainer": run_ours}
    if arguments.device == "cuda":
        from megatron.extras.step.kernels.delta_rule import DeltaRuleKernel

        kernel = DeltaRuleKernel(in_bf16=True)
        contestants["trainer, fla-core"] = lambda: run_ours(kernel)
    return contestants


def compare_times(arguments: Arguments) -> None:
    """Print and record the time of each contestant."""
    import torch

    contestants = build_contestants(arguments)
    # Other programs of the machine do not count.
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(arguments.rounds + 1):
        # Each second round has the other order.
        order = list(contestants)[:: 1 if number % 2 else -1]
        for name in order:
            start = clock()
            contestants[name]()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            if number:
                seconds[name].append(clock() - start)
    print("| contestant | ms, median | throughput over transformers: median | lowest | highest |")
    print("|---|--:|--:|--:|--:|")
    for name, own in seconds.items():
        pairs = zip(seconds["transformers"], own, strict=True)
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        median = statistics.median(ratios)
        milliseconds = 1e3 * statistics.median(own)
        print(
            f"| {name} | {milliseconds:.1f} | {median:.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |"
        )
        add_row(
            "delta_net",
            contestant=name,
            device=arguments.device,
            milliseconds=milliseconds,
            ratio=median,
            torch=torch.__version__,
        )


def count(flags: str) -> Counts:
    """Return the work of a training step. It runs on the fake GPU."""
    from operator_counter import count_step

    return count_step(flags, 1)


def print_counts(arguments: Arguments) -> None:
    """Print and record the work of a layer of each kind."""
    print("| layer | launches | GB | TFLOP of products |")
    print("|---|--:|--:|--:|")
    flags = f"{list_flags(arguments)} --bf16 --global-batch-size {arguments.samples}"
    with open_pool(1) as pool:
        for name, more in (("attention", ""), ("gated delta net", LINEAR)):
            deep = call_in_pool(pool, count, flags + more)
            shallow = flags.replace(f"--num-layers {_LAYERS}", "--num-layers 1")
            one = call_in_pool(pool, count, shallow + more.replace(f"*{_LAYERS}", "*1"))
            work = sum(deep.values(), Work()) - sum(one.values(), Work())
            layers = _LAYERS - 1
            launches = work.calls / layers
            gigabytes = (work.reads + work.writes) / 1e9 / layers
            flops = work.flops / 1e12 / layers
            print(f"| {name} | {launches:,.0f} | {gigabytes:.3f} | {flops:.4f} |")
            add_row("delta_net_counts", layer=name, launches=launches, gigabytes=gigabytes)


def main() -> None:
    """Print one of the tables."""
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.counts:
        print_counts(arguments)
    else:
        compare_times(arguments)


if __name__ == "__main__":
    main()
