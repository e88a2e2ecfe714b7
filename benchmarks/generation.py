"""Compare text generation with `transformers.generate` on the same weights.

    python benchmarks/generation.py              about 6 minutes on 2 cores without other load
    python benchmarks/generation.py --quick      check that it runs; the numbers mean nothing

Both generate greedily from the same prompts in fp32, and must return the same ids. They take turns,
and the first round warms up. Medians are quoted.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from layouts import describe_machine, table

from megatron.checkpoint.load import open_checkpoint
from megatron.extras.convert.importing import import_model
from megatron.extras.generate.checkpoint_model import load_model
from megatron.extras.generate.generation import GenerationOptions, generate
from megatron.extras.generate.load import store_for_single_prompts
from megatron.extras.generate.staged_model import StagedModel

VOCAB = 5120
PROMPT = 64
SEQUENCE = 512
Ids = list[list[int]]


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    family: tuple[Literal["gpt2", "llama"], ...] = ("gpt2", "llama")
    """Architectures to run."""
    batch: tuple[int, ...] = (1, 8)
    """Numbers of prompts."""
    layers: int = 8
    hidden: int = 512
    heads: int = 8
    new_tokens: int = 64
    """Tokens that are added to each prompt of 64 tokens."""
    rounds: int = 7
    """Interleaved rounds, after one that warms up."""
    quick: bool = False
    """A small shape and a single round."""


class NumberTokenizer:
    """A tokenizer whose texts have no meaning, so that only the model is measured."""

    vocab_size = VOCAB
    eod = -1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [ord(character) % VOCAB for character in text]

    def encode_batch(self, texts: list[str]) -> Ids:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return a text of ids."""
        return "x" * len(ids)


def build_theirs(family: str, arguments: Arguments) -> Any:
    """Return a model of `transformers` with random weights."""
    import transformers

    torch.manual_seed(1)
    none: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config: Any
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=SEQUENCE,
            n_embd=arguments.hidden,
            n_layer=arguments.layers,
            n_head=arguments.heads,
            **none,
        )
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=SEQUENCE,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=max(arguments.heads // 4, 1),
        **none,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generate_theirs(model: Any, prompts: Ids, new_tokens: int) -> Ids:
    """Return the new ids of `transformers`."""
    tokens = torch.tensor(prompts)
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[:, tokens.shape[1] :].tolist()


def generate_ours(model: StagedModel, prompts: Ids, new_tokens: int) -> Ids:
    """Return our new ids."""
    results = generate(model, NumberTokenizer(), prompts, GenerationOptions(new_tokens))
    return [result.ids for result in results]


def compare(calls: dict[str, Callable[[], Ids]], rounds: int) -> str:
    """Let two calls take turns, and return the cells of the table."""
    elapsed: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        results = {}
        for name, call in calls.items():
            start = time.perf_counter()
            cpu_start = time.process_time()
            results[name] = call()
            if turn:
                elapsed[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)
        assert results["ours"] == results["theirs"], "both generate the same ids"
    tokens = sum(map(len, results["ours"]))
    cells = [format_rate(tokens, elapsed[name]) for name in calls]
    for seconds in (elapsed, cpu):
        ratios = [t / o for o, t in zip(seconds["ours"], seconds["theirs"], strict=True)]
        cells.append(f"{statistics.median(ratios):.2f}")
    return " | ".join(cells)


def format_rate(tokens: int, seconds: list[float]) -> str:
    """Format minimum, median and maximum of tokens a second."""
    rates = [tokens / each for each in seconds]
    return " / ".join(f"{of(rates):.0f}" for of in (min, statistics.median, max))


def measure(family: str, arguments: Arguments, folder: Path) -> list[str]:
    """Return the rows of the table for one architecture."""
    theirs = build_theirs(family, arguments)
    theirs.save_pretrained(folder / family)
    import_model(folder / family, folder / f"{family}-ours", SEQUENCE)
    generator = torch.Generator().manual_seed(2)
    rows = []
    for batch in arguments.batch:
        ours = StagedModel(load_model(open_checkpoint(folder / f"{family}-ours", 0)))
        # The command does the same.
        if batch == 1:
            store_for_single_prompts(ours)
        prompts = torch.randint(0, VOCAB, (batch, PROMPT), generator=generator).tolist()
        calls: dict[str, Callable[[], Ids]] = {
            "ours": partial(generate_ours, ours, prompts, arguments.new_tokens),
            "theirs": partial(generate_theirs, theirs, prompts, arguments.new_tokens),
        }
        rows.append(f"| {family}, {batch} | {compare(calls, arguments.rounds)} |")
    return rows


def main(arguments: Arguments) -> None:
    """Print the table."""
    if arguments.quick:
        arguments = Arguments(arguments.family, arguments.batch, 2, 64, 4, 8, 1)
    print(describe_machine(arguments))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        rows = [row for each in arguments.family for row in measure(each, arguments, Path(folder))]
    table(
        "| model, prompts | ours, tokens/s | theirs, tokens/s | speed, ours / theirs | "
        "the same by CPU time |",
        rows,
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
