"""A published head, paired with its target, serves by flag alone and changes no text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from draft_checkpoints import KINDS, make_draft
from engine_runs import run_requests, texts
from speculation_lines import requests

from dspark.runtime.speculation.pairing import load_pairing
from dspark_cli.app import run


@pytest.mark.parametrize("kind", [next(kind for kind in KINDS if word in kind) for word in ("dspark", "eagle")])
def test_a_published_head_is_paired_and_served(kind: str, target: Any, tmp_path: Path) -> None:
    engine = shutil.copytree(target.engine, tmp_path / "engine")
    make_draft(tmp_path / "published", kind)
    assert run(["pair", str(engine), "--draft", str(tmp_path / "published"), "--method", "auto"]) == 2  # nothing to measure on
    method = "eagle3" if "eagle" in kind else "dspark"
    assert run(["pair", str(engine), "--draft", str(tmp_path / "published"), "--method", method]) == 0
    pairing = load_pairing(engine)
    assert pairing is not None and pairing.method == method and (engine / "draft" / "draft.json").is_file()
    plain = run_requests(engine, requests())
    for speculative in ("auto", method):
        fixed = {} if speculative == "auto" else {"num_speculative_tokens": 3}
        assert texts(run_requests(engine, requests(), speculative=speculative, **fixed)) == texts(plain)
