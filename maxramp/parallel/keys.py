"""The section of the mesh."""

import dataclasses

from maxramp.errors import ConfigError
from maxramp.keys.section import Keys
from maxramp.parallel.axes import AXES, NAME_IN_KEYS


@dataclasses.dataclass(frozen=True)
class MeshKeys(Keys):
    """The sizes of the mesh's axes, between slices (dcn) and inside one (ici)."""

    ici_data_parallelism: int
    ici_pipeline_parallelism: int
    ici_fsdp_parallelism: int
    ici_tensor_parallelism: int
    dcn_data_parallelism: int
    dcn_pipeline_parallelism: int
    dcn_fsdp_parallelism: int
    dcn_tensor_parallelism: int

    def group(self, group: str) -> dict[str, int]:
        """The keys of a group, "ici" or "dcn", with their sizes, in the order of the axes."""
        names = [f"{group}_{NAME_IN_KEYS[axis]}_parallelism" for axis in AXES]
        return {name: getattr(self, name) for name in names}

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every mesh axis; of a resolved config."""
        ici, dcn = self.group("ici").values(), self.group("dcn").values()
        return {axis: i * d for axis, i, d in zip(AXES, ici, dcn, strict=True)}

    def check(self) -> None:
        """Checks the sizes of each group.

        Raises:
          ConfigError: a size is out of range, or two of a group are open.
        """
        for group in ("ici", "dcn"):
            sizes = self.group(group)
            for name, size in sizes.items():
                if size < 1 and size != -1:
                    raise ConfigError(f"{name}={size} must be 1 or more, or -1 to be filled in")
            open_names = [name for name, size in sizes.items() if size == -1]
            if len(open_names) > 1:
                raise ConfigError(
                    f"{open_names[1]}=-1 and {open_names[0]}=-1: one -1 per group can be filled "
                    "in; give the others"
                )
