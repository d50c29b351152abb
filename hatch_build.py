"""What a wheel has beside the packages: the files at the root of the collection, for the collection that it carries.

Hatchling copies forced files also into an editable install, where they would be an incomplete collection that Ansible
takes for an installed one.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COLLECTION = "ansible_collections/tunetool/node"
# No galaxy.yml: a built collection, from which a wheel can be made too, has none.
FILES = ("ansible.cfg", "constraints.txt", "pyproject.toml", "hatch_build.py", "site.yml")


class CollectionFiles(BuildHookInterface):
    """Adds the files to every wheel but an editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling: ``version`` is the kind of the build."""
        if version != "editable":
            build_data["force_include"].update({name: f"{COLLECTION}/{name}" for name in FILES})
