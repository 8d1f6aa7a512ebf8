"""ArrayRecord: records that are text, token ids or a tf.train.Example of either."""

import functools
from typing import Any

import numpy as np

from maxramp.data.files.records import BadRecord, Record, RecordFile
from maxramp.errors import ConfigError
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
                    f"its {len(data)} bytes are no int32 token ids (4 bytes each); "
                    "tokenize_train_data=True reads text"
                )
            value = np.frombuffer(data, "<i4")
        return self._checked(data if value is None else value)

    def _feature(self, data: bytes) -> Any:
        """The column of a tf.train.Example; None if the record is none."""
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
        module = optional("array_record.python.array_record_module", "array_record", self.path)
        if storage.is_remote(self.path):
            path = optional("fsspec", "fsspec", self.path).open_local(f"simplecache::{self.path}")
        else:
            storage.open_binary(self.path).close()
            path = self.path
        reader = module.ArrayRecordReader(path, "readahead_buffer_size:0")
        if not reader.ok():
            raise ConfigError(f"{self.path}: is torn or no ArrayRecord file; make it again")
        return reader


_EXAMPLE = """
name: "maxramp/example.proto" package: "maxramp"
message_type {
  name: "Bytes"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "Ints"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "Feature"
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Bytes" }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Ints" }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Feature" }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Entry" }
}
message_type {
  name: "Example"
  field { name: "it" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Features" }
}
"""


@functools.cache
def _example_message() -> type:
    """tf.train.Example, of which only texts and integers are wanted, without TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("maxramp.Example"))
