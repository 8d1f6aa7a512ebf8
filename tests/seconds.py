"""Where the tests' time goes: `pytest --seconds` shows it by folder and by file.

Processor time of the test's process and of those that it started, which a busy machine hardly
changes: wall time says more about the machine's other work.
"""

import collections
import os
import pathlib
from multiprocessing import forkserver

import pytest

_FILES_SHOWN = 60
_last = [0.0]


def _processor_seconds() -> float:
    """What this process, its children and the forked commands have taken so far."""
    ours = sum(os.times()[:4])
    if server := forkserver._forkserver._forkserver_pid:
        fields = pathlib.Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        ours += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return ours


def pytest_addoption(parser):
    parser.addoption("--seconds", action="store_true", help="processor time by folder and file")


def pytest_collection_finish(session):
    _last[0] = _processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    now = _processor_seconds()
    report.processor_seconds, _last[0] = now - _last[0], now
    return report


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("seconds"):
        return
    tests, folders, files = (collections.Counter() for _ in range(3))
    counts = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if seconds := getattr(report, "processor_seconds", None):
                path = pathlib.Path(report.nodeid.partition("::")[0])
                tests[report.nodeid] += seconds
                files[str(path)] += seconds
                folders[str(path.parent)] += seconds
                counts[str(path)] += report.when == "call"
                counts[str(path.parent)] += report.when == "call"
    show = terminalreporter.write_line
    terminalreporter.section("processor time of tests")
    show(f"{sum(folders.values()):8.1f} s in all")
    for table in (folders, files):
        show("")
        for name, seconds in table.most_common(_FILES_SHOWN):
            show(f"{seconds:8.1f} s {counts[name]:5d} tests  {name}")
    show("")
    for name, seconds in tests.most_common(_FILES_SHOWN):
        show(f"{seconds:8.1f} s  {name}")
