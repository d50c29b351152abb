"""Reads a record of schema 1, whose figures and checks had names alone: what the names said becomes figure and labels.

Such records are history: these forms change no more, and nothing else of tunetool reads a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Labels = Mapping[str, str]
_VALUES: Mapping[str, str] = {
    "direction": "read|write|mix",
    "state": "cold|cached|warm|tmpfs|huge",
    "gpus": "[0-9]+",
    "drives": "[0-9]+",
    "cached": "[0-9]+",
    "layout_name": ".+",
    "mode": "direct|buffered",
    "layout": "[0-9]+x[0-9]+",
    "stage": "[0-9]",
    "path": "memory|bulk",
    "figure": "[a-z0-9_]+",
    "block": "[^.]+",
}
"""What a part of a name may be; another one is anything without a dot."""
_PART = re.compile(r"\{([a-z_]+)\}")
_LABELS = {"layout_name": "layout"}
"""Labels that have another form in another benchmark."""


@dataclass(frozen=True)
class Form:
    """One form of names: literal parts, and labels in braces."""

    text: str
    figure: str = ""
    """What is measured, where the text has no ``{figure}``."""
    fixed: Labels = field(default_factory=dict)
    """Labels that the literal parts stand for."""

    @property
    def subject(self) -> str:
        """The first part of the name."""
        return self.text.partition(".")[0]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What matches a name of this form."""
        spelled = re.escape(self.text).replace(r"\{", "{").replace(r"\}", "}")
        return re.compile(_PART.sub(lambda part: f"(?P<{part[1]}>{_VALUES.get(part[1], '[^.]+')})", spelled))


FORMS: Sequence[Form] = (
    Form("sequential.{direction}", "bandwidth"),
    Form("sequential.{direction}.{io_engine}", "bandwidth"),
    Form("random.{direction}.{block}", "rate"),
    Form("sustained.{direction}", "bandwidth"),
    Form("drive.{direction}", "bandwidth"),
    Form("drive.{direction}_time", "service_time"),
    Form("drives.{direction}.{drives}", "bandwidth"),
    Form("array.{direction}", "bandwidth"),
    Form("ceiling.link", "ceiling", {"layer": "link"}),
    Form("deepspeed.{memory}.{direction}", "bandwidth"),
    Form("gds.{way}.{direction}", "bandwidth"),
    Form("ds_io.{direction}", "bandwidth"),
    Form("ds_io.{direction}_durable", "durable_bandwidth"),
    Form("api.{way}.{direction}", "bandwidth"),
    Form("tune.gain.{goal}", "gain"),
    Form("tune.{direction}.{block}", "bandwidth"),
    Form("stage.copy", "copy"),
    Form("stage.verify", "verify"),
    Form("checkpoint.save", "save", {"direction": "write"}),
    Form("checkpoint.load", "load", {"direction": "read"}),
    Form("checkpoint.memory.training.baseline", "baseline", {"place": "memory"}),
    Form("checkpoint.training.baseline", "baseline"),
    Form("checkpoint.memory.fio.{direction}", "bandwidth", {"place": "memory", "engine": "fio"}),
    Form("checkpoint.fio.{direction}", "bandwidth", {"engine": "fio"}),
    Form("checkpoint.memory.{engine}.{figure}", "", {"place": "memory"}),
    Form("checkpoint.{engine}.{figure}"),
    Form("loading.{state}-{gpus}-gpus.{engine}.{figure}"),
    Form("loading.{state}-{gpus}-gpus.{engine}", "bandwidth"),
    Form("loading.{state}.{engine}.{figure}"),
    Form("loading.{state}.{engine}", "bandwidth"),
    Form("dataset.{state}.{engine}.{figure}"),
    Form("scaling.{layout_name}.{drives}.{io_engine}.{direction}.{figure}"),
    Form("experts.{pattern}.cached-{cached}.{figure}"),
    Form("experts.{place}.{mode}.{figure}"),
    Form("offload.{place}.{block}.{direction}", "wait"),
    Form("offload.{place}.{block}.{direction}.{figure}"),
    Form("offload.{place}.{direction}", "wait"),
    Form("offload.{place}.{direction}.{figure}"),
    Form("offload.{place}.{block}.{figure}"),
    Form("offload.{place}.{figure}"),
    Form("inference.{place}.{figure}"),
    Form("staging.{scenario}.speedup.{phase}", "speedup"),
    Form("staging.{scenario}.{path}.{figure}"),
    Form("strategies.network.{layout}.{collective}.{figure}", "", {"part": "network"}),
    Form("strategies.network.{layout}.{figure}", "", {"part": "network"}),
    Form("strategies.start.{phase}.{layout}.z{stage}", "start"),
    Form("strategies.{figure}.{layout}.z{stage}"),
    Form("finetune.all.{figure}", "", {"ranks": "all"}),
    Form("finetune.{figure}"),
)
"""The first form that fits is the one."""


