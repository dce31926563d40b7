"""The same faults through ``tune run`` on two ranks: one message, from rank 0, and no rank left behind."""

from pathlib import Path

import pytest

from tests.bad_input.entry import Outcome
from tests.recipes.launch import run

CASES = [
    ("grpo_full_finetune", "grpo", "prompts_per_step=3", "prompts_per_step: got 3, expected a multiple of"),
    ("sft_warmup", "gsm8k", "dataset.path={tmp}/rows.jsonl", "rows.jsonl:2: not valid JSON"),
    ("evaluate", "evaluate", "weights={tmp}", "weights: got"),
    ("opd_full_finetune", "opd", "tensor_parallel=3", "tensor_parallel: got 3, expected a divisor of"),
    ("sft_warmup", "sft_warmup", "seed=1", "seed: got 1, but"),
]


@pytest.mark.parametrize(("recipe", "config", "override", "line"), CASES)
def test_two_ranks_say_it_once(
    configs: Path, tmp_path: Path, recipe: str, config: str, override: str, line: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "?", "answer": "#### 1"}\n{\n')
    done = run(recipe, configs / f"{config}.yaml", override.replace("{tmp}", str(tmp_path)))
    said = done.stderr.partition("=" * 40)[0]  # torchrun's own report of the failure follows
    assert said.count(line) == 1
    message = said[said.index("Config error") :].partition("TORCHTUNE_GRPO_TRACEBACK")[0]
    Outcome(code=done.returncode, out=done.stdout, err=message).assert_refused(line)
