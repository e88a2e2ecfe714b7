"""tools/hub_sync.py uploads an export to a local server, with the official client."""

from pathlib import Path

import pytest
from operations.hub_fixtures import REPO, hub  # noqa: F401 (pytest finds the fixture here)
from operations.hub_server import TOKEN, HubServer
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import MERGES, VOCAB

from megatron.extras.interop.commands import convert_checkpoint
from megatron.extras.operations.commands import hub_sync

transformers = pytest.importorskip("transformers")


def test_an_export_is_uploaded_as_it_was_verified(
    hub: HubServer,  # noqa: F811
    pool: ProcessPool,
    corpus: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    command = (
        "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --train-iters 1 "
        f"--micro-batch-size 2 --lr 1e-3 --eval-iters 0 --save {tmp_path}/run --data-path {corpus} "
        f"--data-cache-path {tmp_path}/cache --vocab-file {VOCAB} --merge-file {MERGES}"
    )
    succeed(pool.run(1, pretrain, command.split()))
    out = tmp_path / "exported"
    assert convert_checkpoint.main(["to-hf", "--load", f"{tmp_path}/run", "--out", str(out)]) == 0
    expected = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= expected.keys()
    del hub.repositories[REPO]
    upload = ["--repo", REPO, "--folder", str(out), "--patterns", "*", "--create"]
    assert hub_sync.main(upload) == 0
    # Only on request, only these files, unchanged, and private.
    assert hub.files(REPO) == expected
    assert hub.repositories[REPO].private
    uploads = len(hub.history(REPO))
    assert hub_sync.main(upload) == 0
    assert len(hub.history(REPO)) == uploads
    printed = capfd.readouterr()
    assert TOKEN not in printed.out + printed.err
    # What the Hub has is a model.
    again = tmp_path / "downloaded"
    again.mkdir()
    for name, content in hub.files(REPO).items():
        (again / name).write_bytes(content)
    model = transformers.AutoModelForCausalLM.from_pretrained(again)
    assert model.config.num_hidden_layers == 1
    assert transformers.AutoTokenizer.from_pretrained(again)("A text.").input_ids
