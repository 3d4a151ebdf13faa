"""How far a model is from its baseline, and whether that is near enough."""
