"""Values of the right type that cannot be meant: out of range, or in contradiction to other keys."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.bad_input.entry import run_recipe

CASES = {
    "sft_warmup": [
        ("examples_per_step=0", "examples_per_step: got 0"),
        ("examples_per_step=-8", "examples_per_step: got -8"),
        ("examples_per_step=1000000000000", "dataset: 64 rows are usable", "1000000000000"),
        ("max_tokens=3", "dataset: 0 rows are usable", "example_too_long: 64"),
        ("max_tokens=1000000000", "model.max_seq_len: got 128, expected at least 1000000000"),
        ("log_every_n_steps=0", "log_every_n_steps: got 0"),
        ("dataset.size=0", "dataset: `size` is 0"),
        ("dataset.size=1000000000", "dataset: `size` is 1000000000"),
        ("dataset.split=tset", "dataset: `split` is 'tset'"),
        ("dataset.worked_share=1.5", "dataset: `worked_share` is 1.5"),
        ("dataset.operations=[divide]", "dataset: `operations` is ['divide']"),
        ("dataset.steps=[1]", "dataset: `steps` is [1]"),
        ("dataset.largest_value=-1", "dataset: ", "`largest_value` -1"),
        ("lr_scheduler.num_warmup_steps=-1", "lr_scheduler: num_warmup_steps: got -1"),
        ("lr_scheduler.num_warmup_steps=4", "lr_scheduler: num_warmup_steps: got 4"),
        ("lr_scheduler._component_=torch.optim.lr_scheduler.StepLR", "lr_scheduler."),
        ("lr_scheduler.final_lr_ratio=-1.0", "lr_scheduler: final_lr_ratio: got -1.0"),
    ],
    "grpo": [
        ("generate.temperature=-1", "generate: generate.temperature: got -1"),
        ("generate.temperature=0.0", "generate: got greedy or truncated sampling"),
        ("generate.top_p=1.5", "generate: generate.top_p: got 1.5"),
        ("generate.top_p=0.0", "generate: generate.top_p: got 0.0"),
        ("generate.top_k=-1", "generate: generate.top_k: got -1"),
        ("generate.top_k=5", "generate: got greedy or truncated sampling"),
        ("generate.min_p=2", "generate: generate.min_p: got 2"),
        ("generate.max_new_tokens=0", "generate: generate.max_new_tokens: got 0"),
        ("generate.max_new_tokens=-3", "generate: generate.max_new_tokens: got -3"),
        ("generate.max_new_tokens=1000000000", "model.max_seq_len: got 128"),
        ("generate.group_size=0", "generate: generate.group_size: got 0"),
        ("generate.group_size=1", "generate.group_size: got 1, expected at least 2"),
        ("generate.max_total_tokens=10", "generate.max_total_tokens: got 10, expected more than the 72"),
        ("generate.max_cached_tokens=0", "generate: generate.max_cached_tokens: got 0"),
        ("max_prompt_tokens=0", "dataset: 0 rows are usable", "prompt_too_long: 32"),
        ("prompts_per_step=0", "prompts_per_step: got 0"),
        ("prompts_per_step=-4", "prompts_per_step: got -4"),
        ("prompts_per_step=33", "dataset: 32 rows are usable"),
        ("total_steps=0", "total_steps: got 0"),
        ("epochs_per_rollout=0", "epochs_per_rollout: got 0"),
        ("epochs_per_rollout=3", "total_steps: got 4, expected a multiple of the 3"),
        ("minibatches_per_epoch=-1", "minibatches_per_epoch: got -1"),
        ("max_tokens_per_micro_batch=0", "max_tokens_per_micro_batch: got 0"),
        ("evaluate_every_n_steps=0", "evaluate_every_n_steps: got 0"),
        ("clip_grad_norm=0.0", "clip_grad_norm: got 0.0"),
        ("num_threads=0", "num_threads: got 0"),
        ("log_samples_every_n_steps=0", "log_samples_every_n_steps: got 0"),
        ("num_logged_samples=-1", "num_logged_samples: got -1"),
        ("max_sampling_rounds=0", "max_sampling_rounds: got 0"),
        ("dp_replicate=0", "dp_replicate: got 0"),
        ("dp_replicate=2", "dp_replicate: got 2, expected a divisor"),
        ("device=cuda", "device: got 'cuda'"),
        ("device=tpu", "device: got 'tpu'"),
        ("loss.clip_low=-0.1", "loss: clip_low: got -0.1"),
        ("loss.clip_low=1.5", "loss: clip_low: got 1.5"),
        ("loss.clip_high=-1", "loss: clip_high: got -1"),
        ("loss.dual_clip=0.5", "loss: dual_clip: got 0.5"),
        ("advantage.eps=0.0", "advantage: eps: got 0.0"),
        ("advantage.ddof=2", "advantage: ddof: got 2"),
        ("optimizer.lr=-1.0", "optimizer: ", "-1.0"),
        ("optimizer.betas=[1.5, 0.9]", "optimizer: ", "1.5"),
        ("optimizer.eps=-1.0", "optimizer: ", "-1.0"),
        ("checkpoints.every_n_steps=0", "checkpoints: every_n_steps: got 0"),
        ("checkpoints.keep_last=0", "checkpoints: keep_last: got 0"),
        ("checkpoints.keep_best=-1", "checkpoints: keep_best: got -1"),
        ("checkpoints.best_metric=null", "checkpoints: best_metric: got null"),
        ("checkpoints.best_metric=eval/nope/pass@1", "checkpoints.best_metric: got 'eval/nope/pass@1'"),
        ("rewards.verifier=lenght", "rewards: verifier: got 'lenght'", "did you mean 'length'?"),
        ("rewards.weights.lenght=1.0", "rewards: weights.lenght: no judge of this name"),
        ("rewards.fns.correct.timeout_s=0.0", "rewards.fns.correct: timeout_s: got 0.0"),
        ("rewards.fns.correct._component_=torchtune_grpo.losses.GSPO", "rewards.fns.correct.require_format: unknown"),
        ("prompt.template=hello", "prompt: `prompt.template` has {question} 0 times"),
        ("prompt.template='{question} {question} <think>'", "prompt: `prompt.template` has {question} 2 times"),
        ("prompt.template='{question}'", "prompt: `prompt.template` ends in '{question}'"),
        ("model.vocab_size=20", "model: got a vocabulary of 20, expected at least the tokenizer's 59"),
        ("model.max_seq_len=10", "model.max_seq_len: got 10"),
        ("model.embed_dim=17", "model: "),
        ("model.embed_dim=-16", "model: "),
        ("model.num_heads=0", "model: "),
        ("model.num_kv_heads=3", "model: "),
        ("metric_loggers=[{_component_: torchtune.training.metric_logging.Nothing}]", "metric_loggers[0]._component_"),
        ("metric_loggers=[{_component_: torchtune.training.metric_logging.DiskLogger}]", "metric_loggers[0].log_dir"),
    ],
    "evaluate": [
        ("evaluation.sampled.k=[0]", "evaluation.sampled: k: got [0]"),
        ("evaluation.sampled.k=[9]", "evaluation.sampled: k: got [9], expected numbers from 1 to"),
        ("evaluation.sampled.k=[]", "evaluation.sampled: k: got []"),
        ("evaluation.greedy.batch_size=0", "evaluation", "batch_size 0"),
        ("evaluation.greedy.max_prompt_tokens=1", "evaluation", "0 usable rows"),
        ("evaluation.greedy.dataset.size=0", "evaluation.greedy.dataset: `size` is 0"),
        ("evaluation.greedy.generate.max_new_tokens=300", "model.max_seq_len: got 128, expected at least 372"),
        ("evaluation.greedy.generate.top_p=1.5", "evaluation.greedy.generate: generate.top_p: got 1.5"),
        ("output_dir=''", "output_dir: got an empty string"),
        ("output_dir={tmp}/file", "output_dir: got", "cannot be written to"),
        ("output_dir={tmp}/file/below", "output_dir: got", "cannot be written to"),
        ("output_dir=/proc/self/nothing", "output_dir: got '/proc/self/nothing', which cannot be written to"),
        (f"output_dir={'a' * 300}", "output_dir: got", "cannot be written to"),
        ('output_dir="a\\0b"', "output_dir: got", "cannot be written to"),
    ],
    "opd": [
        ("tensor_parallel=0", "tensor_parallel: got 0"),
        ("tensor_parallel=3", "tensor_parallel: got 3, expected a divisor of the number of ranks"),
        ("routing.default=nobody", "routing.default: got 'nobody', expected one of the teachers"),
        ("routing.sources.growth=nobody", "routing.sources.growth: got 'nobody'"),
        ("routing.sources.nowhere=growth", "routing.sources: got ['nowhere'], which no training row has"),
        ("~routing.sources.growth", "routing.sources: the sources ['growth'] of the training data have no teacher"),
        ("teachers.growth.weights=nowhere", "teachers.growth.weights: got 'nowhere', which is no folder"),
        ("teachers.growth.dtype=bf16", "teachers.growth.dtype: got bf16, but objective.payload.dtype is float32"),
        ("teachers.growth.dp_replicate=2", "teachers.growth.dp_replicate: got 2"),
        ("teachers.growth.model.num_layers=3", "teachers.growth: weights: got"),
        ("teachers.growth.model.vocab_size=70", "teachers.growth: weights: got"),
        ("objective.chunk_size=0", "objective: chunk_size: got 0"),
        (
            "objective.divergence={_component_: torchtune_grpo.distillation.JSD, beta: 2.0}",
            "objective.divergence: beta",
        ),
        ("generate.temperature=0.0", "generate.temperature: got 0"),
        ("dataset.weights=[1.0]", "dataset: `weights` is [1.0]"),
        ("dataset.weights=[1.0, -1.0]", "dataset: `weights` is [1.0, -1.0]"),
        ("dataset.size=0", "dataset: `size` is 0"),
        ("old_logprobs={_component_: torchtune_grpo.old_logprobs.RecomputedLogprobs, max_weight: -1}", "old_logprobs"),
    ],
}


@pytest.mark.parametrize(
    ("recipe", "override", "expected"),
    [(recipe, override, texts) for recipe, cases in CASES.items() for override, *texts in cases],
)
def test_value_is_refused(configs: Path, tmp_path: Path, recipe: str, override: str, expected: list[str]) -> None:
    (tmp_path / "file").write_text("")
    override = override.replace("{tmp}", str(tmp_path))
    run_recipe(recipe, configs / f"{recipe}.yaml", override).assert_refused(*expected)


@pytest.mark.parametrize("name", ["../outside", "a/b", ".hidden", "", "a\nb"])
def test_task_whose_name_is_no_file_name_is_refused(configs: Path, tmp_path: Path, name: str) -> None:
    cfg = OmegaConf.load(configs / "evaluate.yaml")
    cfg.evaluation = {name: cfg.evaluation.greedy}
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    run_recipe("evaluate", tmp_path / "config.yaml").assert_refused("evaluation: got the name ", repr(name))


@pytest.mark.parametrize(
    ("recipe", "key", "line"),
    [
        ("evaluate", "evaluation", "evaluation: got no task, expected at least one"),
        ("grpo", "rewards.fns", "rewards: fns: got no judge, expected at least one"),
        ("opd", "teachers", "teachers: got none, expected at least one"),
        ("opd", "dataset.datasets", "dataset: `weights` is [1.0, 1.0]; expected 0 positive numbers"),
    ],
)
def test_collection_without_anything_in_it_is_refused(
    configs: Path, tmp_path: Path, recipe: str, key: str, line: str
) -> None:
    cfg = OmegaConf.load(configs / f"{recipe}.yaml")
    OmegaConf.update(cfg, key, [] if key == "dataset.datasets" else {}, merge=False)
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    run_recipe(recipe, tmp_path / "config.yaml").assert_refused(line)
