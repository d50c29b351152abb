"""The bytes that one sample of an engine moved. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunetool.measure.evidence import Counted, Judgement


@dataclass(frozen=True)
class Transfer:
    """Bytes that an engine moved in one direction, and what the drives counted meanwhile."""

    seconds: float
    """Until the last process was done."""
    bytes: int
    """Of the files or of the tensors, each once."""
    counted: Counted | None = field(default=None, kw_only=True)
    """None where no block device counts, or where none was to be used."""

    @property
    def judgements(self) -> list[Judgement]:
        """``other-io``: something else used the drives, or the engine moves more than its files hold."""
        return [self.counted.judgement] if self.counted is not None else []
