"""How tokens of a row reach each other: a mixer is the part of a layer that does it."""
