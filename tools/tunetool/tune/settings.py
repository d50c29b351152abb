"""One setting of DeepSpeed's ``aio`` block: the parameters of ``aio_handle``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from tunetool.node.units import format_size_binary

NAMES = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds")
"""Keys of the block, all of them: DeepSpeed silently ignores any other (runtime/swap_tensor/aio_config.py)."""


@dataclass(frozen=True, order=True)
class AioSettings:
    """The settings under DeepSpeed's names; ``block_size`` in bytes."""

    block_size: int
    queue_depth: int
    intra_op_parallelism: int
    single_submit: bool
    overlap_events: bool
    use_gds: bool = False

    @property
    def flags(self) -> list[str]:
        """The flags that differ from DeepSpeed's defaults, in short."""
        flags = {"single": self.single_submit, "sequential": not self.overlap_events, "gds": self.use_gds}
        return [name for name, is_set in flags.items() if is_set]

    def block(self) -> dict[str, int | bool]:
        """The block for DeepSpeed's configuration: numbers and booleans."""
        return asdict(self)

    def __str__(self) -> str:
        """The settings in short, for people: ``1 MiB x 32 x 4, single, sequential``."""
        shape = f"{format_size_binary(self.block_size)} x {self.queue_depth} x {self.intra_op_parallelism}"
        return ", ".join([shape, *self.flags])


DEFAULTS = AioSettings(
    block_size=2**20,
    queue_depth=8,
    intra_op_parallelism=1,
    single_submit=False,
    overlap_events=True,
    use_gds=False,
)
"""DeepSpeed's default of each key (runtime/swap_tensor/constants.py of deepspeed 0.19.8)."""


def from_block(block: Mapping[str, int | bool]) -> AioSettings:
    """The settings in a whole block, such as one that ``block`` made."""
    return AioSettings(**{field.name: block[field.name] for field in fields(AioSettings)})  # type: ignore[arg-type]
