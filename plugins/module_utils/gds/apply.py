"""Sets up the chosen path of GPUDirect Storage: files, the udev rule, nvidia-fs. The role installs packages."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from typing import Any, Mapping

from ..common.commands import CommandError, run
from ..common.drift import Job, Ledger
from ..common.files import content, replace_file
from ..common.raid_levels import DEFAULT
from ..common.refusal import Refusal
from ..machine.distribution import DEBIAN, read_distribution
from . import md_udev_override
from .cufile_check import check_config
from .facts import GdsFacts, read_gds_facts
from .kernel_modules import NVFS_STALE
from .path_choice import AUTO, COMPAT, MODES, NVIDIA_FS, OFF, Decision, Impossible, choose
from .requirements import available, differing, installed, pinned

CONFIG = "/etc/cufile.json"
SAVED = CONFIG + ".before-tunetool"
"""Copy of the former file at ``CONFIG``, such as the link of NVIDIA's packages; restored when ours is removed."""
CONFIG_HEADER = "// Written by tunetool (role gpudirect_storage)"
HEADER = "# Written by tunetool (role gpudirect_storage); it goes when nvidia-fs is no longer the path.\n"
LOAD = "/etc/modules-load.d/60-tunetool-gds.conf"
MODPROBE = "/etc/modprobe.d/60-tunetool-gds.conf"
MODULE_FILES = {
    LOAD: HEADER + "nvidia-fs\n",
    # nvidia-fs takes the NVMe driver's hooks when it is loaded, so that driver must be loaded first.
    MODPROBE: HEADER + "softdep nvidia-fs pre: nvme nvidia\n",
}
PATCHED_NVME = ("mlnx-nvme", "kmod-mlnx-nvme", "linux-image-nvidia", "linux-nvidia")
"""Beginnings of names of packages that bring an NVMe driver with the hooks."""

WISHES: Mapping[str, Mapping[str, Any]] = {
    "mode": {"type": "str", "choices": [AUTO, *MODES], "default": AUTO},
    "packages": {"type": "list", "elements": "str", "default": []},
    "cufile": {"type": "dict", "default": {}},
}
"""What M(tunetool.node.nvme_drives) takes of this role, to judge it before anything is written."""
BROUGHT_BY_PACKAGES = {"libcufile", "nvidia_fs.installed", "nvme.hooks"}

PUBLIC_KEY = "-----BEGIN PGP PUBLIC KEY BLOCK-----"
NO_KEY = (
    "`gpudirect_storage_repository_key` is not an ASCII-armoured public key. hint: give its text, its path on the "
    "control machine or its URL; `gpg --armor --export` writes one"
)
AFTER_REBOOT = {
    "nvme.hooks": "the NVMe driver with hooks for nvidia-fs is used from the next boot on",
    "nvme.registered": "nvidia-fs is in use and could not be reloaded after the NVMe driver",
    "nvidia_fs.build": "nvidia-fs was rebuilt, and its former build is in use",
    "nvidia_fs.devices": "nvidia-fs is in use and could not be reloaded",
}


def traces(root: str = "/") -> bool:
    """Whether the machine has any file of this role."""
    starts = {CONFIG: CONFIG_HEADER, md_udev_override.PATH: md_udev_override.HEADER, LOAD: HEADER, MODPROBE: HEADER}
    return any(content(os.path.join(root, path.lstrip("/"))).startswith(start) for path, start in starts.items())


def refuse_keyless(files: Mapping[str, str]) -> None:
    """Raises ``Refusal`` for a repository whose key is missing or in a form that apt does not accept."""
    for path, text in files.items():
        if path.endswith(".asc") and not text.startswith(PUBLIC_KEY):
            raise Refusal(NO_KEY)


