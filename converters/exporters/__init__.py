"""From an engine back to checkpoints that other programs load: one file per format."""
