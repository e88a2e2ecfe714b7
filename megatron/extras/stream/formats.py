"""The file formats that can be read without a preparation step."""

from megatron.extras.stream.arrow_files import ArrowFormat
from megatron.extras.stream.jsonl_files import JsonlFormat
from megatron.extras.stream.parquet_files import ParquetFormat
from megatron.extras.stream.row_format import FileFormat

FORMATS: dict[str, FileFormat] = {
    "parquet": ParquetFormat(),
    "arrow": ArrowFormat(),
    "jsonl": JsonlFormat(),
}
