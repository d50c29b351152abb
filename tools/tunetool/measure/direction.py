"""The direction of bytes between memory and storage."""

from __future__ import annotations

from typing import Literal

Direction = Literal["read", "write"]
