"""The Dockerfile, as far as it can be checked without a build: .dockerignore and pyproject.toml."""

import re
import tomllib

from conftest import ROOT

LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()


def test_copied_files_exist_and_are_sent_to_the_builder():
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for line in LINES if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert {"pyproject.toml", "maxramp", "configs"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists() and f"!{name}" in sent


def test_the_image_copies_what_the_build_needs():
    """Files that pyproject.toml names, and the extras that the image has by default."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = " ".join(line for line in LINES if line.startswith("COPY "))
    about = project["project"]
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for name in (about["readme"], *about["license-files"], *included):
        assert name in copied
    (extras,) = (line.partition("EXTRAS=")[2] for line in LINES if line.startswith("ARG EXTRAS="))
    assert set(extras.split(",")) <= about["optional-dependencies"].keys()
    (python,) = (re.fullmatch(r"FROM python:3\.(\d+)-slim", x) for x in LINES if "FROM" in x)
    assert int(python[1]) >= int(about["requires-python"].removeprefix(">=3."))
