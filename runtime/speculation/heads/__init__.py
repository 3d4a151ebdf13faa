"""Drafting heads on a target's features: DSpark, DFlash and EAGLE-3. Start reading at `load`."""
