"""Adds the family of tests to the published ones."""

import pytest

from jaxlc.config.models.families import FAMILIES
from tests.hf.models import DENSE_GPT_OSS


@pytest.fixture(autouse=True, scope="module")
def dense_gpt_oss():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, DENSE_GPT_OSS.model_type, DENSE_GPT_OSS)
        yield
