"""Starting ranks on an engine that is there."""
