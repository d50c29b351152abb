"""Trainers of others that run the same fine-tune."""
