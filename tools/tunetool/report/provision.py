"""The hosts of ``tunetool provision`` as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from tunetool.fleet.provision import ProvisionResult

SCHEMA = "tunetool.provision/1"


def as_document(result: ProvisionResult) -> str:
    """What became of each host, in the inventory's order; what does not apply is left out."""
    hosts = [
        {key: value for key, value in asdict(host).items() if value not in (None, "", [])} for host in result.hosts
    ]
    document = {"schema": SCHEMA, "exit_code": int(result.code), "hosts": hosts, "notes": list(result.notes)}
    if result.tables:
        document["drives"] = dict(result.tables)
    return json.dumps(document, indent=2) + "\n"
