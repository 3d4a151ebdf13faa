"""File names of PyTorch pickles: which of a directory's can be a model's weights. Nothing is opened here."""

from __future__ import annotations

import re

SINGLE_NAME = "pytorch_model.bin"
INDEX_NAME = "pytorch_model.bin.index.json"
ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
# what trainers leave beside the weights
_TRAINER_FILE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|trainer_state)[\w.-]*")


def pickled_weights(names: frozenset[str]) -> list[str]:
    """The pickles among file names that can be weights: the index or the standard name alone, else all but what trainers leave."""
    standard = [name for name in (INDEX_NAME, SINGLE_NAME) if name in names]
    loose = sorted(name for name in names if name.endswith(ENDINGS) and not _TRAINER_FILE.fullmatch(name))
    return standard[:1] or loose
