"""A directory for each job on the volume, with a limit, and its removal: the program that schedulers call. Only its own
directories are made and removed, whatever their users put there."""
