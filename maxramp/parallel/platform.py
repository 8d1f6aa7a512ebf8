"""What the devices of the mesh that is set are."""

import jax


def platform() -> str | None:
    """What the devices of the mesh that is set are: "cpu", "gpu", "tpu"; None where it has none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else None
