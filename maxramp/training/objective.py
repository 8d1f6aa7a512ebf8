"""What a step minimizes: a function of the model and a micro batch to sums.

Shapes: B rows, T tokens, D model width.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxramp.data.batch import Batch
from maxramp.model.decoder import Decoder
from maxramp.model.keys import Execution
from maxramp.model.parts.aux import Aux
from maxramp.training.keys import ObjectiveKeys
from maxramp.training.loss import cross_entropy_sums


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a step minimizes.

    Attributes:
      sums: (model, micro batch) -> (what is minimized, what is shown and counted), each a sum over
        tokens in float32: sums of any split of the rows add up to the same.
      shown: its own names: "loss", "tokens", and whatever else. All the others, and what is
        minimized, are divided by "tokens" once the whole batch is added up.
    """

    sums: Callable[[Decoder, Batch], tuple[jax.Array, Aux]]
    shown: tuple[str, ...] = ("loss", "tokens")

    def __call__(self, model: Decoder, batch: Batch) -> tuple[jax.Array, Aux]:
        """The sums of a micro batch."""
        return self.sums(model, batch)


def next_token_prediction(keys: ObjectiveKeys, execution: Execution) -> Objective:
    """Cross-entropy of every next token, with the z-loss; what is shown is without it.

    Args:
      keys: the weight of the z-loss, and the block of tokens whose logits exist at a time.
      execution: how passes are computed.
    """

    def sums(model: Decoder, batch: Batch) -> tuple[jax.Array, Aux]:
        assert batch.weights is None, "next-token prediction weighs all tokens alike"
        x_BTD, aux = model.hidden(batch.tokens, execution, batch.segments)
        with jax.named_scope("loss"):
            minimized, loss, tokens = cross_entropy_sums(
                x_BTD,
                model.head(execution.dtype),
                batch.targets,
                keys.z_loss_multiplier,
                keys.loss_block_tokens,
            )
        return with_layers(minimized, {"loss": loss, "tokens": tokens}, aux)

    return Objective(sums)


def with_layers(
    minimized: jax.Array, shown: dict[str, jax.Array], aux: Aux
) -> tuple[jax.Array, Aux]:
    """What an objective returns: its own sums, and those that the model's layers made."""
    minimized = sum(aux.minimized.values(), minimized)
    counts = jax.tree.map(lambda x: x.astype(jnp.uint32), aux.counts)
    return minimized, Aux({}, {**shown, **aux.minimized, **aux.shown}, counts)
