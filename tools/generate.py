"""Let a checkpoint continue a text: python tools/generate.py --load DIR --prompt "Once upon a time"."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from megatron.checkpoint.folder import find_stored_folder, locate_checkpoint
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.model import load_model
from megatron.checkpoint.verification import ensure_undisturbed
from megatron.errors import ConfigError, MegatronError
from megatron.tokenizer import build_tokenizer


@dataclass(frozen=True)
class GenerateArguments:
    load: str
    """Folder of checkpoints."""
    prompt: str
    """The text to continue."""
    max_new_tokens: int = 60
    """Tokens to add; the end-of-document token ends earlier."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int = 40
    """Draw among the k likeliest tokens; 0: among all."""
    seed: int = 1234
    """Seed of the draw."""
    iteration: int | None = None
    """Which checkpoint. Default: the one that `latest` names."""
    vocab_file: str | None = None
    """Tokenizer files, where those of the run have moved."""
    merge_file: str | None = None
    """Tokenizer files, where those of the run have moved."""


def generate(arguments: GenerateArguments) -> str:
    """The prompt and its continuation.

    Raises:
        CheckpointError: nothing to load. ConfigError: the prompt is empty.
    """
    root, iteration = locate_checkpoint(Path(arguments.load), arguments.iteration)
    with ensure_undisturbed(find_stored_folder(root, iteration)):
        checkpoint = open_checkpoint(root, iteration)
        model = load_model(checkpoint)
    config = checkpoint.read_config()
    files = {
        name: getattr(arguments, name)
        for name in ("vocab_file", "merge_file")
        if getattr(arguments, name)
    }
    tokenizer = build_tokenizer(replace(config.tokenizer, **files))
    ids = tokenizer.encode(arguments.prompt)
    if not ids:
        raise ConfigError("--prompt is empty; give some text to continue")
    generator = torch.Generator().manual_seed(arguments.seed)
    with torch.no_grad():
        for _ in range(arguments.max_new_tokens):
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


def draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id from logits [v]."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))


def main(argv: list[str] | None = None) -> int:
    arguments = tyro.cli(GenerateArguments, args=argv, description=__doc__)
    try:
        print(generate(arguments))
    except MegatronError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
