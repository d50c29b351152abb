"""One screen of a node: facts in, an ``Inspection`` out. What prints it is in ``report``."""
