"""The length of a run that is as long as num_epoch passes over its data."""

import dataclasses
from collections.abc import Callable

from maxramp.config.keys import Config
from maxramp.config.resolve import resolve
from maxramp.data.keys import LOCAL_CACHE
from maxramp.data.opening import open_rows
from maxramp.data.order import RunRows
from maxramp.keys.section import is_object_storage
from maxramp.planning.stages import with_nodes
from maxramp.rampup.phases import MIXTURE
from maxramp.run.job_schedule import length_by_epochs


def with_length(config: Config, say: Callable[[str], None]) -> Config:
    """Fills in total_samples of a loaded config without a length, from its data; returns one that
    has a length as it is. `say` gets a line before the data is read, and prepared on this machine.
    For one process; raises as `open_rows`."""
    if not config.batch.is_open or config.run.program == "grpo":  # its data are prompts
        return config
    num_epoch = config.data.num_epoch
    say(f"reading the data: the run is num_epoch={num_epoch} passes over it")
    planned = with_nodes(config)
    devices = planned.batch.num_devices
    later = [(p.first_sample, p.changes[MIXTURE]) for p in config.batch.changing(MIXTURE)]
    resolved = resolve(planned, devices)
    data = resolved.data
    if is_object_storage(data.data_cache_dir):  # it may be out of reach here
        data = dataclasses.replace(data, data_cache_dir=LOCAL_CACHE)
    corpus = open_rows(data, True, later=later)
    rows = len(RunRows(corpus.train, num_epoch, None, corpus.later))
    samples, _ = length_by_epochs(resolved.batch, devices, None, rows, num_epoch)
    return config.replace(total_samples=samples)
