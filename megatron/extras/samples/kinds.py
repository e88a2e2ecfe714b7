"""The kind of data of each --dataset-format."""

from megatron.data.source import SourceKind
from megatron.extras.samples.stream.build import StreamedData
from megatron.extras.samples.stream.formats import FORMATS

SOURCE_KINDS: dict[str, SourceKind] = {
    **dict.fromkeys(FORMATS, StreamedData()),
}
