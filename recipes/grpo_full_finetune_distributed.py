"""GRPO: sample a group of completions for each prompt, judge them, push the policy toward the better siblings.

Launch from the root of the repository, on any number of ranks:

    tune run --nproc_per_node 2 recipes/grpo_full_finetune_distributed.py --config configs/tiny/grpo.yaml

Every part of the algorithm is a component named in the config (``generate``, ``rewards``, ``advantage``, ``loss``,
``token_weights``, ``logprobs``, ``old_logprobs``), so a variant is another YAML node, not a branch in this file.

Left out: an inference engine of its own (the trained model itself samples), multi-turn rollouts, LoRA.
"""

from dataclasses import dataclass

from torchtune_grpo.config import Component, ConfigError, component, instantiate
from torchtune_grpo.data import PromptLoader
from torchtune_grpo.dynamic_sampling import InformativeGroups
from torchtune_grpo.entry import recipe_entry
from torchtune_grpo.evaluation import build_evaluator
from torchtune_grpo.microbatches import minibatch, split_in_step
from torchtune_grpo.normalization import normalize
from torchtune_grpo.old_logprobs import score
from torchtune_grpo.rollouts import rollout_metrics, sample_rows, score_rollout
from torchtune_grpo.training.checkpoints import Resumed
from torchtune_grpo.training.distributed import init_ranks, set_gradient_sync
from torchtune_grpo.training.open_rollout import resume_rollout, rollout_state
from torchtune_grpo.training.preemption import Preemption
from torchtune_grpo.training.progress import progress_bar
from torchtune_grpo.training.reporting import Reporter, report_data
from torchtune_grpo.training.setup import (
    RolloutConfig,
    build_policy,
    check_at_least,
    check_model,
    make_output_dir,
)
from torchtune_grpo.training.train_state import TrainState
from torchtune_grpo.types import Rewards, Rollout, Trajectory

CONSOLE = ("reward", "success", "response_length", "entropy", "grad_norm", "tokens_per_second/rollout")


@dataclass(kw_only=True)
class Config(RolloutConfig):
    """The recipe's own keys, beside those of ``RolloutConfig``."""

    max_sampling_rounds: int = 1  # > 1: dynamic sampling, further rollouts until enough groups have spread
    advantage: Component = component(provides=("needs_reference", "min_group_size"))
    loss: Component = component(provides=("needs_reference",))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "max_sampling_rounds")


