"""Flags of speculation that exclude each other are told apart before anything is loaded."""

from typing import Any

import pytest

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.speculation.choice import choose_speculation


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculative_tree": True}, "--speculative-tree is given, but --speculative is off"),
        ({"speculative_sampling": "rejection"}, "--speculative-sampling is rejection, but --speculative is off"),
        ({"speculative": "ngram", "speculative_sampling": "rejection", "speculative_tree": True}, "which verifies chains"),
        ({"speculative": "ngram", "speculative_sampling": "rejection", "deterministic": True}, "texts depend on the drafts"),
        ({"speculative": "dspark", "draft": "DRAFT", "speculative_tree": True}, "drafts of dspark are chains"),
    ],
)
def test_what_excludes_each_other_is_refused(config: dict[str, Any], message: str, tmp_path: Any) -> None:
    if "draft" in config:
        (tmp_path / "draft.json").write_text('{"config": {"method": "dspark"}}')
        config = {**config, "draft": str(tmp_path)}
    with pytest.raises(UsageError, match=message) as error:
        choose_speculation(EngineConfig(**config), None)
    assert error.value.hint


def test_what_goes_together_is_taken() -> None:
    assert choose_speculation(EngineConfig(speculative="ngram", speculative_tree=True), None).method == "ngram"
    assert choose_speculation(EngineConfig(speculative="auto", speculative_sampling="rejection"), None).method == "ngram"
