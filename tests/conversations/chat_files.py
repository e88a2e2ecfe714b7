"""A tokenizer with a chat template, and files of conversations."""

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from conversations.templates import CASES

from megatron.config.data import TokenizerConfig
from megatron.tokenizer.build import build_byte_level_bpe

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/openwebtext-100"
TEXT = "the city of water and light was seen by many people in a year of war"
WORDS = TEXT.split()


def write_tokenizer(folder: Path, *, chat: bool = True) -> Path:
    """Write a tokenizer with ChatML's tokens and template, or the same one without them."""
    folder.mkdir(parents=True)
    backend = build_byte_level_bpe(
        f"{FIXTURES}/gpt2-tiny-vocab.json", f"{FIXTURES}/gpt2-tiny-merges.txt"
    )
    names = ["<|endoftext|>", *(["<|im_start|>", "<|im_end|>"] if chat else [])]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if chat:
        (folder / "chat_template.jinja").write_text(CASES["chatml"].source)
    return folder


def make_config(folder: Path) -> TokenizerConfig:
    return TokenizerConfig("PretrainedFromHF", tokenizer_name_or_path=str(folder))


def draw_messages(rng: random.Random, most: int = 20) -> list[dict[str, Any]]:
    """Return a conversation of one to three answers."""
    messages = [{"role": "system", "content": "Be brief."}] * (rng.random() < 0.3)
    for _ in range(rng.randint(1, 3)):
        for role in ("user", "assistant"):
            text = " ".join(rng.choices(WORDS, k=rng.randint(1, most)))
            messages.append({"role": role, "content": text})
    return messages


def write_conversations(path: Path, count: int, seed: int = 1) -> Path:
    """Write a file of conversations."""
    rng = random.Random(seed)
    rows = [json.dumps({"messages": draw_messages(rng)}) for _ in range(count)]
    path.write_text("\n".join(rows) + "\n")
    return path
