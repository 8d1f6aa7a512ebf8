"""Event files as TensorBoard shows them."""

import pathlib
import struct

from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c


def read(path: pathlib.Path) -> list:
    """The events of a file, their checksums compared, up to one that a kill has torn."""
    data, start, events = path.read_bytes(), 0, []
    while start + 12 <= len(data):
        length, checksum = struct.unpack_from("<QI", data, start)
        end = start + 16 + length
        if end > len(data):
            break
        body = data[start + 12 : end - 4]
        assert checksum == masked_crc32c(data[start : start + 8])
        assert struct.unpack_from("<I", data, end - 4)[0] == masked_crc32c(body)
        events.append(event_pb2.Event.FromString(body))
        start = end
    return events


def shown(folder: pathlib.Path) -> dict[str, dict[int, float]]:
    """The curves of a folder: step to value, by tag. A session takes back what earlier ones wrote
    from its step on; in one session a number of a step is the same wherever it is written."""
    curves: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in read(path):
            if event.session_log.status == event_pb2.SessionLog.START:
                for curve in curves.values():
                    for step in [step for step in curve if step >= event.step]:
                        del curve[step]
            for value in event.summary.value:
                curve = curves.setdefault(value.tag, {})
                first_value = curve.setdefault(event.step, value.simple_value)
                assert repr(first_value) == repr(value.simple_value)  # NaN is the same as NaN
    return curves
