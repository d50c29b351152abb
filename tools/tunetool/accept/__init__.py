"""Acceptance: goals that must hold, read from a file, measured by tunetool's own commands, and judged by intervals."""
