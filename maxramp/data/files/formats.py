"""ArrayRecord, JSON lines, Parquet and text files, and the reader of every format."""

import contextlib
import functools
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from maxramp.data.files import records
from maxramp.data.files.megatron import MegatronFile
from maxramp.data.files.records import WHOLE, BadRecord, Piece, Record, RecordFile
from maxramp.errors import ConfigError, one_line
from maxramp.files import storage
from maxramp.files.storage import optional


class ArrayRecordFile(RecordFile):
    """Records that are UTF-8 text or little-endian int32 ids, or a tf.train.Example of either."""

    def __len__(self) -> int:
        return self._reader.num_records()

    def _record(self, index: int) -> Record:
        try:
            (data,) = self._reader.read([index])
        except (RuntimeError, IndexError) as error:
            what = str(error).partition(";")[0][:150]
            raise ConfigError(f"{self.where(index)}: cannot be read ({what}); torn?") from None
        value = self._feature(data)
        if value is None and self.tokens:
            if len(data) % 4:
                raise BadRecord(
                    f"its {len(data)} bytes are not int32 token ids (4 bytes each); "
                    "tokenize_train_data=True reads text"
                )
            value = np.frombuffer(data, "<i4")
        return self._validate(data if value is None else value)

    def _feature(self, data: bytes) -> Any:
        """Returns the column's value in a tf.train.Example; None for data of another kind, a
        BadRecord if it lacks the column."""
        if not data.startswith(b"\n"):
            return None
        example = _example_message()()
        try:
            example.ParseFromString(data)
        except Exception:  # DecodeError: not a message
            return None
        features = {entry.key: entry.value for entry in example.it.feature}
        if not any(features):
            return None
        if self.column not in features:
            raise self._missing(features)
        feature = features[self.column]
        if feature.HasField("int64_list"):
            return list(feature.int64_list.value)
        texts = feature.bytes_list.value
        return texts[0] if len(texts) == 1 else list(texts)

    @functools.cached_property
    def _reader(self) -> Any:
        """The open file; an address is copied to a local cache first. A ConfigError if it is torn,
        or cannot be opened."""
        module = optional("array_record.python.array_record_module", "array_record", self.path)
        if storage.is_remote(self.path):
            path = optional("fsspec", "fsspec", self.path).open_local(f"simplecache::{self.path}")
        else:
            storage.open_binary(self.path).close()
            path = self.path
        reader = module.ArrayRecordReader(path, "readahead_buffer_size:0")
        if not reader.ok():
            raise ConfigError(f"{self.path}: is torn or not an ArrayRecord file; make it again")
        return reader


_EXAMPLE = """
name: "maxramp/example.proto" package: "maxramp"
message_type {
  name: "Bytes" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "Ints" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "Feature"
  field { name: "bytes_list" number: 1 type_name: "Bytes" }
  field { name: "int64_list" number: 3 type_name: "Ints" }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type_name: "Feature" }
}
message_type {
  name: "Features" field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "Entry" }
}
message_type { name: "Example" field { name: "it" number: 1 type_name: "Features" }}
"""


@functools.cache
def _example_message() -> type:
    """Builds tf.train.Example, its texts and integers only, without TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("maxramp.Example"))


_HINT = "JSON lines have an object on each line; jq -c '.[]' FILE makes them of an array"
LONGEST_LINE = 1 << 30  # bytes of JSON; no document is longer, and it takes memory several times

SUFFIXES = {
    "arrayrecord": (".array_record", ".arrayrecord", ".riegeli"),
    "parquet": (".parquet", ".pq"),
    "jsonl": tuple(
        f"{name}{packed}"
        for name in (".jsonl", ".ndjson", ".json")
        for packed in ("", ".gz", ".zst")
    ),
    "text": (".txt", ".text", ".md", ".rst", ".py"),
    "megatron": (".bin", ".idx"),
}


def detect(path: str) -> str:
    """Returns the format that a file's name tells; a ConfigError if none."""
    for name, suffixes in SUFFIXES.items():
        if path.lower().endswith(suffixes):
            return name
    raise ConfigError(
        f"{path}: its name does not say what it holds; give grain_file_type={'|'.join(SUFFIXES)}"
    )


class TextFile(RecordFile):
    """A file that is one document."""

    def __len__(self) -> int:
        return 1

    def _record(self, index: int) -> Record:
        return self._validate(storage.read_bytes(self.path))


