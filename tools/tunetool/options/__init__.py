"""Options of commands: each that several commands share is declared once, with its words, its type and its default.

A command takes one dataclass: its fields say how they are written on the command line (``fields``), and whoever calls a
benchmark from Python makes the same object, with the same defaults. Shared options are functions (``shared``) or
dataclasses to inherit from. ``--help`` lists a class's own options first, then those of its bases.
"""
