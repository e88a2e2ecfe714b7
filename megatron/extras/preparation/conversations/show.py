"""Shows which tokens of a data set's conversations count, and how well they fill samples."""

import collections
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron.base.errors import ConfigError
from megatron.base.plain_text import make_plain
from megatron.data.indexed import IndexedDataset
from megatron.extras.samples.chat.packed import ConversationPacking
from megatron.tokenizer.build import Tokenizer, list_special_token_ids

_COLOUR = "\x1b[32m{}\x1b[0m"
_MARKED = "«{}»"
_SPECIALS = 20
"""Special tokens that are listed."""


@dataclass(frozen=True)
class ConversationReport:
    """What a data set of conversations holds."""

    prefix: str
    conversations: int
    tokens: int
    counted: int
    """Tokens that count in the loss."""
    longest: int
    samples: int | None
    """Samples of one pass with --seq-length."""
    too_long: int
    """Conversations that do not fit into a sample. A run refuses them."""
    efficiency: float | None
    """Share of these samples that conversations fill. The rest is padding."""
    specials: dict[str, int] = field(default_factory=dict)
    """Special token -> how often the conversations that are shown have it."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """The first conversations: `tokens`, and `counted` for each of them."""


def inspect_conversations(
    prefix: str, show: int, seq_length: int | None, tokenizer: Tokenizer | None
) -> ConversationReport:
    """Return what a data set of conversations holds.

    Args:
        prefix: Path of the data set.
        show: Conversations to show.
        seq_length: Tokens of a sample. None leaves out how they are packed.
        tokenizer: The tokenizer. It is needed to show conversations.

    Raises:
        ConfigError: The data are documents, or the tokenizer is missing.
        DataError: The data set is damaged.
    """
    data = IndexedDataset(prefix)
    if not data.is_packed:
        raise ConfigError(
            f"{prefix} holds documents, whose tokens all count. --show is for data that "
            "preprocess_data.py --conversations has made."
        )
    if show and tokenizer is None:
        raise ConfigError(f"--show {show} needs the tokenizer. Give its flags.")
    samples = efficiency = None
    too_long = 0
    if seq_length is not None:
        samples = ConversationPacking().count_samples(data, (0, len(data)), seq_length)
        fitting = data.sizes[data.sizes <= seq_length + 1]
        too_long = len(data) - len(fitting)
        efficiency = float(fitting.sum(dtype=np.int64) / (samples * (seq_length + 1)))
    shown = []
    # Of the shown ones only. All would have to be decoded.
    found: collections.Counter[str] = collections.Counter()
    for number in range(min(show, len(data))):
        assert tokenizer is not None
        # The sign says whether a token counts.
        stored = data[number]
        ids = np.maximum(stored, ~stored).tolist()
        special = {*list_special_token_ids(tokenizer)}
        found.update(tokenizer.decode([each]) for each in ids if each in special)
        texts = [tokenizer.decode([each]) for each in ids]
        shown.append({"ids": ids, "tokens": texts, "counted": (stored >= 0).tolist()})
    return ConversationReport(
        prefix, len(data), len(data.tokens), int(np.count_nonzero(data.tokens >= 0)),
        int(data.sizes.max()), samples, too_long, efficiency,
        dict(found.most_common(_SPECIALS)), shown,
    )  # fmt: skip


def format_conversations(
    report: ConversationReport, tokenizer: Tokenizer | None, *, colour: bool
) -> str:
    """Return a report for people.

    Args:
        report: The report.
        tokenizer: Decodes the conversations that are shown.
        colour: Whether counted tokens are green. Otherwise they are between « and ».
    """
    lines = [*_list_shown(report, tokenizer, _COLOUR if colour else _MARKED)]
    for name, count in report.specials.items():
        lines.append(f"special token {make_plain(name)}: {count} in the conversations above")
    rows = {
        "conversations": f"{report.conversations:,}",
        "tokens": f"{report.tokens:,}",
        "counted in the loss": f"{report.counted:,} ({report.counted / report.tokens:.1%})",
        "longest": f"{report.longest:,} tokens",
    }
    if report.samples is not None and report.efficiency is not None:
        rows["samples of a pass"] = f"{report.samples:,}, {report.efficiency:.1%} filled"
    if report.too_long:
        rows["PROBLEM"] = f"{report.too_long:,} are longer than a sample. A run refuses them"
    return "\n".join([*lines, *(f"{name:20} {value}" for name, value in rows.items())])


def to_json(report: ConversationReport) -> dict[str, Any]:
    """Return a report as JSON values."""
    return asdict(report)


def _list_shown(
    report: ConversationReport, tokenizer: Tokenizer | None, form: str
) -> Iterator[str]:
    """Yield the conversations that are shown."""
    for number, each in enumerate(report.shown):
        assert tokenizer is not None
        pieces = []
        pairs = zip(each["counted"], each["ids"], strict=True)
        for counted, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
            # Several tokens may be one character. The text is foreign.
            text = tokenizer.decode([token for _, token in run])
            text = "\n".join(map(make_plain, text.split("\n")))
            pieces.append(form.format(text) if counted else text)
        yield f"--- conversation {number + 1}"
        yield "".join(pieces)
