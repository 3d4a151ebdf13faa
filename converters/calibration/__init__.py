"""Calibration: the text that quantizers look at, and a model taken through it layer by layer."""
