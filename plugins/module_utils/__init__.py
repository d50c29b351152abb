"""The one reader of machines: shared by Ansible modules and, as ``tunetool.node``, by the tunetool package.

Python 3.9 syntax, standard library only, relative imports only: these files run on the target's own Python. A room
imports only rooms below it: ``audit``; ``removal``; ``ephemeral`` and ``plan``; ``volume``, ``memory``, ``tuning``
and ``gds``; ``array``; ``machine``; ``common``; and ``units``, the sizes and bandwidths that people write. ``play``
is separate.
"""
