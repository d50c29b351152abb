"""What only an Ansible run needs: the line per host at its end, and the ``tunetool`` command run on a node. Imports
only ``units``.
"""
