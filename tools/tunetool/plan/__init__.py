"""Pure arithmetic: sizes, memory, counts. Nothing here reads a file or imports torch."""
