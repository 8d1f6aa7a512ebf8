"""OLMo 3: an OLMo 2 in which three of four layers see a window (arXiv 2512.13961). `rope_type=yarn`
scales those that see all."""

import dataclasses
import functools

from maxramp.model.families.family import Released
from maxramp.model.families.llama import windows_pattern
from maxramp.model.families.olmo2 import OLMO2

OLMO3 = dataclasses.replace(
    OLMO2,
    pattern=functools.partial(windows_pattern, 4, True),
    released=Released(
        "olmo3",
        "Olmo3ForCausalLM",
        {**OLMO2.released.defaults, "sliding_window": 4096, "rope_theta": 5e5},
        {"sliding_window_size": "sliding_window"},
        period=4,
        local_rope=("", 5e5),
    ),
    keys=("sliding_window_size", "local_rope_max_timescale"),
)
