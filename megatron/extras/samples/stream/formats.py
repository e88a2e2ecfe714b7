"""The file formats that can be read without a preparation step."""

from megatron.extras.samples.stream.jsonl_files import JsonlFormat
from megatron.extras.samples.stream.row_format import FileFormat
from megatron.extras.samples.stream.table_files import ArrowFormat, ParquetFormat

FORMATS: dict[str, FileFormat] = {
    "parquet": ParquetFormat(),
    "arrow": ArrowFormat(),
    "jsonl": JsonlFormat(),
}
