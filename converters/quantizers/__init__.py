"""Quantizers: pure functions of a weight and a scheme, one file each."""
