"""An elastic job as it would be on fewer nodes, so that its program is there when one is lost."""

import dataclasses

import jax
from jax.sharding import Mesh

from maxramp.config.resolve import resolve
from maxramp.job.start import Job
from maxramp.parallel.mesh import make_mesh, reshape_mesh
from maxramp.rampup.schedule import RampupBatchManager, Stage, Start
from maxramp.training.keys import Recipe
from maxramp.training.state import TrainState, abstract_state


@dataclasses.dataclass(frozen=True)
class Smaller:
    """What the program of a stage is made of, on the first nodes of a job."""

    recipe: Recipe
    mesh: Mesh
    ramp: RampupBatchManager
    stage: Stage
    state: TrainState  # abstract


def smaller_job(job: Job) -> Smaller | None:
    """The stage that an elastic job begins with, on the next smaller number of nodes that it fits.

    None where this process is not on one of them. None on GPUs and TPUs too: their compilers are
    not known to make of a part of a job's devices what a smaller job would look for.
    """
    span, several = job.span, jax.process_count() > 1
    if span.nodes_there is None or not several or jax.default_backend() != "cpu":
        return None
    here = span.ramp.stage_at_step(span.first_step)
    planned = span.planned.stage_at_step(span.first_step)
    count = span.planned.fit(planned, span.nodes_there - 1).devices
    devices = jax.devices()[:count]
    if count >= span.num_devices or jax.process_index() not in {d.process_index for d in devices}:
        return None
    config = resolve(job.loaded, count)
    if config.batch.is_open:
        config = config.replace(total_samples=job.config.batch.total_samples)
    first, ramp = span.ramp.stages[0], span.ramp
    decided = [(t.first_sample, t.global_batch_size) for t in ramp.thresholds[1:]]
    decided = decided if config.batch.rampup_policy == "noise" else []
    start = Start(first.first_step, first.first_sample, first.index, ramp.history, decided)
    ramp = RampupBatchManager(config.batch, count, start)
    stage = ramp.stage_at_step(span.first_step)
    spec = dataclasses.replace(stage.spec, fields=here.spec.fields)
    mesh = make_mesh(config.mesh, devices)
    state = abstract_state(config.recipe, reshape_mesh(mesh, spec.mesh))
    return Smaller(config.recipe, mesh, ramp, dataclasses.replace(stage, spec=spec), state)
