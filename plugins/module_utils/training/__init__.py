"""The training environment of a node: torch, DeepSpeed and tunetool in a venv, compiled ops, the proof."""

from __future__ import annotations
