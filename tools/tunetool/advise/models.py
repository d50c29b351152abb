"""Names of models."""

REFERENCE = ("7b", "3b", "tiny")
