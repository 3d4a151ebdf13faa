"""One job for all tests of distillation."""

from __future__ import annotations

import pytest
from distill_cases import Job, make_job


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("distill"))
