"""The recipes as users run them: ``tune run`` on two ranks, files on disk, kill and resume."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.recipes.launch import run, run_ok, small_config
from torchtune_grpo.models import tiny_llama
from torchtune_grpo.models.weights import read_weights
from torchtune_grpo.training.checkpoint_files import resolve_weights
from torchtune_grpo.training.metrics import read_metrics

TINY = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "intermediate_dim": 32}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SFT on two ranks, GRPO from its output on two, evaluation of the result on one; shared by the tests below."""
    folder = tmp_path_factory.mktemp("chain")
    run_ok("sft_warmup", small_config("sft_warmup", folder))
    loggers = [
        {
            "_component_": "torchtune.training.metric_logging.TensorBoardLogger",
            "log_dir": str(folder / "tensorboard"),
        },
        {
            "_component_": "torchtune.training.metric_logging.WandBLogger",
            "project": "test",
            "dir": str(folder),
        },
    ]
    sft = str(folder / "sft_warmup")
    run_ok("grpo_full_finetune", small_config("grpo", folder, weights=sft, metric_loggers=loggers))
    run_ok("evaluate", small_config("evaluate", folder), f"weights={folder / 'grpo'}", ranks=1)
    return folder


def test_sft_loss_falls_and_evaluates_before_and_after(chain: Path) -> None:
    lines = read_metrics(chain / "sft_warmup/metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    # The first loss of a small init is that of uniform guessing over the vocabulary, in nats.
    assert losses[0] == pytest.approx(math.log(59), abs=0.15)
    assert [line["step"] for line in lines if "eval/heldout/pass@1" in line] == [0, 4]


def test_grpo_logs_every_promised_metric(chain: Path) -> None:
    lines = read_metrics(chain / "grpo/metrics.jsonl")
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4]
    promised = (
        "reward reward/correct reward/format reward/length success zero_variance response_length truncated entropy "
        "ratio clip_low clip_high kl_old grad_norm lr tokens_per_second/rollout tokens_per_second/update "
        "seconds/rollout seconds/rewards seconds/update peak_memory_gib skipped_updates"
    ).split()
    for line in training:
        missing = [name for name in promised if line.get(name) is None]
        assert not missing
        assert all(math.isfinite(line[name]) for name in promised)


def test_grpo_first_update_is_on_policy(chain: Path) -> None:
    for line in read_metrics(chain / "grpo/metrics.jsonl"):
        if "ratio" in line:
            assert line["ratio"] == pytest.approx(1.0, abs=1e-5)
            assert line["clip_low"] == line["clip_high"] == 0.0


def test_grpo_writes_samples_events_and_offline_wandb(chain: Path) -> None:
    samples = read_metrics(chain / "grpo/samples.jsonl")
    assert {"step", "source", "prompt", "completion", "answer", "reward", "success"} == set(samples[0])
    assert list((chain / "tensorboard").rglob("events.out.tfevents.*"))
    assert list(chain.rglob("offline-run-*"))


def test_evaluation_reports_each_row_once_with_errors(chain: Path) -> None:
    metrics = json.loads((chain / "evaluate/results.json").read_text())["metrics"]
    assert metrics["eval/greedy/n"] == metrics["eval/sampled/n"] == 7
    assert {"eval/sampled/pass@8", "eval/sampled/maj@8_stderr", "eval/sampled/avg@8"} <= set(metrics)
    rows = [json.loads(line)["row"] for line in (chain / "evaluate/sampled.jsonl").read_text().splitlines()]
    assert rows == list(range(7))


def test_grpo_does_not_depend_on_the_number_of_ranks(chain: Path) -> None:
    config = small_config("grpo", chain / "alone", weights=str(chain / "sft_warmup"))
    said = run_ok("grpo_full_finetune", config, ranks=1)
    assert f"weights from {chain / 'sft_warmup/checkpoints/step_00000004/hf'}" in said
    alone, two = (read_metrics(chain / name / "metrics.jsonl") for name in ("alone/grpo", "grpo"))
    for one, other in zip(alone, two, strict=True):
        for name in {"reward", "loss", "grad_norm", "response_length", "zero_variance", "kl_old"} & set(one):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (one["step"], name)


def test_evaluation_does_not_depend_on_the_number_of_ranks(chain: Path) -> None:
    run_ok("evaluate", small_config("evaluate", chain / "two"), f"weights={chain / 'grpo'}", ranks=2)
    for name in ("greedy.jsonl", "sampled.jsonl"):
        one, two = ((chain / folder / name).read_text() for folder in ("evaluate", "two/evaluate"))
        assert one == two


