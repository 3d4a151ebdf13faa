"""A DSpark drafter trained on the target's own answers to a job's prompts. Start reading at `run`."""
