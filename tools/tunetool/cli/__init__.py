"""The commands: one thin module for each, which parses, calls, prints and returns an exit code. The topmost
room: it may import every other, and none imports it."""