def test_exported_folder_opens_in_transformers_with_equal_logits(chain: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = resolve_weights(str(chain / "grpo"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = tiny_llama(vocab_size=59, max_seq_len=128, **TINY)
    ours.load_state_dict(read_weights(folder))
    tokens = torch.tensor([tokenizer("User: Tom has 3 apples").input_ids])
    assert tokens.shape[1] == 6
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max()
    assert difference < 1e-5


def test_grpo_changes_the_weights_it_started_from(chain: Path) -> None:
    before, after = (read_weights(resolve_weights(str(chain / name))) for name in ("sft_warmup", "grpo"))
    assert all((before[name] != after[name]).any() for name in before if "norm" not in name)


def test_every_variant_runs_together(tmp_path: Path) -> None:
    """Reference with KL in loss and reward, RLOO, sequence mean, recomputed logprobs, dynamic sampling, minibatches."""
    config = small_config(
        "grpo",
        tmp_path,
        prompts_per_step=4,
        epochs_per_rollout=2,
        minibatches_per_epoch=2,
        total_steps=4,
        max_sampling_rounds=2,
        generate={"gather_parameters": False},
        advantage={
            "_component_": "torchtune_grpo.advantages.KLPenalizedReward",
            "coefficient": 0.01,
            "advantage": {"_component_": "torchtune_grpo.advantages.LeaveOneOut"},
        },
        trained_rows={"mask_truncated": False, "drop_zero_variance": True},
        token_weights={"_component_": "torchtune_grpo.normalization.SequenceMean"},
        old_logprobs={"_component_": "torchtune_grpo.old_logprobs.RecomputedLogprobs"},
        activation_checkpointing=True,
    )
    cfg = config.read_text()
    start, end = cfg.index("loss:"), cfg.index("epochs_per_rollout")
    loss = (
        "loss:\n  _component_: torchtune_grpo.losses.SumLoss\n  terms:\n"
        "  - _component_: torchtune_grpo.losses.GSPO\n"
        "  - _component_: torchtune_grpo.losses.KLToReference\n    coefficient: 0.1\n"
    )
    config.write_text(cfg[:start] + loss + cfg[end:])
    run_ok("grpo_full_finetune", config)
    lines = [line for line in read_metrics(tmp_path / "grpo/metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [4]
    assert lines[0]["kl_ref"] >= 0.0 and lines[0]["sampling_rounds"] in (1.0, 2.0)
    assert lines[0]["ratio"] != 1.0  # the second of several updates on one rollout is off-policy


def test_updates_that_are_not_finite_end_the_run_and_leave_the_batch_behind(tmp_path: Path) -> None:
    config = small_config("sft_warmup", tmp_path, optimizer={"lr": 1e30}, lr_scheduler=None)
    done = run("sft_warmup", config, "max_skipped_updates=2")
    assert done.returncode != 0
    folder = tmp_path / "sft_warmup"
    assert done.stderr.startswith("Error:\nstep 3: update number 2 in a row with a gradient that is not finite")
    files = [folder / f"nonfinite_step_3_rank_{rank}.pt" for rank in range(2)]
    assert any(str(file) in done.stderr for file in files)  # of the rank that failed first
    for file in files:
        assert set(torch.load(file, weights_only=True)) == {"tokens", "lengths", "loss_mask"}
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["skipped_updates"] for line in lines if "loss" in line] == [0.0, 1.0]


def judge_that_raises(completions: list[str], answers: list[str], response_lengths: list[int]) -> list[float]:
    import os

    return [1 / (int(os.environ["RANK"]) - 1) for _ in completions]


def test_a_reward_function_that_raises_on_one_rank_ends_all_with_its_name(tmp_path: Path) -> None:
    judge = {"_component_": "torchtune_grpo.rewards.CallableReward", "path": f"{__name__}.judge_that_raises"}
    config = small_config("grpo", tmp_path, rewards={"weights": {"mine": 1.0}, "fns": {"mine": judge}})
    done = run("grpo_full_finetune", config)
    assert done.returncode != 0
    message = done.stderr.split("Error:\n")[1].splitlines()[0]
    assert message.startswith("rewards: rank 1: fns.mine: this judge raised ZeroDivisionError: ")
    assert "test_recipes.py:" in message and " at row 0, " in message and "prompt 'User: " in message
