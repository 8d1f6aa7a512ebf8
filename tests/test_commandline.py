"""Numbers as people read them."""

import pytest

from maxramp.commandline import amount, duration, run_time

AMOUNTS = {51648.7: "51,649", 50.43: "50.4", 0.2131: "0.21", 8.53e-05: "<0.01", 0: "0"}
DURATIONS = {0.032: "0.03s", 0: "0s", 45.4: "45s", 200: "3m20s", 7500: "2h05m", 270000: "3d03h"}
TIMES = {8.53e-05: "0.3s", 0.5: "30m00s", 50.43: "50.4 hours"}


@pytest.mark.parametrize(
    "form, table", [(amount, AMOUNTS), (duration, DURATIONS), (run_time, TIMES)]
)
def test_numbers_have_the_digits_that_people_read(form, table):
    assert {number: form(number) for number in table} == table
