"""Continue a text with a checkpoint's model.

python tools/generate.py --load DIR --prompt "Once upon a time"
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from megatron.checkpoint.folder import find_stored_folder, locate_checkpoint
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.model import load_model
from megatron.checkpoint.verification import ensure_undisturbed
from megatron.commands.run_tool import run_tool
from megatron.errors import ConfigError
from megatron.tokenizer import build_tokenizer
from megatron.training.resume import check_tokenizer
from megatron.training.state import TrainState

_BOUND = 2**63
"""Torch stores seeds and sizes in 64 bits, one of them for the sign."""


@dataclass(frozen=True)
class GenerateArguments:
    """The command line."""

    load: str
    """Folder of the run's checkpoints."""
    prompt: str
    """The text to continue."""
    max_new_tokens: int = 60
    """Tokens to add. The end-of-document token ends the text earlier."""
    temperature: float = 0.8
    """Divides the logits. 0 always takes the most likely token."""
    top_k: int = 40
    """Sample from the k most likely tokens. 0 samples from all."""
    seed: int = 1234
    """Seed of the sampling."""
    iteration: int | None = None
    """Iteration of the checkpoint. Default: the one that `latest` names."""
    vocab_file: str | None = None
    """Vocabulary file, if the run's has moved."""
    merge_file: str | None = None
    """Merges file, if the run's has moved."""


def generate(arguments: GenerateArguments) -> str:
    """Return the prompt and its continuation.

    Raises:
        CheckpointError: There is no checkpoint to load.
        ConfigError: A value is out of range, the prompt is empty, or the tokenizer is not the one
            of the training.
    """
    check_arguments(arguments)
    root, iteration = locate_checkpoint(Path(arguments.load), arguments.iteration)
    # The run may be active and remove this checkpoint while it is loaded.
    with ensure_undisturbed(find_stored_folder(root, iteration)):
        checkpoint = open_checkpoint(root, iteration)
        model = load_model(checkpoint)
    config = checkpoint.read_config()
    files = {
        name: getattr(arguments, name)
        for name in ("vocab_file", "merge_file")
        if getattr(arguments, name)
    }
    tokenizer_config = replace(config.tokenizer, **files)
    tokenizer = build_tokenizer(tokenizer_config)
    # Other ids than those of the training would give a meaningless text without an error.
    check_tokenizer(
        replace(config, tokenizer=tokenizer_config), TrainState.from_json(checkpoint.state)
    )
    ids = tokenizer.encode(arguments.prompt)
    if not ids:
        raise ConfigError("--prompt is empty; give some text to continue")
    # A generator of its own makes the text depend only on the seed.
    generator = torch.Generator().manual_seed(arguments.seed)
    with torch.no_grad():
        for _ in range(arguments.max_new_tokens):
            # The model has seen no positions after `seq_length`, so only the last tokens are given
            # to it.
            window = torch.tensor([ids[-config.model.seq_length :]])
            token = draw(
                model.compute_logits(window)[0, -1],
                arguments.temperature,
                arguments.top_k,
                generator,
            )
            if token == tokenizer.eod:
                break
            ids.append(token)
    return tokenizer.decode(ids)


def check_arguments(arguments: GenerateArguments) -> None:
    """Check the numbers of the command line.

    Raises:
        ConfigError: A number is out of range.
    """
    # NaN fails this comparison as well.
    if not 0 <= arguments.temperature < math.inf:
        raise ConfigError(f"--temperature {arguments.temperature} must be at least 0, and finite.")
    for flag, value in (
        ("--max-new-tokens", arguments.max_new_tokens),
        ("--top-k", arguments.top_k),
        ("--seed", arguments.seed),
    ):
        if not 0 <= value < _BOUND:
            raise ConfigError(f"{flag} {value} must be at least 0 and below {_BOUND}.")


def draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Sample one token id from logits [v]."""
    # Division by 0 would make every probability NaN.
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))


def main(argv: list[str] | None = None) -> int:
    """Print the continuation that `argv` asks for and return the exit code."""
    arguments = tyro.cli(GenerateArguments, args=argv, description=__doc__)

    def work() -> int:
        print(generate(arguments))
        return 0

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
