"""The file formats that can be read without a preparation step."""

from megatron.data.stream.arrow_files import ArrowFormat
from megatron.data.stream.jsonl_files import JsonlFormat
from megatron.data.stream.parquet_files import ParquetFormat
from megatron.data.stream.row_format import FileFormat

FORMATS: dict[str, FileFormat] = {
    "parquet": ParquetFormat(),
    "arrow": ArrowFormat(),
    "jsonl": JsonlFormat(),
}
