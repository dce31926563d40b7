"""An experiment's config is a stable config with one node changed."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("experiment", "stable"),
    [
        ("dev/grpo_shared_prefix.yaml", "tiny/grpo.yaml"),
        ("dev/grpo_shared_prefix_smollm2.yaml", "smollm2_135m/grpo.yaml"),
    ],
)
def test_config_differs_from_the_stable_one_in_logprobs_alone(experiment: str, stable: str) -> None:
    ours, theirs = (OmegaConf.to_container(OmegaConf.load(CONFIGS / name)) for name in (experiment, stable))
    assert list(ours) == list(theirs)
    assert [key for key in theirs if ours[key] != theirs[key]] == ["output_dir", "logprobs"]
    assert ours["logprobs"]["_component_"] == "dev.shared_prefix.SharedPrefixLogprobs"
