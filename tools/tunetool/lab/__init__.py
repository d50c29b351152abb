"""Virtual nodes with NVMe drives for rehearsals: images, machines, snapshots and faults. It imports ``node`` and
``errors`` alone, since a virtual machine is no part of what runs in it."""