class GRPORecipe:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self._preemption = Preemption()
        self.ranks = init_ranks(cfg.device, num_threads=cfg.num_threads)
        self.step = 0  # optimizer steps done
        self._position = 0  # batches of prompts taken from the loader

    # --- Plumbing ---

    def setup(self) -> None:
        cfg, ranks = self.cfg, self.ranks
        make_output_dir(cfg, ranks)
        checkpoints = instantiate(cfg.checkpoints, output_dir=cfg.output_dir)
        resume_from = checkpoints.start(cfg.resume)
        self._tokenizer, self._prompt = instantiate(cfg.tokenizer), instantiate(cfg.prompt)
        self._setup_algorithm()
        self._setup_data()
        longest = max(self._generate.longest(cfg.max_prompt_tokens), self._evaluator.longest)
        check_model(cfg, self._tokenizer, longest)
        self._state = TrainState(cfg, ranks, self._tokenizer, checkpoints, resume_from, self._dataset)
        report_data(cfg, ranks, self._dataset, self._loader.dropped, self._evaluator)
        needs_reference = self._advantage_fn.needs_reference or self._loss_fn.needs_reference
        self._reference = build_policy(cfg, ranks, trainable=False) if needs_reference else None
        resumed = self._state.resume()  # last: it restores the random state
        self._report = Reporter(cfg, ranks, self._evaluator, resumed=resumed, console=CONSOLE)
        if resumed is not None:
            self._take_up(resumed)

    def _take_up(self, resumed: Resumed) -> None:
        self.step, self._position = resumed.step, resumed.extra["position"]
        minibatches, pad_id = self.cfg.minibatches_per_epoch, self._tokenizer.pad_id
        rollout = resume_rollout(Trajectory, resumed, self.ranks, minibatches=minibatches, pad_id=pad_id)
        if rollout is not None:
            self._trajectory, self._samples = rollout

    def _setup_algorithm(self) -> None:
        cfg = self.cfg
        self._generate = instantiate(cfg.generate)
        self._score = instantiate(cfg.rewards)
        self._advantage_fn = instantiate(cfg.advantage)
        self._trained_rows = instantiate(cfg.trained_rows)
        self._token_weights = instantiate(cfg.token_weights)
        self._logprobs_fn = instantiate(cfg.logprobs, temperature=self._generate.temperature)
        self._old_logprobs = instantiate(cfg.old_logprobs)
        self._loss_fn = instantiate(cfg.loss)
        self._prompts_per_rank = cfg.prompts_per_rank(self.ranks)
        if not self._generate.on_policy:
            raise ConfigError(
                "generate: got greedy or truncated sampling (temperature 0, top_k, top_p, min_p), expected none of "
                "them: ratios to the sampling policy would be wrong. They are for evaluation"
            )
        if self._generate.group_size < self._advantage_fn.min_group_size:
            raise ConfigError(
                f"generate.group_size: got {self._generate.group_size}, expected at least "
                f"{self._advantage_fn.min_group_size}: `advantage` compares siblings"
            )

    def _setup_data(self) -> None:
        cfg, ranks = self.cfg, self.ranks
        self._dataset = instantiate(cfg.dataset)
        self._loader = PromptLoader(
            self._dataset,
            self._tokenizer,
            self._prompt,
            batch_size=self._prompts_per_rank,
            max_prompt_tokens=cfg.max_prompt_tokens,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=cfg.seed,
        )
        self._evaluator = build_evaluator(
            cfg.evaluation,
            tokenizer=self._tokenizer,
            prompt=self._prompt,
            score=self._score,
            ranks=ranks,
        )

    # --- Algorithm: edit here ---

    def _sample(self) -> tuple[Rollout, Rewards]:
        """A rollout with its rewards; with dynamic sampling as many rounds as it takes, the same on every rank."""
        pool = InformativeGroups(num_groups=self._prompts_per_rank, max_rounds=self.cfg.max_sampling_rounds)
        while not pool.full:
            batch = self._loader.batch(self._position)
            self._position += 1
            with self._report.phase("rollout"):
                rollout = self._generate(self._state.model, batch)
            self._report.count_tokens("rollout", int(rollout.response_mask.sum()))
            with self._report.phase("rewards"):
                rewards, texts = score_rollout(rollout, self._tokenizer, self._score)
                pool.add(rollout, rewards)
            self._report.add(rollout_metrics(rollout, rewards))
        self._report.add(pool.metrics)
        self._samples = sample_rows(rollout, rewards, texts, self._tokenizer, self.cfg.num_logged_samples)
        return pool.result(self._tokenizer.pad_id)

    def _make_trajectory(self, rollout: Rollout, rewards: Rewards) -> Trajectory:
        """Everything the loss needs, worked out once a rollout. ``token_weights`` are still relative: see _update."""
        max_tokens = self.cfg.max_tokens_per_micro_batch
        ref_logprobs = rollout.old_logprobs
        if self._reference is not None:
            with self._report.phase("reference"):
                ref_logprobs = score(self._reference, rollout, self._logprobs_fn, max_tokens=max_tokens)
        with self._report.phase("old_logprobs"):
            rollout, importance = self._old_logprobs(
                self._state.model, rollout, self._logprobs_fn, max_tokens=max_tokens
            )
        return Trajectory(
            rollout=rollout,
            advantages=self._advantage_fn(rewards, rollout, ref_logprobs),
            ref_logprobs=ref_logprobs,
            token_weights=self._trained_rows(rollout, rewards) * importance,
        )

    def _update(self, trajectory: Trajectory) -> None:
        """One optimizer step. The gradient depends neither on the ranks nor on how rows fall into micro-batches."""
        trajectory = normalize(trajectory, self._token_weights, world_size_for_averaging=self.ranks.world_size)
        micro_batches = split_in_step(trajectory, self._logprobs_fn, self.cfg.max_tokens_per_micro_batch)
        for i, micro in enumerate(progress_bar(micro_batches, "update")):
            set_gradient_sync(self._state.model, i == len(micro_batches) - 1)
            logprobs = self._logprobs_fn(self._state.model, micro.rollout)
            out = self._loss_fn(logprobs, micro)
            out.loss.backward()
            self._report.add(out.metrics)
        self._report.add_values(self._state.optimizer_step(trajectory, self.step + 1))
        self.step += 1

    def _train_step(self) -> None:
        """One optimizer step; the first of a rollout samples it, the last logs it."""
        cfg = self.cfg
        updates_done = self.step % cfg.updates_per_rollout
        if updates_done == 0:
            self._trajectory = self._make_trajectory(*self._sample())
        part = minibatch(self._trajectory, updates_done % cfg.minibatches_per_epoch, of=cfg.minibatches_per_epoch)
        with self._report.phase("update", tokens=int(part.rollout.response_mask.sum())):
            self._update(part)
        if self._between_rollouts:
            self._report.log(self.step)
            if cfg.is_due(self.step, cfg.log_samples_every_n_steps, since=cfg.updates_per_rollout):
                self._report.samples(self.step, self._samples)

    def train(self) -> bool:
        """True where the run was preempted, False where it is done."""
        self._preemption.defer()
        self._state.model.train()
        preempted = self._between_steps()
        for _ in progress_bar(range(self.step, self.cfg.total_steps), "GRPO steps"):
            if preempted:
                break
            self._train_step()
            preempted = self._between_steps()
        return preempted

    # --- Plumbing ---

    def _between_steps(self) -> bool:
        """Evaluates and saves what is due at this step; True on every rank where the run has to end here."""
        preempted = self._preemption.requested()
        if not preempted and self.cfg.is_due(self.step, self.cfg.evaluate_every_n_steps):
            preempted = not self._report.evaluate(self.step, self._state.model, stop=self._preemption.requested)
        if self.step and (preempted or self.cfg.is_due(self.step, self._state.checkpoints.every_n_steps)):
            self.save_checkpoint()
        return preempted

    @property
    def _between_rollouts(self) -> bool:
        return self.step % self.cfg.updates_per_rollout == 0

    def save_checkpoint(self) -> None:
        rollout = None if self._between_rollouts else rollout_state(self._trajectory, self._samples)
        self._state.save(self.step, self._report, extra={"position": self._position}, rollout=rollout)

    def cleanup(self, preempted: bool) -> None:
        self._state.finish(self._report, self.step, preempted=preempted)


@recipe_entry(Config)
def recipe_main(cfg: Config) -> None:
    """GRPO on verifiable rewards. See the config file for the keys."""
    recipe = GRPORecipe(cfg)
    recipe.setup()
    recipe.cleanup(preempted=recipe.train())


if __name__ == "__main__":
    recipe_main()
