"""configs/schedules against the published numbers, as the table of docs/schedules.md has them."""

import itertools
import re

import pytest
from conftest import ROOT

from maxramp.commandline import short
from maxramp.config.load import load
from maxramp.planning.plan import draw_plan, make_plan
from maxramp.rampup.schedule import RampupBatchManager

FILES = {path.stem: path for path in (ROOT / "configs" / "schedules").glob("*.yml")}
TABLE = {
    row[0]: row[1:]
    for row in re.findall(
        r"^\| \[(.+?)\]\(\.\./configs/schedules/\1\.yml\) \| .+? \| (.+?) \| (.+?) \| (.+?) \| "
        r"(.+?) \| .+? \|$",
        (ROOT / "docs" / "schedules.md").read_text(),
        re.MULTILINE,
    )
}
# Peaks as published, and the fraction of the peak at which the run ends. The others give no rate:
# that of the default model would be wrong.
RATES = {
    **{"gpt3-175b": (6e-5, 0.1), "bloom-176b": (6e-5, 0.1), "deepseek-v3": (2.2e-4, 0.1)},
    **{"llama3-405b": (8e-5, 0.01), "nemo-gpt3-5b": (1.6e-4, 0.1)},
    **{"falcon-mamba-7b": (6.4e-4, 1 / 256), "falcon-7b": (6e-4, 0.02)},
    **{"falcon-40b": (1.85e-4, 0.1), "falcon-180b": (1.25e-4, 0.1), "lucie-7b": (3e-4, 0.1)},
    **{"deepseek-v2": (2.4e-4, 0.316**2), "ling-plus": (2.4e-4, 0.5), "glm-4.5": (2.5e-4, 0.1)},
    **{"deepseek-v4-flash": (2.7e-4, 0.1), "deepseek-v4-pro": (2e-4, 0.1)},
}
PLANNED_NODES = {"nemo-gpt3-5b": [8, 8, 8, 8, 10, 12, 14, 16], "nemotron-4-15b": [96, 192, 288]}
# (consumed tokens, rows) of the switches between the first batch and the last.
SWITCHES = {
    **{"palm-540b": [(50e3 * 512 * 2048, 1024)], "nemotron-4-15b": [(200e9, 768)]},
    **{"olmo-1b": [(168e9, 2048)], "llama3-405b": [(252e6, 1024)], "marin-8b": [(2.77e12, 3072)]},
}


def test_every_file_is_in_the_table_of_the_docs():
    assert set(TABLE) == set(FILES) and len(FILES) == 24


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_has_the_published_numbers(name):
    config = load([str(FILES[name])], note=lambda line: None)
    ramp, sample = RampupBatchManager(config.batch, 1), config.batch.max_target_length
    stages = ramp.stages_between(0, ramp.total_steps)
    batch, rows, ends, total = (cell.replace(" *", "") for cell in TABLE[name])
    first, last, unit = re.match(r"(\S+) → (\S+) (rows|tokens)", batch).groups()
    sizes = [stages[0].global_batch_size, stages[-1].global_batch_size]
    shown = (short(n * sample) if unit == "tokens" else f"{n:,}" for n in sizes)
    assert [*shown] == [first, last]
    lengths = [stages[0].spec.row_length, stages[-1].spec.row_length]
    assert rows == " → ".join(f"{n:,}" for n in dict.fromkeys(lengths))
    grown = [b for a, b in itertools.pairwise(stages) if a.global_batch_size != b.global_batch_size]
    assert short(grown[-1].first_sample * sample) == ends
    assert short(ramp.total_samples * sample) == total
    for tokens, size in SWITCHES.get(name, ()):
        stage = ramp.stage_at_sample(int(tokens // sample) + size)
        assert stage.global_batch_size == size
        assert 0 <= stage.first_sample - tokens // sample <= size


def test_published_steps_and_nodes():
    """OLMo takes 43% fewer than with 1024 rows; Lucie 753,851, without what fills no batch."""
    config = load([str(FILES["olmo-1b"])])
    ramp = RampupBatchManager(config.batch, 1)
    assert 1 - ramp.total_steps / (ramp.total_samples / 1024) == pytest.approx(0.43, abs=0.005)
    assert config.learning_rate.batch_size_lr_scaling == "sqrt"
    ramp = RampupBatchManager(load([str(FILES["lucie-7b"])]).batch, 1)
    assert ramp.samples_before(753_851) <= 762_144_586 < ramp.samples_before(753_852)
    for name, nodes in PLANNED_NODES.items():
        stages = RampupBatchManager(load([str(FILES[name])]).batch).stages
        assert [stage.nodes for stage in stages] == nodes


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FILES))
def test_every_file_plans(name, tmp_path):
    """With the learning rate that was published with it, or none."""
    nodes = [] if name in PLANNED_NODES else ["num_nodes=1", "devices_per_node=1"]
    plan = make_plan(load([str(FILES[name]), *nodes], note=lambda line: None))
    assert len(plan["stages"]) > 1 and not plan["warnings"]
    draw_plan(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    if name not in RATES:
        assert plan["learning_rate"] is None
        return
    (peak, final), rates = RATES[name], plan["learning_rate"]["rate"]
    assert max(rates) == pytest.approx(peak, rel=0.01)
    assert rates[-1] == pytest.approx(final * peak, rel=0.05)
