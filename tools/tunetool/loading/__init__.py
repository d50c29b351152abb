"""Weights from safetensors files into a device: which tensors the files hold, random weights to fill them, and the
loaders. It may import ``checkpoint``, whose reader moves the bytes, and what lies under it; it knows no model."""
