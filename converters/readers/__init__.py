"""Checkpoint formats: one file each, chosen by `dspark.converters.detect`."""
