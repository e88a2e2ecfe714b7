"""Make conversations about the sentences of a text, as a small set for a first try.

    python examples/instruct/make_conversations.py corpus chat.jsonl

Each conversation asks to continue, to repeat or to reverse words of a sentence. A real set is
written by people.
"""

import json
import random
import re
import sys
from pathlib import Path


def ask(words: list[str], rng: random.Random) -> tuple[str, str]:
    """Return a question about some words, and its answer."""
    few = words[: rng.randint(2, 5)]
    return rng.choice(
        [
            (f"Repeat: {' '.join(few)}", " ".join(few)),
            (f"Reverse: {' '.join(few)}", " ".join(reversed(few))),
            (f"Continue: {' '.join(few)}", " ".join(words[len(few) : len(few) + 8])),
        ]
    )


def main() -> None:
    """Write the file."""
    if len(sys.argv) != 3:
        sys.exit("error: give a folder of .txt files, and a file for the conversations")
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    rng = random.Random(1)
    text = " ".join(path.read_text() for path in sorted(folder.glob("*.txt")))
    sentences = [words for each in re.split(r"[.!?\n]+", text) if len(words := each.split()) >= 8]
    if not sentences:
        sys.exit(f"error: {folder} has no .txt file with sentences of 8 words.")
    with out.open("w") as file:
        for _ in range(3000):
            messages = [{"role": "system", "content": "Do what is asked."}]
            for words in rng.choices(sentences, k=rng.randint(1, 3)):
                question, answer = ask(words, rng)
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
