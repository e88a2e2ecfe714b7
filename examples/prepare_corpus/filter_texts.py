"""Filter and deduplicate raw texts with blocks of datatrove, and show what each step removes.

    python examples/prepare_corpus/filter_texts.py --input raw --output filtered --html

Raw texts are .jsonl files, also as .gz or .zst, with the key `text`. With --html they are web
pages. The output folder has kept/ with the texts, removed/ with those of each step, removed.md with
a table and samples, and removed.png.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import (
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LanguageFilter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from megatron.console.figure import make_figure, save_figure

SAMPLES = 3
"""Removed texts of each step that removed.md shows."""


def main() -> None:
    """Run the pipeline that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True, help="folder of .jsonl files")
    parser.add_argument("--output", required=True, type=Path, help="folder of the results")
    parser.add_argument("--tasks", type=int, default=1, help="number of processes")
    parser.add_argument("--html", action="store_true", help="extract the texts of web pages")
    parser.add_argument(
        "--languages",
        nargs="*",
        default=[],
        help="keep these, such as en. This downloads the model lid.176.bin (131 MB)",
    )
    given = parser.parse_args()
    # datatrove leaves out the steps that its logs call complete, even if the input has changed.
    if given.output.exists() and any(given.output.iterdir()):
        parser.error(f"--output {given.output} has results already. Remove it, or name another.")
    if not any(Path(given.input).rglob("*.jsonl*")):
        parser.error(f"--input {given.input} has no .jsonl file. Correct the path.")
    counts = filter_texts(given.input, given.output, given.tasks, given.html, given.languages)
    report(counts, given.output)


def filter_texts(
    source: str, output: Path, tasks: int, html: bool, languages: list[str]
) -> dict[str, tuple[int, int]]:
    """Run all steps. Return the documents that each step reads, and those that it removes."""

    def run(name: str, blocks: list[Any], count: int = tasks) -> Any:
        return LocalPipelineExecutor(
            blocks, tasks=count, logging_dir=str(output / "logs" / name)
        ).run()

    def keep_removed(step: str) -> JsonlWriter:
        return JsonlWriter(str(output / "removed" / step))

    read_unique = JsonlReader(str(output / "good"))
    work = output / "minhash"
    config = MinhashConfig()
    steps: dict[str, Any] = {}
    if html:
        # The default of one second would make the result depend on the load of the machine.
        steps["extraction"] = Trafilatura(timeout=60)
    if languages:
        steps["language"] = LanguageFilter(languages, exclusion_writer=keep_removed("language"))
    steps |= {
        "repetition": GopherRepetitionFilter(exclusion_writer=keep_removed("repetition")),
        "quality": GopherQualityFilter(exclusion_writer=keep_removed("quality")),
        "lines": FineWebQualityFilter(exclusion_writer=keep_removed("lines")),
    }
    good = run("good", [JsonlReader(source), *steps.values(), JsonlWriter(str(output / "good"))])
    if not any((output / "good").glob("*")):
        raise SystemExit(
            f"error: no text of {source} is left after {', '.join(steps)}. Read the log above and "
            f"{output / 'removed'}, and correct the texts or leave out a filter."
        )
    run("signatures", [read_unique, MinhashDedupSignature(str(work / "signatures"), config)])
    buckets = MinhashDedupBuckets(str(work / "signatures"), str(work / "buckets"), config=config)
    run("buckets", [buckets], config.num_buckets)
    run(
        "clusters",
        [MinhashDedupCluster(str(work / "buckets"), str(work / "duplicates"), config)],
        1,
    )
    duplicates = MinhashDedupFilter(str(work / "duplicates"), keep_removed("duplicates"))
    kept = run("kept", [read_unique, duplicates, JsonlWriter(str(output / "kept"))])
    counts = {}
    for name, block in zip([*steps, "duplicates"], [*good.stats[1:-1], kept.stats[1]], strict=True):
        total, forwarded = (int(block.stats[each].total) for each in ("total", "forwarded"))
        counts[name] = (total, total - forwarded)
    return counts


def report(counts: dict[str, tuple[int, int]], output: Path) -> None:
    """Write removed.md and removed.png, and print the table."""
    table = ["| step | documents | removed | share |", "|---|--:|--:|--:|"]
    table += [
        f"| {step} | {total:,} | {removed:,} | {removed / max(1, total):.1%} |"
        for step, (total, removed) in counts.items()
    ]
    samples = []
    for step in counts:
        samples.append(f"\n## Removed by: {step}")
        for path in sorted((output / "removed" / step).glob("*.jsonl.gz"))[:1]:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for _, line in zip(range(SAMPLES), file, strict=False):
                    record = json.loads(line)
                    reason = record.get("metadata", {}).get("filter_reason", step)
                    samples.append(f"\n{reason}: {' '.join(record['text'].split())[:300]}")
    text = "\n".join([*table, *samples]) + "\n"
    (output / "removed.md").write_text(text, encoding="utf-8")
    figure = make_figure(6, 3)
    axes = figure.subplots()
    axes.barh(list(counts), [removed for _, removed in counts.values()])
    axes.invert_yaxis()
    axes.set_xlabel(f"documents removed, of {next(iter(counts.values()))[0]:,}")
    save_figure(figure, output / "removed.png")
    print("\n".join(table))


if __name__ == "__main__":
    main()
