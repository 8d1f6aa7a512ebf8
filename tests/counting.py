"""A family whose layers make sums that are known by hand: what stands beside a pass's output."""

import dataclasses

import jax
import jax.numpy as jnp

from maxramp.model.block import Block
from maxramp.model.families.table import FAMILIES
from maxramp.model.parts.aux import Aux
from maxramp.model.pattern import Layer, Mixing, Pattern, Rope

ROPE = Rope(10_000.0)
LAYER = {
    "mixing": lambda keys: Mixing(ROPE),
    "sums": ("square", "size"),
    "counts": (("signs", (2,)),),
}
WEIGHT = 0.5  # of what is minimized: large enough to bend the gradient


def sums_of(x_BTD: jax.Array) -> Aux:
    """What is minimized, shown and counted of the stream behind a layer, of each row."""
    x_BTD = x_BTD.astype(jnp.float32)
    is_above_BT = x_BTD.mean(-1) > 0
    signs_B2 = jnp.stack([is_above_BT.sum(1), (~is_above_BT).sum(1)], -1).astype(jnp.float32)
    square_B, size_B = (x.mean(-1).sum(-1) for x in (WEIGHT * x_BTD**2, jnp.abs(x_BTD)))
    return Aux({"square": square_B}, {"size": size_B}, {"signs": signs_B2})


class Counting(Block):
    """Llama's layer, and sums of what it returns."""

    def __call__(self, x_BTD: jax.Array, *arguments, **named) -> tuple[jax.Array, Aux]:
        x_BTD, _ = super().__call__(x_BTD, *arguments, **named)
        return x_BTD, sums_of(x_BTD)


def stand_in(monkeypatch, layers: int) -> None:
    """Makes `decoder_block=llama2` a family of so many such layers."""
    pattern = Pattern((Layer("counting", **LAYER),), layers)
    family = dataclasses.replace(
        FAMILIES["llama2"],
        pattern=lambda keys: pattern,
        blocks=lambda: {"counting": Counting},
        tensors={},
    )
    monkeypatch.setitem(FAMILIES, "llama2", family)
