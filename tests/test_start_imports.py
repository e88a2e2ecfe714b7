"""Tests of what a process imports, because some imports take seconds on every rank."""

import json
from pathlib import Path

from tiny_corpus import command
from training.runs import SIZES

SLOW = ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "sympy")
PROGRAM = """
import json, sys
from megatron.commands.pretrain import main
main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)))
"""


def test_training_on_one_device_imports_no_compiler_and_no_fsdp(
    corpus: str, tmp_path: Path
) -> None:
    paths = ["--data-path", corpus, "--data-cache-path", str(tmp_path)]
    process = command("-c", PROGRAM, *SIZES.split(), *paths, "--exit-interval", "1")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    modules = json.loads(output.splitlines()[-1])
    assert "torch" in modules
    assert [name for name in SLOW if name in modules] == []
