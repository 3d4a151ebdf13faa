"""LoRA adapters as PEFT saves them, merged into a checkpoint while it is read."""
