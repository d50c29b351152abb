"""Arithmetic before a job: sizes, ZeRO's memory and traffic, checkpoint intervals, the values of a ds_config. It is
pure: it measures nothing. It may import ``node`` for units, ``record`` and ``errors``."""
