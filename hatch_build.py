"""What a wheel has beside the packages: the files at the root of the collection, for the collection that it carries.
What modules and package share is in that collection alone, and ``tunetool.node`` leads there.

A wheel of tools/dev/dist.py also has the reference pages, from the directory that ``TUNETOOL_REFERENCE`` names. With
``TUNETOOL_COMPILED=1`` a wheel has the compiled code of loads and saves, and is for machines of this kind alone; it
links nothing but the C library, so any Python may load it.

The addresses of the project come from galaxy.yml.

Hatchling copies forced files also into an editable install, where they would be an incomplete collection that Ansible
takes for an installed one.
"""

from __future__ import annotations

import os
import re
import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

COLLECTION = "ansible_collections/tunetool/node"
# No galaxy.yml: a built collection, from which a wheel can be made too, has none.
FILES = ("ansible.cfg", "constraints.txt", "pyproject.toml", "hatch_build.py", "site.yml")

READERS = """\"\"\"What Ansible modules and the package share. It lies in the collection beside the package.\"\"\"

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "ansible_collections/tunetool/node/plugins/module_utils")]
"""

ADDRESSES = re.compile(r"^(homepage|repository|documentation|issues):[ \t]+[\"']?(https?://[^\s\"']+)", re.MULTILINE)


class Addresses(MetadataHookInterface):
    """The addresses that galaxy.yml has, as URLs of the package; none where there is no galaxy.yml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See hatchling."""
        file = Path(self.root) / "galaxy.yml"
        found = ADDRESSES.findall(file.read_text()) if file.is_file() else []
        metadata["urls"] = {name.capitalize(): address for name, address in found}


class CollectionFiles(BuildHookInterface):
    """Adds the files to every wheel but an editable one, and compiles what it is asked to."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling: ``version`` is the kind of the build."""
        if version != "editable":
            build_data["force_include"].update({name: f"{COLLECTION}/{name}" for name in FILES})
            self._made = tempfile.TemporaryDirectory(prefix="tunetool-wheel-")  # until the wheel is written
            leads = Path(self._made.name) / "__init__.py"
            leads.write_text(READERS)
            build_data["force_include"][str(leads)] = "tunetool/node/__init__.py"
            if pages := os.environ.get("TUNETOOL_REFERENCE"):
                build_data["force_include"][pages] = f"{COLLECTION}/docs/reference"
            if os.environ.get("TUNETOOL_COMPILED") == "1":
                self._compile(build_data)

    def _compile(self, build_data: dict[str, Any]) -> None:
        script = runpy.run_path(str(Path(self.root) / "tools/tunetool/checkpoint/build_read_loop.py"))
        made = Path(self._made.name) / script["MADE"].name
        script["build"](made)
        build_data["force_include"][str(made)] = f"tunetool/checkpoint/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{re.sub(r'[-.]', '_', sysconfig.get_platform())}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See hatchling."""
        if hasattr(self, "_made"):
            self._made.cleanup()
