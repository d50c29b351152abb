"""What a user runs, timed."""