def early_refusals(
    wanted: Mapping[str, Any], drives: tuple[str, ...], root: str = "/", level: str = DEFAULT
) -> list[str]:
    """What will be refused once an array of this level is built on ``drives`` (kernel names), a line with its hint.

    ``wanted`` has ``mode``, ``packages`` and ``cufile``. Packages that are named are expected to come: whether they do
    is known once the lists of the repositories were fetched.
    """
    mode = wanted["mode"]
    if mode == OFF:
        return []
    facts = read_gds_facts(root, planned=drives, level=level)
    coming = any(name.startswith(PATCHED_NVME) for name in wanted["packages"])
    facts = replace(
        facts,
        installable=bool(wanted["packages"]),
        nvme_patched_on_disk=facts.nvme_patched_on_disk or coming,
    )
    refusals = cufile_refusals(wanted["cufile"], facts.libcufile) if facts.gpus or mode != AUTO else []
    try:
        choose(facts, mode)
    except Impossible as error:
        refusals.append(str(error))
    return refusals


def cufile_refusals(settings: Mapping[str, Any], libcufile: str | None = None) -> list[str]:
    """Settings for cufile.json that libcufile would not take as they are meant, a line each with its hint."""
    return [
        "`gpudirect_storage_cufile`: %s. hint: %s" % (problem.message, problem.remedy)
        for problem in check_config(json.dumps(settings, default=str), libcufile)
    ]


