"""The one reader of machines: shared by Ansible modules and, as ``tunetool.node``, by the tunetool package.

Python 3.9 syntax, standard library only, relative imports only: these files run on the target's own Python.
"""
