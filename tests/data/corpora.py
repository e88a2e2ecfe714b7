"""The committed corpora that the data tests read."""

import hashlib
import json
from pathlib import Path

import numpy as np

from megatron.data.indexed import IndexedDatasetWriter

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
HUNDRED = str(FIXTURES / "openwebtext-100" / "meg-gpt2-openwebtext_text_document")
THOUSAND_IDX = FIXTURES / "openwebtext-1000" / "meg-gpt2-openwebtext_text_document.idx"


def golden(name: str) -> dict:
    """Return the committed hashes of openwebtext-100 or openwebtext-1000."""
    return json.loads((FIXTURES / name / "sample-order.json").read_text())


def short_hash(array: np.ndarray) -> str:
    """Return the first 16 hexadecimal digits of an array's SHA-256."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def write_numbered(prefix: Path, documents: int, size: int, first: int = 0) -> str:
    """Write a corpus of ascending token ids, which show where a sample comes from."""
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for number in range(documents):
            begin = first + number * size
            writer.add_document(np.arange(begin, begin + size))
    return str(prefix)
