"""Which figures of a record are meant: by name, or by figure and labels; and how one is told from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tunetool.record import Measurement, chosen


def label(figure: Measurement) -> str:
    """A figure's name, with what tells it from others of that name."""
    rank = f"rank {figure.rank}" if figure.rank is not None else None
    return " ".join(str(part) for part in (figure.name, figure.labels.get("drive"), rank, figure.host) if part)


def selection(text: str) -> Callable[[Iterable[Measurement]], list[Measurement]]:
    """What picks the figures that ``text`` means: those of this name, or ``durable,engine=direct``: the figure, if one
    is given, and any labels.
    """

    def pick(figures: Iterable[Measurement]) -> list[Measurement]:
        known = list(figures)
        named = [each for each in known if text in (each.name, label(each))]
        return named or (chosen(known, figure, **labels) if labels else [])

    figure, labels = _parsed(text)
    return pick


def _parsed(text: str) -> tuple[str | None, dict[str, str]]:
    figure: str | None = None
    labels: dict[str, str] = {}
    for part in text.split(","):
        key, sign, value = (each.strip() for each in part.partition("="))
        if sign:
            labels[key] = value
        else:
            figure = key
    return figure, labels