class JsonLines(RecordFile):
    """A JSON object a line; blank lines do not count. Compressed files are read as streams."""

    unit = "byte"

    def split(self, size: int) -> list[Piece]:
        total = storage.size_of(self.path)
        step = total if self._compression else size
        return [(a, min(a + step, total), min(step, total - a)) for a in range(0, total, step or 1)]

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Record | BadRecord]]:
        with self._reading() as file:
            position = start
            if start:  # a line that begins before `start` belongs to the piece before
                file.seek(start - 1)
                position += len(self._line(file)) - 1
            while self._compression or position < stop:
                line = self._line(file)
                if not line:
                    break
                if not line.isspace():
                    yield position, records.attempt(self._parse, line)
                position += len(line)

    @property
    def is_empty(self) -> bool:
        return not self.num_bytes

    def where(self, position: int) -> str:
        """Returns file and line; reads the file up to the position."""
        count = 1
        with self._reading() as file:
            while position > 0:
                block = file.read(min(position, 1 << 20))
                if not block:  # the file has become shorter
                    break
                count, position = count + block.count(b"\n"), position - len(block)
        return f"{self.path}: line {count}"

    @functools.cached_property
    def _compression(self) -> str:
        return {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(self.path)[1].lower(), "")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[BinaryIO]:
        """Opens the file for reading, decompressed by its suffix; positions are of decompressed
        bytes. A ConfigError where it cannot be read; the block raises no OSError of its own.
        """
        file = raw = storage.open_binary(self.path)
        if self._compression == "gzip":
            file = gzip.GzipFile(fileobj=raw)
        elif self._compression == "zstd":
            arrow = optional("pyarrow", "pyarrow", self.path)
            file = io.BufferedReader(arrow.CompressedInputStream(raw, "zstd"), 1 << 20)
        elif storage.is_remote(self.path):
            file = io.BufferedReader(raw, 1 << 20)
        try:
            with raw, file:
                yield file
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None)  # the system's, not the decompressor's
            if self._compression and not reason:
                what = f"is cut off or not a {self._compression} file ({error}); make it again"
            else:
                what = f"cannot be read: {reason or one_line(error)}"
            raise ConfigError(f"{self.path}: {what}") from None

    def _line(self, file: BinaryIO) -> bytes:
        """Reads one line, b"" at the end; a ConfigError if it is as long as LONGEST_LINE."""
        line = file.readline(LONGEST_LINE)
        if len(line) == LONGEST_LINE:
            raise ConfigError(
                f"{self.path}: has a line of {LONGEST_LINE:,} bytes or more; write a JSON object "
                "on each line"
            )
        return line

    def _parse(self, line: bytes) -> Record:
        """Returns the column of a line, or with WHOLE all of it; a BadRecord if it is no JSON
        object or has no such column."""
        if records.is_utf16(line):
            raise BadRecord(records.UTF16)
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise records.utf8_error(error) from None
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", None) or str(error)
            is_part = line.strip() == b"{" or line.lstrip().startswith(b"[")
            hint = _HINT if is_part else "cut off?"
            raise BadRecord(f"is not JSON ({what}); {hint}") from None
        if not isinstance(record, dict):
            hint = f"; {_HINT}" if isinstance(record, list) else ""
            raise BadRecord(f"is not a JSON object but {records.describe(record)}{hint}")
        if self.column == WHOLE:
            return self._validate(record)
        if self.column not in record:
            raise self._missing(record)
        return self._validate(record[self.column])


class ParquetFile(RecordFile):
    """The rows of one column, or of all."""

    def split(self, size: int) -> list[Piece]:
        pieces, start, held = [], 0, 0
        for index in range(self._metadata.num_row_groups):
            held += self._metadata.row_group(index).total_byte_size
            if held >= size or index == self._metadata.num_row_groups - 1:
                pieces.append((start, index + 1, held))
                start, held = index + 1, 0
        return pieces

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Record | BadRecord]]:
        index = int(self._starts[start])
        with self._open(self._metadata) as file:
            columns = None if self.column == WHOLE else [self.column]
            batches = file.iter_batches(1024, list(range(start, stop)), columns)
            while True:
                batch = self._call_arrow(lambda: next(batches, None))
                if batch is None:
                    return
                scalars = batch.to_struct_array() if self.column == WHOLE else batch.column(0)
                for scalar in scalars:
                    yield index, records.attempt(self._value, scalar)
                    index += 1

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _value(self, scalar: Any) -> Record:
        """Returns an Arrow scalar as a record; a BadRecord if it is not one."""
        try:
            value = scalar.as_py(maps_as_pydicts="strict")
        except UnicodeDecodeError as error:  # Arrow reads strings without looking at them
            raise records.utf8_error(error) from None
        except KeyError as error:  # a map that has a key twice
            raise BadRecord(f"cannot be read ({error.args[0]})") from None
        return self._validate(records.without_nulls(value) if self.column == WHOLE else value)

    @contextlib.contextmanager
    def _open(self, metadata: Any = None) -> Iterator[Any]:
        parquet = optional("pyarrow.parquet", "pyarrow", self.path)
        with storage.open_binary(self.path) as source:
            yield self._call_arrow(lambda: parquet.ParquetFile(source, metadata=metadata))

    @functools.cached_property
    def _metadata(self) -> Any:
        """What the end of the file says of it; a ConfigError without the column."""
        # Kept without the file: a run may have more files than a process can hold open.
        with self._open() as file:
            names = file.schema_arrow.names
            if self.column not in (WHOLE, *names):
                raise ConfigError(f"{self.path}: {self._missing(names)}")
            return file.metadata

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        return np.cumsum([0, *(group.num_rows for group in groups)])

    def _call_arrow(self, reading: Callable[[], Any]) -> Any:
        """Returns what `reading` returns; a ConfigError for any error of Arrow."""
        try:
            return reading()
        except (OSError, ValueError) as error:  # Arrow's own are among them
            what = one_line(error, 150)
            raise ConfigError(f"{self.path}: is torn or not a Parquet file ({what})") from None


READERS = {
    "arrayrecord": ArrayRecordFile,
    "parquet": ParquetFile,
    "jsonl": JsonLines,
    "text": TextFile,
    "megatron": MegatronFile,
}
