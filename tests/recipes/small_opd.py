"""A student, its teachers and ``configs/tiny/opd.yaml``, cut down to seconds."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.recipes.launch import small_config
from tests.torchtune_grpo.distillation.small_models import SIZES, make_small, node, save_small

RECIPE = "opd_full_finetune"
EVERY_STEP = {"every_n_steps": 1, "keep_last": 9}


def save_models(folder: Path) -> Path:
    """A student, two teachers of other widths and depths, and one that may take the place of the second."""
    save_small(folder / "student", make_small(0))
    save_small(folder / "a", make_small(1, embed_dim=24))
    save_small(folder / "b", make_small(2, num_layers=2))
    save_small(folder / "c", make_small(3, num_layers=2))
    return folder


def config(models: Path, folder: Path, **changes: Any) -> Path:
    """The config, with three aliases of two teachers, a checkpoint at every step, and ``changes``."""
    path = small_config("opd", folder)
    cfg = OmegaConf.load(path)
    cfg.teachers = {
        "first": node(models / "b", num_layers=2),
        "second": node(models / "a", embed_dim=24),
        "again": node(models / "b", num_layers=2),
    }
    cfg.routing.sources = {"growth": "again", "decline": "second"}
    sizes = {"weights": str(models / "student"), "model": SIZES, "checkpoints": EVERY_STEP}
    for key in [key for key in changes if key in ("teachers", "objective", "generate", "routing")]:
        cfg[key] = changes.pop(key)  # components are replaced whole
    OmegaConf.save(OmegaConf.merge(cfg, sizes, changes), path)
    return path
