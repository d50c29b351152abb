"""The document of ``tunetool inspect -i``. Its JSON Schema, a page of the reference, is made from this module."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field

from tunetool.inspect.model import Inspection
from tunetool.record import Document

SCHEMA_NAME: Literal["tunetool.inspect-fleet/1"] = "tunetool.inspect-fleet/1"


class Difference(Document):
    """A fact in which hosts differ from most of the others."""

    fact: str = Field(description="Such as drives.firmware or settings.scheduler")
    title: str = Field(description="The fact in words")
    hosts: list[str] = Field(description="The odd hosts with this value")
    value: str
    parts: dict[str, list[str]] = Field({}, description="By host, its drives or GPUs that differ, with their values")
    majority: str | None = Field(
        None, description="The value of more hosts than any other value; null where two values have equally many"
    )
    majority_hosts: int = Field(description="Number of hosts with it, or with any of the most common values")
    compared: int = Field(description="Number of hosts of which the fact was compared")
    remedy: str | None = None


class FleetMember(Document):
    """A host of the inventory: its inspection, or the reason why there is none."""

    host: str
    inspection: Inspection | None = None
    reason: str | None = None


class FleetInspection(Document):
    """What ``tunetool inspect -i`` collected, and what differs. The most severe differences come first."""

    schema_: Literal["tunetool.inspect-fleet/1"] = Field(SCHEMA_NAME, alias="schema")
    tool_version: str
    taken: datetime
    command: list[str]
    facts: int = Field(description="Number of facts that were compared")
    differences: list[Difference]
    hosts: list[FleetMember] = Field(description="In the inventory's order")

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    @property
    def missing(self) -> list[FleetMember]:
        """The hosts that could not be inspected."""
        return [member for member in self.hosts if member.inspection is None]


def dumps(fleet: FleetInspection) -> str:
    """The document as JSON text, without the fields that are null."""
    return fleet.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the document that ``dumps`` writes."""
    schema = FleetInspection.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_NAME, **schema}
