"""What counts as equal: the limit on logits, how far two sets of them are apart, and the error that stops a conversion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dspark.runtime.spec.errors import QualityError

if TYPE_CHECKING:
    import torch

MAX_RELATIVE_ERROR = 1e-3


def refusal(what: str) -> QualityError:
    """The error of a check that failed."""
    return QualityError(
        f"audit failed: {what}", "nothing was written; report this checkpoint, or type --no-audit to convert it all the same"
    )


class LogitDifference:
    """How far logits of one prompt are from those wanted, given a stretch of rows at a time."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_rows = self._num_equal = 0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Both float32 [rows, V]."""
        self._parts.append(((got - want).abs().amax(), want.abs().amax()))
        self._num_rows += len(want)
        self._num_equal += int((got.argmax(-1) == want.argmax(-1)).sum())

    @property
    def relative_error(self) -> float:
        """Largest difference over the largest logit; NaN when there is one."""
        import torch

        differences, sizes = (torch.stack(values) for values in zip(*self._parts, strict=True))
        return float(differences.amax() / sizes.amax().clamp(min=1e-9))

    @property
    def argmax_agreement(self) -> float:
        """Share of positions whose largest logit is the same token's."""
        return self._num_equal / self._num_rows


def judge(prompts: Sequence[Sequence[int]], differences: Sequence[LogitDifference], where: str = "") -> dict[str, Any]:
    """The record of logits that are equal. where: said of those that are not. Raises QualityError above MAX_RELATIVE_ERROR."""
    for tokens, difference in zip(prompts, differences, strict=True):
        error = difference.relative_error
        if not error <= MAX_RELATIVE_ERROR:  # a NaN fails too
            raise refusal(
                f"on a prompt of {len(tokens)} tokens the logits differ from transformers by {error:.2g} of the largest, "
                f"allowed {MAX_RELATIVE_ERROR:g}{where}"
            )
    return {
        "max_relative_error": max(difference.relative_error for difference in differences),
        "allowed": MAX_RELATIVE_ERROR,
        "argmax_agreement": round(sum(difference.argmax_agreement for difference in differences) / len(differences), 6),
        "prompt_tokens": [len(tokens) for tokens in prompts],
    }
