"""What two checkpoints have in common, compared number by number."""

from typing import Any

import torch


def assert_same_checkpoint(found: dict[str, Any], expected: dict[str, Any], *, tolerance: float) -> None:
    """Parameters, buffers and the whole optimizer state, by the same keys."""
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=tolerance, atol=tolerance, msg=name)
    mine, theirs = found["optimizer_states"][0], expected["optimizer_states"][0]
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        torch.testing.assert_close(mine["state"][index], entry, rtol=tolerance, atol=tolerance)
