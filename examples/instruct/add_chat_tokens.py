"""Add two special tokens and a chat template to a tokenizer.

    python examples/instruct/add_chat_tokens.py tokenizer chat-tokenizer

All other ids stay as they are, so the model can go on from its weights.
"""

import json
import sys
from pathlib import Path

import tokenizers

TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def main() -> None:
    """Write the folder of the new tokenizer."""
    if len(sys.argv) != 3:
        sys.exit("error: give the folder of a tokenizer.json, and a folder for the new one")
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    if not (source / "tokenizer.json").is_file():
        sys.exit(f"error: {source} has no tokenizer.json. tools/train_tokenizer.py writes one")
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in names])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    # Programs that generate text stop at the end of a turn, too.
    ends = [tokenizer.token_to_id(each) for each in ("<|endoftext|>", "<|im_end|>")]
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")


if __name__ == "__main__":
    main()
