"""Bad records of a preparation: how many there may be, and the list of them."""

import contextlib
import dataclasses
from typing import Any

from maxramp.data.files.records import BadRecord, RecordFile
from maxramp.errors import ConfigError

LIST = "bad_records.jsonl"  # in the folder of a set: what was left out of it, a line each


def entry(file: RecordFile, bad: BadRecord) -> dict[str, Any]:
    """What the list says of a record. A line has its byte; its number would take a count."""
    return {"file": file.path, file.unit: bad.place, "reason": str(bad)}


def listed(one: dict[str, Any]) -> str:
    """An entry, for a person."""
    (unit, place), *_ = ((k, v) for k, v in one.items() if k not in ("file", "reason"))
    return f"{one['file']}: {unit} {place}: {one['reason']}"


@dataclasses.dataclass(frozen=True)
class BadRecords:
    """How many records may be bad: so many of them, or with `share` so large a part of all."""

    most: float = 0
    share: bool = False

    @classmethod
    def parse(cls, text: str) -> "BadRecords":
        """A whole number, or a share below 1.

        Raises:
          ConfigError: it is neither.
        """
        with contextlib.suppress(ValueError, OverflowError):
            most = float(text)
            if most >= 0 and most == int(most):
                return cls(int(most), False)
            if 0 < most < 1:
                return cls(most, True)
        raise ConfigError(
            f"--max_bad_records {text} must be a number of records, such as 100, or a share of "
            "them below 1, such as 0.001"
        )

    def check(self, bad: int, records: int, example: str) -> None:
        """Refuses more bad records than may be.

        Args:
          bad: records that are.
          records: good and bad ones; a number of them is refused without knowing that.
          example: one of the bad ones.

        Raises:
          ConfigError: there are too many.
        """
        if bad > (self.most * records if self.share else self.most):
            of_all = f"{bad:,} of {records:,} records are bad, more than" if self.share else ""
            end = f"; {of_all or 'more are bad than'} --max_bad_records {self.most}"
            raise ConfigError(f"{example}{end if self.most else ''}")
