"""torch's allocator gets settings only where the user has given none."""

import pytest

from megazero.training.world import prefer_expandable_segments


def test_segments_expand_where_nothing_else_was_asked_for() -> None:
    environment: dict[str, str] = {}
    prefer_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_settings_of_the_user_stay_alone(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    prefer_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:128"}
