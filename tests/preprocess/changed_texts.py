"""Input files of any size: the texts of openwebtext-1000 with every fifth word replaced."""

import json
import random
from pathlib import Path

from shared_data import shared_dir


def write_changed_texts(folder: Path, sizes: list[int], seed: int = 0) -> list[Path]:
    """Write a .jsonl file of about each size in bytes."""
    generator = random.Random(seed)
    lines = shared_dir("data", "openwebtext-1000", "openwebtext-1000.jsonl").read_text("utf-8")
    texts = [json.loads(line)["text"].split(" ") for line in lines.splitlines()]
    words = [word for text in texts[::10] for word in text]
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, size in enumerate(sizes):
        paths.append(folder / f"part-{number:03d}.jsonl")
        written = 0
        with open(paths[-1], "w", encoding="utf-8") as file:
            while written < size:
                text = list(generator.choice(texts))
                places = range(generator.randrange(5), len(text), 5)
                for place, word in zip(
                    places, generator.choices(words, k=len(places)), strict=True
                ):
                    text[place] = word
                line = json.dumps({"text": " ".join(text)}) + "\n"
                file.write(line)
                written += len(line)
    return paths
