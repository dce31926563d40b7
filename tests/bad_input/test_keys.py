"""Misspelt, missing and mistyped keys, components that are none, interpolations, the command line, the config file."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.bad_input.entry import run_program, run_recipe

NAMES = [
    ("grpo", "sede=1", "sede: unknown key; did you mean 'seed'?"),
    ("grpo", "temperature=0.5", "temperature: unknown key; it belongs in generate"),
    ("grpo", "generate.temprature=1.0", "generate.temprature: unknown key; did you mean 'temperature'?"),
    ("grpo", "evaluation.heldout.generate.group_sise=1", "evaluation.heldout.generate.group_sise: unknown key"),
    ("grpo", "rewards.fns.correct={_component_: torchtune_grpo.rewards.FormatReward, strict: 1}", "rewards.fns.corr"),
    ("grpo", "optimizer.learning_rate=1e-4", "optimizer.learning_rate: unknown key"),
    ("grpo", "optimizer.params=3", "optimizer.params: this value comes from the recipe: remove the key"),
    ("opd", "teachers.growth.wieghts=x", "teachers.growth.wieghts: unknown key; did you mean 'weights'?"),
    ("opd", "routing.sorces.growth=x", "routing.sorces: unknown key; did you mean 'sources'?"),
    ("sft_warmup", "examples_per_stepp=8", "examples_per_stepp: unknown key; did you mean 'examples_per_step'?"),
    ("evaluate", "dataset.split=test", "dataset: unknown key"),
    ("grpo", "~total_steps", "total_steps: missing, expected an int"),
    ("grpo", "~generate.group_size", "generate.group_size: missing, expected an int"),
    ("grpo", "~evaluation.heldout.dataset.size", "evaluation.heldout.dataset.size: missing"),
    ("opd", "~teachers.growth.weights", "teachers.growth.weights: missing, expected a str"),
    ("sft_warmup", "~max_tokens", "max_tokens: missing, expected an int"),
    ("evaluate", "~output_dir", "output_dir: missing, expected a str"),
    ("evaluate", "~evaluation", "evaluation: missing"),
]

TYPES = [
    ("sft_warmup", "seed=1.5", "seed: got the float 1.5, expected an int"),
    ("sft_warmup", "seed=true", "seed: got the bool True, expected an int"),
    ("sft_warmup", "seed=null", "seed: got null, expected an int"),
    ("sft_warmup", "seed=[1]", "seed: got the list [1], expected an int"),
    ("sft_warmup", "seed='1'", "seed: got the string '1', expected an int; it was read as a string"),
    ("grpo", "total_steps={a: 1}", "total_steps: got a mapping with a, expected an int"),
    ("grpo", "optimizer.lr='1e-4'", "optimizer.lr: got the string '1e-4', expected a float"),
    ("grpo", "optimizer.betas=0.9", "optimizer.betas: got the float 0.9"),
    ("grpo", "optimizer.betas=[0.9]", "optimizer.betas: got the list [0.9]"),
    ("grpo", "device=0", "device: got the int 0, expected a str"),
    ("grpo", "dtype=fp16", "dtype: got the string 'fp16', expected one of 'fp32', 'bf16'"),
    ("grpo", "dtype=null", "dtype: got null, expected one of"),
    ("grpo", "compile=1", "compile: got the int 1, expected a bool"),
    ("grpo", "generate.top_k=0.5", "generate.top_k: got the float 0.5, expected an int or null"),
    ("grpo", "model.num_layers=2.0", "model.num_layers: got the float 2.0, expected an int; write 2"),
    ("grpo", "rewards.weights=[1, 2]", "cannot be merged into the config: ['rewards.weights=[1, 2]']"),
    ("grpo", "rewards.weights.length=heavy", "rewards.weights.length: got the string 'heavy', expected a float"),
    ("grpo", "rewards.fns=null", "rewards.fns: got null"),
    ("grpo", "metric_loggers=tensorboard", "metric_loggers: got the string 'tensorboard', expected a list"),
    ("grpo", "metric_loggers=[tensorboard]", "metric_loggers[0]: got the string 'tensorboard', expected a Component"),
    ("grpo", "evaluation=3", "evaluation: got the int 3"),
    ("grpo", "resume=3", "resume: got the int 3, expected a str or null"),
    ("evaluate", "evaluation.sampled.k=4", "evaluation.sampled.k: got the int 4, expected a list[int]"),
    ("opd", "tensor_parallel=two", "tensor_parallel: got the string 'two', expected an int"),
    ("opd", "teacher_heads=keeep", "teacher_heads: got the string 'keeep', expected one of 'keep', 'offload', 'evict'"),
    ("opd", "objective.payload.dtype=fp16", "objective.payload.dtype: got the string 'fp16'"),
    ("opd", "teachers=[a]", "cannot be merged into the config: ['teachers=[a]']"),
    ("grpo", "optimizer.lr=.nan", "optimizer.lr: got the float nan, expected a finite number"),
    ("grpo", "generate.temperature=.inf", "generate.temperature: got the float inf, expected a finite number"),
    ("grpo", "clip_grad_norm=.nan", "clip_grad_norm: got the float nan, expected a finite number"),
    ("grpo", "loss.clip_low=-.inf", "loss.clip_low: got the float -inf, expected a finite number"),
    ("grpo", f"seed={10**30}", f"seed: got the int {10**30}, expected a number of at most 64 bits"),
]

COMPONENTS = [
    ("torchtune_grpo.losses.ClipedSurrogate", "cannot import", "did you mean 'ClippedSurrogate'?"),
    ("nowhere.at.all", "cannot import 'nowhere.at.all'", "No module named 'nowhere'"),
    ("torchtune_grpo.losses", "got 'torchtune_grpo.losses', a module, expected a class or function"),
    ("torchtune_grpo.losses.LOG_RATIO_BOUND", "a float, expected a class or function"),
    ("torchtune_grpo.losses.ClippedSurrogate()", "expected a dotpath such as package.module.name"),
    ("os.system", "got 'os.system'", "standard library"),
    ("posix.system", "got 'posix.system'", "standard library"),
    ("builtins.eval", "got 'builtins.eval'", "standard library"),
    ("builtins.__import__", "got 'builtins.__import__'", "standard library"),
    ("eval", "cannot import 'eval': No module named 'eval'"),
    ("subprocess.run", "got 'subprocess.run'", "standard library"),
    ("torchtune_grpo.training.setup.shutil.rmtree", "shutil.rmtree'", "standard library"),
    ("torchtune_grpo.demo.subprocess.run", "subprocess.run'", "standard library"),
    ("torchtune_grpo.losses._check_clips", "a private name"),
    ("../mine.Loss", "got the string '../mine.Loss', expected a dotpath"),
    (".losses.GSPO", "got the string '.losses.GSPO', expected a dotpath"),
    ("''", "got the string '', expected a dotpath"),
    ("null", "got null, expected a dotpath"),
    ("3", "got the int 3, expected a dotpath"),
    ("[a]", "expected a dotpath"),
    ("bad_syntax.Loss", "cannot import 'bad_syntax.Loss'", "bad_syntax.py, line 1"),
    ("bad_import.Loss", "cannot import 'bad_import.Loss'", "ZeroDivisionError"),
    ("bad_exit.Loss", "cannot import 'bad_exit.Loss'", "SystemExit"),
]

INTERPOLATIONS = [
    ("output_dir=${nowhere}", "output_dir: this value cannot be resolved", "nowhere"),
    ("output_dir=${oc.env:NO_SUCH_VARIABLE}", "output_dir: this value cannot be resolved", "NO_SUCH_VARIABLE"),
    ("seed=${shell:ls}", "seed: this value cannot be resolved", "shell"),
    ("seed=${seed}", "seed: this value cannot be resolved"),
    ("seed=${", "--config and key=value overrides"),
    ("output_dir=${oc.decode:${}", "output_dir"),
    ("generate.top_k=${generate.top_q}", "generate.top_k: this value cannot be resolved", "top_q"),
]

COMMAND_LINES = [
    ("seed", "--config and key=value overrides: Command-line overrides must be in the form of key=value, got seed"),
    ("seed=1=2", "--config and key=value overrides", "got seed=1=2"),
    ("=3", "unknown key"),
    ("--seed=3", "--config and key=value overrides: Additional flag arguments not supported"),
    ("~nowhere", "--config and key=value overrides: Could not find key nowhere"),
    ("~loss", "--config and key=value overrides: Could not find key loss"),
    ("seed.x=3", "seed: got a mapping with x, expected an int"),
    ("loss.clip_low.x=3", "loss.clip_low: got a mapping with x, expected a float"),
    ("metric_loggers[0]=3", "cannot be merged into the config: ['metric_loggers[0]=3']"),
    ("seed=[1", "--config and key=value overrides"),
    ("seed={", "--config and key=value overrides"),
    ("seed=!!python/object/apply:os.system [touch pwned]", "--config and key=value overrides", "python/object"),
]


@pytest.mark.parametrize(("recipe", "override", "line"), NAMES + TYPES)
def test_key_is_refused(configs: Path, recipe: str, override: str, line: str) -> None:
    run_recipe(recipe, configs / f"{recipe}.yaml", override).assert_refused(line)


def test_all_faults_are_told_together(configs: Path) -> None:
    outcome = run_recipe("grpo", configs / "grpo.yaml", "optimizer.lr='1e-4'", "loss.clip_hihg=0.3", "total_stepz=3")
    outcome.assert_refused()
    for line in (
        "optimizer.lr: got the string '1e-4'",
        "loss.clip_hihg: unknown key; did you mean 'clip_high'?",
        "total_stepz: unknown key; did you mean 'total_steps'?",
    ):
        assert line in outcome.err


@pytest.mark.parametrize(("dotpath", "expected"), [(path, texts) for path, *texts in COMPONENTS])
def test_component_is_refused(
    configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dotpath: str, expected: list[str]
) -> None:
    (tmp_path / "bad_syntax.py").write_text("def Loss(:\n")
    (tmp_path / "bad_import.py").write_text("Loss = 1 / 0\n")
    (tmp_path / "bad_exit.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    outcome = run_recipe("grpo", configs / "grpo.yaml", f"loss._component_={dotpath}")
    outcome.assert_refused("loss._component_: ", *expected)


@pytest.mark.parametrize("path", ["os.system", "builtins.eval", "nowhere.f", "torchtune_grpo.rewards", "os"])
def test_function_of_a_judge_is_refused_alike(configs: Path, path: str) -> None:
    node = f"{{_component_: torchtune_grpo.rewards.CallableReward, path: {path}}}"
    outcome = run_recipe("grpo", configs / "grpo.yaml", f"rewards.fns.mine={node}", "rewards.weights.mine=1.0")
    outcome.assert_refused("rewards.fns.mine: path: ", path)


KINDS = [
    ("grpo", "loss", "rewards.FormatReward", "loss: got the component", "which has no needs_reference"),
    ("grpo", "advantage", "losses.GSPO", "advantage: got the component", "which has no min_group_size"),
    ("grpo", "generate", "losses.GSPO", "generate: got the component", "which has no on_policy"),
    ("grpo", "logprobs", "data.Prompt", "logprobs._component_: ", "takes no 'temperature'"),
    ("grpo", "dataset", "data.Prompt", "dataset: got the component", "which has no examples"),
    ("evaluate", "tokenizer", "data.Prompt", "tokenizer: got the component", "which has no encode_prompt"),
    ("evaluate", "model", "data.Prompt", "model: got the component", "which has no tok_embeddings"),
    ("opd", "objective", "losses.GSPO", "objective: got the component", "which has no payload"),
    ("opd", "routing", "losses.GSPO", "routing: got the component", "which has no sources"),
]


@pytest.mark.parametrize(("recipe", "key", "name", "line", "lacking"), KINDS)
def test_component_made_for_another_key_is_refused(
    configs: Path, tmp_path: Path, recipe: str, key: str, name: str, line: str, lacking: str
) -> None:
    cfg = OmegaConf.load(configs / f"{recipe}.yaml")
    cfg[key] = {"_component_": f"torchtune_grpo.{name}"}
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    run_recipe(recipe, tmp_path / "config.yaml").assert_refused(line, lacking)


def test_a_module_of_the_users_own_is_no_fault(configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from functools import partial\nfrom torchtune_grpo.losses import GSPO\nMine = partial(GSPO, clip_high=0.1)\n"
    )
    (tmp_path / "losses_of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    outcome = run_recipe("grpo", configs / "grpo.yaml", "loss._component_=losses_of_mine.Mine", "loss.clip_low=0.1")
    assert "WeightsLoad" in outcome.err  # every check was passed


@pytest.mark.parametrize(("override", "expected"), [(override, texts) for override, *texts in INTERPOLATIONS])
def test_interpolation_is_refused(configs: Path, override: str, expected: list[str]) -> None:
    run_recipe("grpo", configs / "grpo.yaml", override).assert_refused(*expected)


def test_interpolations_in_a_circle_are_refused(configs: Path) -> None:
    overrides = ("seed=${num_threads}", "num_threads=${seed}")
    run_recipe("grpo", configs / "grpo.yaml", *overrides).assert_refused("this value cannot be resolved")


@pytest.mark.parametrize(("override", "expected"), [(override, texts) for override, *texts in COMMAND_LINES])
def test_command_line_is_refused(configs: Path, override: str, expected: list[str]) -> None:
    run_recipe("grpo", configs / "grpo.yaml", override).assert_refused(*expected)


def test_command_line_without_a_config_is_refused() -> None:
    outcome = run_program(Path(__file__).parents[2] / "recipes/evaluate_distributed.py")
    assert outcome.code == 2 and "--config" in outcome.err and "Traceback" not in outcome.err


FILES = {
    "empty": (b"", "output_dir: missing, expected a str"),
    "list": (b"- a\n- b\n", "no mapping of names to values"),
    "scalar": (b"hello\n", "hello: unknown key"),
    "tab": (b"seed:\n\t- 1\n", "line 2"),
    "unclosed": (b"output_dir: runs\nseed: [1\n", "line 3"),
    "colon": (b"seed: 1: 2\n", "line 1"),
    "binary": (bytes(range(256)), "not UTF-8"),
    "latin": ("output_dir: größe\n".encode("latin-1"), "not UTF-8"),
    "nul": (b"output_dir: a\0b\n", "--config"),
    "duplicate": (b"seed: 1\ndevice: cpu\nseed: 2\n", "found duplicate key seed", "line 3"),
    "python": (b"seed: !!python/object/apply:os.system ['touch pwned']\n", "python/object/apply:os.system", "line 1"),
    "anchor": (b"seed: *nowhere\n", "undefined alias", "line 1"),
    "unset": (b"seed: ???\n", "seed: got nothing (???), expected an int"),
    "config": (b"config: 3\n", "config"),
    "number": (b"1: 2\n", "1"),
    "null": (b"~: 2\n", "--config"),
    "deep": (b"[" * 5000, "--config"),
}


@pytest.mark.parametrize("name", FILES)
def test_config_file_is_refused(configs: Path, tmp_path: Path, name: str) -> None:
    content, *expected = FILES[name]
    (tmp_path / f"{name}.yaml").write_bytes(content)
    outcome = run_recipe("sft_warmup", tmp_path / f"{name}.yaml")
    outcome.assert_refused(*expected)


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_config_that_is_no_file_is_refused(configs: Path, tmp_path: Path, name: str) -> None:
    run_recipe("sft_warmup", tmp_path / name).assert_refused("--config", str(tmp_path))
