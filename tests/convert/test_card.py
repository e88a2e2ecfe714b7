"""The names of the training data on a model card."""

from pathlib import Path

from megatron.config.data import DataConfig
from megatron.extras.interop.convert.export import list_data_names


def test_data_are_named_wherever_they_are_given(tmp_path: Path) -> None:
    assert list_data_names(DataConfig(data_path=("0.3", "/a/en", "0.7", "/b/fr"))) == ["en", "fr"]
    splits = ("train: 0.7 0:0.95 /a/en, 0.3 0:0.95 /b/code",)
    assert list_data_names(DataConfig(train_weighted_split_paths=splits)) == ["en", "code"]
    (tmp_path / "splits.txt").write_text(splits[0])
    listed = DataConfig(train_weighted_split_paths_path=str(tmp_path / "splits.txt"))
    assert list_data_names(listed) == ["en", "code"]
    streamed = DataConfig(data_path=("s3://bucket/web",), dataset_format="parquet")
    assert list_data_names(streamed) == ["web"]
    two = DataConfig(data_path=("/a",), dataset_format="jsonl", datasets="en,fr/old")
    assert list_data_names(two) == ["en", "old"]
    phases = tmp_path / "phases.yaml"
    phases.write_text(
        "- {from_iteration: 1, data_path: [/a/en]}\n"
        "- {from_iteration: 5, data_path: [1, /a/en, 2, /b/math]}\n"
    )
    assert list_data_names(DataConfig(data_phases=str(phases))) == ["en", "math"]
    phases.unlink()
    assert list_data_names(DataConfig(data_phases=str(phases))) == []
