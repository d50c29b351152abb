"""What only an Ansible run needs: the frame of a module that changes a node, the ``tunetool`` command run on a node,
and the line per host at the end. It may import every room below it.
"""
