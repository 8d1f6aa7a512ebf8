"""Rows that travel inside the step: the program after them stays the same to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.data import relay
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import initial_state
from maxramp.training.step import eval_step

PROCESSES = 4


@pytest.mark.parametrize(
    "factor, stages", [*(pytest.param(n, 1, marks=pytest.mark.slow) for n in (2, 4)), (2, 2)]
)
def test_rows_that_travelled_give_the_same_bits(monkeypatch, factor, stages):
    """Eight devices as those of four processes; the sum of a loss shows how it was compiled."""
    keys = ("per_device_batch_size=2", f"ici_pipeline_parallelism={stages}")
    config = make_config(*keys, "enable_rampup_batch_size=False")
    mesh = make_mesh(config)
    processes = [place * PROCESSES // mesh.size for place in range(mesh.size)]
    monkeypatch.setattr(relay, "_process_indices", lambda mesh: processes)
    objective = next_token_prediction(config.recipe.loss, config.model)
    tokens = config.model.max_target_length
    spec = RampupBatchManager(config.batch).stages[0].spec
    rows = spec.rows

    with jax.set_mesh(mesh):
        model = initial_state(config.recipe).model
        sums = jax.jit(lambda: (jnp.float32(0),) * 2)()

        def program(expansion):
            """Sums only: rows that are returned as well would be an array of their own."""

            def evaluate(model, batch):
                return eval_step(model, sums, expansion.gather(batch), loss=objective)

            return jax.jit(evaluate)

        def slots(rows_ABT, abstract: jax.ShapeDtypeStruct):
            """Each row in the slot and the place that it travels from."""
            slots_fANT = np.zeros(abstract.shape, abstract.dtype)
            own_process = rows // PROCESSES
            for process in range(PROCESSES):
                reader, slot = process - process % factor, process % factor
                own = rows_ABT[:, process * own_process : (process + 1) * own_process]
                slots_fANT[slot, :, reader * own_process : (reader + 1) * own_process] = own
            return jax.device_put(slots_fANT, abstract.sharding)

        travels = relay.Expansion(mesh, factor)
        stays, moves = program(relay.Expansion(mesh, 1)), program(travels)
        random = np.random.default_rng(0)
        for _ in range(50):
            shape = (1, rows, tokens + 1)
            batch = batch_of(random.integers(0, config.model.vocab_size, shape, np.int32))
            wanted = stays(model, jax.device_put(batch, NamedSharding(mesh, BATCH_ABT)))
            travelling = jax.tree.map(slots, batch, travels.abstract_batch(spec))
            assert [float(x) for x in moves(model, travelling)] == [float(x) for x in wanted]
        arrived = jax.jit(travels.gather)(travelling)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, arrived, batch)))
