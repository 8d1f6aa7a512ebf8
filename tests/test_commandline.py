"""Numbers, waits and tables as people read them."""

import time

import pytest

from maxramp import commandline
from maxramp.commandline import amount, duration, print_table, run_time, show_wait

AMOUNTS = {51648.7: "51,649", 50.43: "50.4", 0.2131: "0.21", 8.53e-05: "<0.01", 0: "0"}
DURATIONS = {0.032: "0.03s", 0: "0s", 45.4: "45s", 200: "3m20s", 7500: "2h05m", 270000: "3d03h"}
TIMES = {8.53e-05: "0.3s", 0.5: "30m00s", 50.43: "50.4 hours"}


@pytest.mark.parametrize(
    "form, table", [(amount, AMOUNTS), (duration, DURATIONS), (run_time, TIMES)]
)
def test_numbers_have_the_digits_that_people_read(form, table):
    assert {number: form(number) for number in table} == table


def test_a_long_wait_shows_that_it_gets_on_and_a_short_one_nothing(monkeypatch):
    monkeypatch.setattr(commandline, "_PERIOD", 0.02)
    lines = []
    with show_wait(lines.append, "still compiling", 0.01):
        while len(lines) < 3:
            time.sleep(0.01)
    with show_wait(lines.append, "nothing", 5.0):
        pass
    assert {*lines} and all(line.startswith("still compiling, for 0.") for line in lines)


def test_a_table_shows_names_as_they_are(capsys):
    print_table(["run[a]", "[/b]"], [["[bold]x", ":smile:"]])
    assert {"run[a]", "[/b]", "[bold]x", ":smile:"} <= {*capsys.readouterr().out.split()}
