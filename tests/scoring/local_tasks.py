"""Tasks of lm-evaluation-harness with local data, for tests without a network."""

import json
from pathlib import Path

from tiny_corpus import JSONL


def read_texts(count: int, length: int) -> list[str]:
    lines = JSONL.read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["text"][:length] for line in lines]


def write_tasks(folder: Path, documents: int = 6) -> list[str]:
    """Write three tasks with local data: choices, texts, and generation."""
    texts = read_texts(documents, 90)
    items = [
        {"text": text, "choices": [" the end", " a beginning", text[-20:]], "label": i % 3}
        for i, text in enumerate(texts)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in items), encoding="utf-8")
    common = (
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\nnum_fewshot: 0\n"
    )
    (folder / "choose.yaml").write_text(
        f"task: choose_locally\n{common}output_type: multiple_choice\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    (folder / "read.yaml").write_text(
        f"task: read_locally\n{common}output_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n"
    )
    (folder / "write.yaml").write_text(
        f"task: write_locally\n{common}output_type: generate_until\n"
        'doc_to_text: "{{text}}"\ndoc_to_target: "{{text}}"\n'
        'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    return ["choose_locally", "read_locally", "write_locally"]


def write_task_with_examples(folder: Path) -> str:
    """Write a task whose prompts have examples, and whose answers are short words."""
    data = folder / "examples.jsonl"
    items = [
        {"question": f"{word} {word}", "answer": word}
        for word in ("one", "two", "three", "four", "five", "six", "seven")
    ]
    data.write_text("".join(json.dumps(each) + "\n" for each in items), encoding="utf-8")
    (folder / "repeat.yaml").write_text(
        "task: repeat_locally\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\nfewshot_split: test\noutput_type: loglikelihood\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: " {{answer}}"\n'
        "metric_list: [{metric: perplexity}, {metric: acc}]\n"
    )
    return "repeat_locally"