_CHECKS: Sequence[Form] = (
    Form("api.{group}.{call}"),
    Form("checkpoint.memory.{engine}", fixed={"place": "memory"}),
    Form("checkpoint.{engine}"),
    Form("loading.{state}-{gpus}-gpus.{engine}"),
    Form("loading.{state}.{engine}"),
    Form("dataset.{state}.{engine}"),
    Form("experts.{place}.{check}"),
    Form("inference.{place}.{check}"),
    Form("inference.{place}"),
    Form("scaling.{layout_name}"),
    Form("staging.{scenario}.{check}"),
    Form("staging.{scenario}"),
    Form("strategies.hooks.{layout}", fixed={"check": "hooks"}),
    Form("strategies.{layout}.z{stage}.{check}"),
    Form("strategies.{layout}.z{stage}"),
)
_COMPARISONS = ("sequential read ", "sequential write ", "random read ", "no expectation to compare with")
"""How reasons began that compared a figure with an expectation, and so said nothing against the figure."""
_OF_ONE_DRIVE = ("drive",)
"""Subjects whose figures had one name for all drives, and told them apart by a parameter."""


def upgraded(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of schema 1 as one of schema 2; its checksum stays that of the file."""
    measurements = [_with(each, _of_measurement) for each in document.get("measurements") or []]
    checks = [_with(each, _of_check) for each in document.get("checks") or []]
    more: dict[str, Any] = {"measurements": measurements, "checks": checks}
    if "verdict" in document:
        more["verdict"] = _with(document["verdict"], _of_verdict)
    if isinstance(document.get("hosts"), list):
        more["hosts"] = [_with(each, _of_verdict) for each in document["hosts"]]
    return {**document, "schema": "tunetool.record/2", **more}


def _with(read: Any, more: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """What is no object is refused later, by the schema."""
    return {**read, **more(read)} if isinstance(read, dict) else read


def _of_measurement(read: Mapping[str, Any]) -> dict[str, Any]:
    figure, labels = figure_of(str(read.get("name", "")), read.get("parameters") or {})
    return {"figure": figure, "labels": labels}


def _of_check(read: Mapping[str, Any]) -> dict[str, Any]:
    labels = labels_of_check(str(read.get("id", "")))
    return {"labels": labels} if labels else {}


def _of_verdict(read: Mapping[str, Any]) -> dict[str, Any]:
    reasons = read.get("reasons")
    if not isinstance(reasons, list) or not reasons:
        return {}
    return {"kinds": ["expectation" if str(each).startswith(_COMPARISONS) else "unknown" for each in reasons]}


def figure_of(name: str, parameters: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """What is measured, and the labels, of a figure with this name; a name of no known form is a figure by itself."""
    for form in FORMS:
        if match := form.pattern.fullmatch(name):
            parts = match.groupdict()
            figure = parts.pop("figure", form.figure)
            labels = {"subject": form.subject, **form.fixed, **_renamed(parts)}
            device = parameters.get("serial") or parameters.get("device")
            if form.subject in _OF_ONE_DRIVE and device:
                labels["drive"] = str(device)
            return figure, labels
    return name.rpartition(".")[2] or name, {"subject": name.partition(".")[0] or name}


def labels_of_check(id_: str) -> dict[str, str]:
    """The labels of a check with this id; empty for one that is told from others by its id alone."""
    for form in _CHECKS:
        if match := form.pattern.fullmatch(id_):
            return {"subject": form.subject, **form.fixed, **_renamed(match.groupdict())}
    return {}


def _renamed(parts: Mapping[str, str]) -> dict[str, str]:
    return {_LABELS.get(key, key): value for key, value in parts.items()}
