"""Evaluate a checkpoint on held-out questions: pass@1, avg@k, pass@k and maj@k with standard errors.

Launch from the root of the repository, on any number of ranks (the numbers do not depend on it):

    tune run --nproc_per_node 2 recipes/evaluate_distributed.py --config configs/tiny/evaluate.yaml

Writes ``<output_dir>/results.json`` and, with every completion's verdict, ``<output_dir>/<task>.jsonl``.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from torchtune_grpo.config import Component, ConfigError, component, instantiate, to_dict
from torchtune_grpo.entry import recipe_entry
from torchtune_grpo.evaluation import build_evaluator, summarize_by_source
from torchtune_grpo.training.distributed import init_ranks, shut_down
from torchtune_grpo.training.metrics import json_text
from torchtune_grpo.training.progress import say
from torchtune_grpo.training.setup import RecipeConfig, build_policy, check_model, make_output_dir


@dataclass(kw_only=True)
class Config(RecipeConfig):
    """The recipe's own keys, beside those of ``RecipeConfig``."""

    evaluation: dict[str, Component] = component(provides=("generate", "max_prompt_tokens"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.evaluation:
            raise ConfigError("evaluation: got no task, expected at least one")


class EvaluateRecipe:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.ranks = init_ranks(cfg.device, num_threads=cfg.num_threads)

    # --- Plumbing ---

    def setup(self) -> None:
        cfg, ranks = self.cfg, self.ranks
        make_output_dir(cfg, ranks)
        self._tokenizer = instantiate(cfg.tokenizer)
        self._evaluator = build_evaluator(
            cfg.evaluation,
            tokenizer=self._tokenizer,
            prompt=instantiate(cfg.prompt),
            score=instantiate(cfg.rewards),
            ranks=ranks,
        )
        check_model(cfg, self._tokenizer, self._evaluator.longest)
        self._model = build_policy(cfg, ranks, trainable=False)

    # --- Algorithm: edit here ---

    def evaluate(self) -> None:
        folder = Path(self.cfg.output_dir)
        metrics: dict[str, float] = {}
        for name, task in self._evaluator.tasks.items():
            results = self._evaluator.results(self._model, name)
            metrics |= summarize_by_source(results, task.k, prefix=f"eval/{name}/")
            if self.ranks.is_main:
                lines = [json_text(asdict(result)) + "\n" for result in results]
                (folder / f"{name}.jsonl").write_text("".join(lines))
                dropped = self._evaluator.dropped(name) or "none"
                say(f"{name} | questions: {len(results)} | dropped: {dropped} | completions in {folder / name}.jsonl")
        if self.ranks.is_main:
            report = {"metrics": metrics, "config": to_dict(self.cfg)}
            (folder / "results.json").write_text(json_text(report, indent=1) + "\n")
            for key, value in metrics.items():
                say(f"{key:40s} {value:.4f}")
            say(f"Written to {folder / 'results.json'}")

    # --- Plumbing ---

    def cleanup(self) -> None:
        shut_down()


@recipe_entry(Config)
def recipe_main(cfg: Config) -> None:
    """Evaluation of a checkpoint. See the config file for the keys."""
    recipe = EvaluateRecipe(cfg)
    recipe.setup()
    recipe.evaluate()
    recipe.cleanup()


if __name__ == "__main__":
    recipe_main()
