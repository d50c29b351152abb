"""The published results of this experiment: its table, and its claims, one of which does not follow from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Scenario = Literal["single", "node", "nodes"]
SCENARIOS: tuple[Scenario, ...] = ("single", "node", "nodes")
TITLES: Mapping[Scenario, str] = {
    "single": "single GPU",
    "node": "one node, many GPUs",
    "nodes": "many nodes",
}
SOURCE = "Alaya NeW documentation, `Multi-node DeepSpeed: tmpfs vs Ceph storage benchmark`"


@dataclass(frozen=True)
class Pair:
    """Seconds of the same work with its files in memory and on bulk storage."""

    staged: float
    bulk: float

    @property
    def ratio(self) -> float:
        """Speed with the files in memory, relative to bulk storage."""
        return self.bulk / self.staged if self.staged > 0 else float("inf")


MODEL_LOAD: Mapping[Scenario, Pair] = {"single": Pair(6.77, 72.05), "node": Pair(5.75, 6.5), "nodes": Pair(21, 22)}
"""Seconds to load 16 GB of weights, from its cross-experiment summary."""
DATA_PER_BATCH: Mapping[Scenario, Pair] = {"nodes": Pair(6.5, 93)}
"""Seconds to load a batch of 2 images, some 6 MB."""
FINE_TUNE: Mapping[Scenario, Pair] = {"nodes": Pair(43 * 60 + 33, 63 * 60 + 52)}
"""0:43:33 and 1:03:52, for 10 epochs over 2,000 images; it does not say whether the staging is included."""
CLAIMED_LOAD_RATIO = 13.5
"""\"Model load efficiency improves by 13.5x\"."""
CLAIMED_SAVING = 0.32
"""\"Overall training efficiency improves by 32%\"."""
EXPLANATION = (
    "The model-load gap narrows at multi-GPU scale because weights are sharded across cards, so each card reads less"
)


def remarks() -> list[str]:
    """Whether what it claims follows from its own table."""
    load, data, whole = MODEL_LOAD["nodes"], DATA_PER_BATCH["nodes"], FINE_TUNE["nodes"]
    saved = 1 - whole.staged / whole.bulk
    follows = "follows from" if abs(saved - CLAIMED_SAVING) < 0.005 else "does not follow from"
    return [
        f"published: {CLAIMED_LOAD_RATIO:g}x for the model load does not follow from its own table, where "
        f"{load.bulk:g} s against {load.staged:g} s are {load.ratio:.2f}x; data load per batch, {data.bulk:g} s "
        f"against {data.staged:g} s, would be {data.ratio:.1f}x",
        f"published: {CLAIMED_SAVING:.0%} for the whole {follows} its table ({saved:.1%} less time)",
    ]