class GdsJob(Job):
    """One run over a machine. ``wanted`` is what M(tunetool.node.gpudirect_storage) takes."""

    def __init__(self, wanted: Mapping[str, Any], ledger: Ledger, root: str = "/") -> None:
        super().__init__(ledger, root)
        self.wanted = wanted
        self.packages: list[str] = []
        """Packages to install first; then only the repository's files were written."""
        self.reboot_reasons: list[str] = []

    def facts(self) -> GdsFacts:
        """The present facts, with what this run can still install."""
        facts = read_gds_facts(self.root, self.wanted["mount_point"] or None)
        names = self.wanted["packages"]
        if self.wanted["mode"] == OFF or not facts.gpus or not names:
            return facts
        patched = [name for name in names if name.startswith(PATCHED_NVME)]
        coming = bool(patched) and not set(patched) <= set(installed())
        return replace(
            facts,
            installable=bool(self.wanted["repository_files"]) or available(names),
            nvme_patched_on_disk=facts.nvme_patched_on_disk or coming,
        )

    def all(self) -> Decision:
        """Decide, check everything that could refuse, act; then decide again from the new facts."""
        facts = self.facts()
        decision = choose(facts, self.wanted["mode"])
        on = decision.mode != OFF
        if on:
            self.packages = self._to_install(decision)
            refuse_keyless(self.wanted["repository_files"])
            for path, text in {**self.wanted["repository_files"], **self.wanted["pins"]}.items():
                self.put(path, text.rstrip("\n") + "\n")
        if self.packages:
            return decision
        config = "" if not on or self._leaves_config(decision) else self._config(decision.mode, facts.libcufile)
        arrays = any(volume.md_levels for volume in facts.volumes)
        override = md_udev_override.wanted_override(self.root, on and decision.mode != COMPAT and arrays)
        self.put_config(config)
        self.put_rule(override, facts, decision)
        for path, text in MODULE_FILES.items():
            self.put(path, text if decision.mode == NVIDIA_FS else "", HEADER)
        if decision.mode == NVIDIA_FS:
            self.bring_up(decision, facts)
        if self.ledger.acting:
            decision = choose(self.facts(), self.wanted["mode"])
        self.reboot_reasons += [
            AFTER_REBOOT[blocker.id]
            for blocker in decision.path().blockers
            if blocker.id in AFTER_REBOOT and self.ledger.acting
        ]
        return decision

    def _to_install(self, decision: Decision) -> list[str]:
        """Packages that are missing for this path, or differ from their pins. libcufile may have another source."""
        versions = self.wanted["versions"]
        lacks = {blocker.id for blocker in decision.path().blockers} & BROUGHT_BY_PACKAGES
        if not lacks and not versions:
            return []
        names = differing(self.wanted["packages"] if lacks else [], versions, installed())
        return pinned(names, versions, read_distribution(self.root).family == DEBIAN)

    def put(self, path: str, text: str, ours: str = "") -> None:
        """Bring a file to exactly this text; with an empty text, remove it if it begins with ``ours``."""
        before = content(self._path(path))
        if not text and not (ours and before.startswith(ours)):
            return
        if self.ledger.file_differs("gds[%s]" % path, path, before, text):
            if text:
                replace_file(self._path(path), text)
            else:
                os.unlink(self._path(path))

    def _leaves_config(self, decision: Decision) -> bool:
        """Whether an existing file serves ``compat``, so that without settings of our own it stays as it is."""
        wrong = {blocker.id for blocker in decision.path().blockers} & {"cufile.json", "cufile.compat"}
        return decision.mode == COMPAT and bool(self.wanted["keep_config"]) and not wrong

    def _config(self, mode: str, libcufile: str | None) -> str:
        text = str(self.wanted["configs"][mode])
        problems = check_config(text, libcufile)
        if problems:
            raise Refusal(
                "cufile.json would not have the intended effect: %s. hint: see `gpudirect_storage_cufile`"
                % "; ".join("%s: %s" % (problem.message, problem.remedy) for problem in problems)
            )
        return text

    def put_config(self, text: str) -> None:
        """Write our file and keep the former one; or without our text, restore the former one."""
        path, saved = self._path(CONFIG), self._path(SAVED)
        before = content(path)
        ours = before.startswith(CONFIG_HEADER)
        if not text and not ours:
            return
        after = text or (content(saved) if os.path.lexists(saved) else "")
        if not self.ledger.file_differs("gds[%s]" % CONFIG, CONFIG, before, after):
            return
        if text:
            if not ours and os.path.lexists(path):
                os.rename(path, saved)
            replace_file(path, text)
        elif os.path.lexists(saved):
            os.replace(saved, path)
        else:
            os.unlink(path)

    def put_rule(self, override: md_udev_override.Override, facts: GdsFacts, decision: Decision) -> None:
        """Write the override, and make udev read the array again by it."""
        self.put(md_udev_override.PATH, override.after, md_udev_override.HEADER)
        stale = any(blocker.id == "md.udev" for blocker in decision.path().blockers)
        if override.before == override.after and not stale:
            return
        devices = [volume.device for volume in facts.volumes if volume.device]
        if not self.ledger.note("udev's entry of `%s`" % ", ".join(devices), "", "made again\n"):
            return
        if os.path.exists(self._path("run/udev/control")):
            run(["udevadm", "control", "--reload"])
            for device in devices:
                run(["udevadm", "trigger", "--action=change", "--settle", "--name-match=/dev/%s" % device])

    def bring_up(self, decision: Decision, facts: GdsFacts) -> None:
        """Build nvidia-fs for the loaded driver, and load it after the NVMe driver."""
        missing = {blocker.id for blocker in decision.path().blockers}
        built = facts.nvfs_built_for or ("something" if facts.nvfs_installed else "nothing")
        absent = not facts.nvfs_loaded and not facts.nvfs_installed
        wrong = absent or facts.nvfs_built_for not in (None, facts.driver)
        if facts.nvfs_source and wrong and self.ledger.note("nvidia-fs built for", built + "\n", "%s\n" % facts.driver):
            for step in ("build", "install"):
                which = ["-m", "nvidia-fs", "-v", facts.nvfs_source, "-k", facts.kernel]
                run(["dkms", step, *which, "--force"], timeout=1800)
        anew = missing & {"nvidia_fs.build", "nvme.registered", "nvidia_fs.devices"}
        if not facts.nvfs_loaded:
            if self.ledger.note("nvidia-fs", "not loaded\n", "loaded\n"):
                run(["modprobe", "nvidia-fs"])
        elif anew and (self._load_anew() if self.ledger.acting else not facts.nvfs_stale):
            self.ledger.note("nvidia-fs", "loaded\n", "reloaded\n")

    def _load_anew(self) -> bool:
        stale = self._path(NVFS_STALE)
        try:
            run(["modprobe", "-r", "nvidia-fs"])
        except CommandError:
            # It is in use; the next boot loads the new build. /run is empty again by then.
            replace_file(stale, "the former build of nvidia-fs is still loaded\n")
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stale)
        run(["modprobe", "nvidia-fs"])
        return True
