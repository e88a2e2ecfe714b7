"""The memory of a conversion, which must not grow with the number of layers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.extras.interop.convert.writing import FILE_BYTES

transformers = pytest.importorskip("transformers")
HIDDEN = 1024
VOCAB = 32_000
SHARD = 200_000_000


def save_llama(folder: Path, layers: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )
    with torch.device("cpu"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARD)


def measure_peak(*arguments: object) -> int:
    """Return the largest memory of a conversion in bytes."""
    code = (
        "import re, sys\n"
        "from megatron.extras.interop.commands import convert_checkpoint\n"
        "assert convert_checkpoint.main(sys.argv[1:]) == 0\n"
        # The maximum of `getrusage` would be that of the process that started this one.
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments), "--no-compare-model"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.full
def test_memory_is_that_of_the_largest_layer_and_one_file(tmp_path: Path) -> None:
    peaks = {}
    for layers in (1, 32):
        save_llama(tmp_path / f"theirs{layers}", layers)
        ours = tmp_path / f"ours{layers}"
        read = measure_peak("from-hf", "--model", tmp_path / f"theirs{layers}", "--out", ours)
        # The file has the complete model.
        back = tmp_path / f"back{layers}"
        written = measure_peak("to-hf", "--load", ours, "--out", back, "--dtype", "bf16")
        peaks[layers] = (read, written)
    # The smaller model has the same largest layer, the embedding. An import holds one file. An
    # export writes tensor by tensor, although its file has the complete model.
    largest = 4 * VOCAB * HIDDEN
    for small, large, file in zip(peaks[1], peaks[32], (FILE_BYTES, largest), strict=True):
        assert large - small < 0.3 * largest + file, peaks
    parameters = 2 * VOCAB * HIDDEN + 32 * (4 * HIDDEN**2 + 3 * HIDDEN * 2816)
    assert peaks[32][1] < 4 * parameters, "less than the model in fp32"
