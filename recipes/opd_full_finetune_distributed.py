"""On-policy distillation: the student writes, the teacher of each prompt's source judges every token of it.

Launch from the root of the repository, on any number of ranks:

    tune run --nproc_per_node 2 recipes/opd_full_finetune_distributed.py --config configs/tiny/opd.yaml

The loop is that of GRPO with teachers in the place of rewards. What the student learns from them is the component
``objective``: ``SampledToken`` (an advantage a token, any policy loss) or ``FullVocabulary`` (an exact divergence).
The ``generate`` component ``torchtune_grpo.distillation.GivenCompletions`` learns from the data's worked solutions
instead of the student's own completions; all else stays.

Left out: teachers over another tokenizer, teachers on machines of their own.
"""

from dataclasses import dataclass
from typing import Literal

from torchtune_grpo.config import Component, component, instantiate
from torchtune_grpo.data import PromptLoader
from torchtune_grpo.distillation import (
    DistillationTrajectory,
    TeacherPool,
    check_components,
    make_head_group,
    means,
)
from torchtune_grpo.entry import recipe_entry
from torchtune_grpo.evaluation import build_evaluator
from torchtune_grpo.microbatches import minibatch, split_in_step
from torchtune_grpo.normalization import normalize
from torchtune_grpo.rollouts import rollout_metrics, sample_rows, score_rollout
from torchtune_grpo.training.checkpoints import Resumed
from torchtune_grpo.training.distributed import init_ranks, set_gradient_sync
from torchtune_grpo.training.open_rollout import resume_rollout, rollout_state
from torchtune_grpo.training.preemption import Preemption
from torchtune_grpo.training.progress import progress_bar
from torchtune_grpo.training.reporting import Reporter, report_data
from torchtune_grpo.training.setup import RolloutConfig, check_model, make_output_dir
from torchtune_grpo.training.train_state import TrainState
from torchtune_grpo.types import Rewards, Rollout

CONSOLE = ("loss", "reverse_kl", "teacher_gap", "success", "response_length", "grad_norm", "tokens_per_second/rollout")


@dataclass(kw_only=True)
class Config(RolloutConfig):
    """The recipe's own keys, beside those of ``RolloutConfig``."""

    teachers: dict[str, Component] = component(provides=("model", "weights"))  # alias -> Teacher
    routing: Component | None = component(
        provides=("sources",)
    )  # data sources -> aliases; null: the one teacher judges every row
    teacher_heads: Literal["keep", "offload", "evict"] = "keep"  # LM heads between rollouts: on device, in CPU, nowhere
    tensor_parallel: int = 1  # ranks that share each LM head, a slice of the vocabulary each
    objective: Component = component(provides=("payload", "needs_on_policy"))


class OPDRecipe:
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
        self._teachers = TeacherPool(
            cfg.teachers,
            instantiate(cfg.routing),
            sources=self._loader.sources,
            tokenizer=self._tokenizer,
            payload=self._objective.payload,
            vocabulary=make_head_group(ranks, cfg.tensor_parallel, self._tokenizer.vocab_size),
            longest=longest,
        )
        if resume_from is not None:
            self._teachers.check_resumed(resume_from)
        self._state = TrainState(cfg, ranks, self._tokenizer, checkpoints, resume_from, self._dataset)
        report_data(cfg, ranks, self._dataset, self._loader.dropped, self._evaluator)
        self._teachers.load(ranks, heads=cfg.teacher_heads)
        resumed = self._state.resume()  # last: it restores the random state
        self._report = Reporter(cfg, ranks, self._evaluator, resumed=resumed, console=CONSOLE)
        if resumed is not None:
            self._take_up(resumed)

    def _take_up(self, resumed: Resumed) -> None:
        self.step, self._position = resumed.step, resumed.extra["position"]
        minibatches, pad_id = self.cfg.minibatches_per_epoch, self._tokenizer.pad_id
        rollout = resume_rollout(DistillationTrajectory, resumed, self.ranks, minibatches=minibatches, pad_id=pad_id)
        if rollout is not None:
            self._trajectory, self._samples = rollout

    def _setup_algorithm(self) -> None:
        cfg = self.cfg
        self._generate = instantiate(cfg.generate)
        self._score = instantiate(cfg.rewards)
        self._trained_rows = instantiate(cfg.trained_rows)
        self._token_weights = instantiate(cfg.token_weights)
        self._logprobs_fn = instantiate(cfg.logprobs, temperature=self._generate.temperature)
        self._old_logprobs = instantiate(cfg.old_logprobs)
        self._objective = instantiate(cfg.objective)
        check_components(self._generate, self._logprobs_fn, self._objective)

    def _setup_data(self) -> None:
        cfg, ranks = self.cfg, self.ranks
        self._dataset = instantiate(cfg.dataset)
        self._loader = PromptLoader(
            self._dataset,
            self._tokenizer,
            self._prompt,
            batch_size=cfg.prompts_per_rank(ranks),
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
        """The student's completions with their rewards; the latter only inform, unless the objective mixes them in."""
        batch = self._loader.batch(self._position)
        self._position += 1
        with self._report.phase("rollout"):
            rollout = self._generate(self._state.model, batch)
        self._report.count_tokens("rollout", int(rollout.response_mask.sum()))
        with self._report.phase("rewards"):
            rewards, texts = score_rollout(rollout, self._tokenizer, self._score)
        self._report.add(rollout_metrics(rollout, rewards))
        self._samples = sample_rows(rollout, rewards, texts, self._tokenizer, self.cfg.num_logged_samples)
        return rollout, rewards

    def _make_trajectory(self, rollout: Rollout, rewards: Rewards) -> DistillationTrajectory:
        """Every row with what its teacher says of it. ``token_weights`` are still relative: see _update."""
        max_tokens = self.cfg.max_tokens_per_micro_batch
        with self._report.phase("teachers", tokens=int(rollout.response_mask.sum())):
            scores = self._teachers.score(rollout, self._logprobs_fn, max_tokens=max_tokens)
        with self._report.phase("old_logprobs"):
            rollout, importance = self._old_logprobs(
                self._state.model, rollout, self._logprobs_fn, max_tokens=max_tokens
            )
        trajectory = DistillationTrajectory(
            rollout=rollout,
            advantages=self._objective.advantages(rewards, rollout, scores.logprobs),
            ref_logprobs=scores.logprobs,
            token_weights=self._trained_rows(rollout, rewards) * importance,
            teacher_index=self._teachers.index.column(rollout.source),
            payload=scores.payload,
        )
        gap = scores.logprobs - rollout.old_logprobs
        self._report.add(means("teacher_gap", gap, trajectory, self._teachers.index.names))
        return trajectory

    def _update(self, trajectory: DistillationTrajectory) -> None:
        """One optimizer step. The gradient depends neither on the ranks nor on how rows fall into micro-batches."""
        trajectory = normalize(trajectory, self._token_weights, world_size_for_averaging=self.ranks.world_size)
        micro_batches = split_in_step(trajectory, self._logprobs_fn, self.cfg.max_tokens_per_micro_batch)
        for i, micro in enumerate(progress_bar(micro_batches, "update")):
            set_gradient_sync(self._state.model, i == len(micro_batches) - 1)
            out = self._objective(self._state.model, micro, self._logprobs_fn, self._teachers.side)
            out.loss.backward()
            self._report.add(out.metrics)
            self._report.add_extremes(out.minima, out.maxima)
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
            self._teachers.release_heads()
            self._report.log(self.step)
            if cfg.is_due(self.step, cfg.log_samples_every_n_steps, since=cfg.updates_per_rollout):
                self._report.samples(self.step, self._samples)

    def train(self) -> bool:
        """True where the run was preempted, False where it is done."""
        self._preemption.defer()
        self._state.model.train()
        preempted = self._between_steps()
        for _ in progress_bar(range(self.step, self.cfg.total_steps), "OPD steps"):
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
        extra = {"position": self._position, "teachers": self._teachers.index.state()}
        self._state.save(self.step, self._report, extra=extra, rollout=rollout)

    def cleanup(self, preempted: bool) -> None:
        self._state.finish(self._report, self.step, preempted=preempted)


@recipe_entry(Config)
def recipe_main(cfg: Config) -> None:
    """On-policy distillation from one teacher or several. See the config file for the keys."""
    recipe = OPDRecipe(cfg)
    recipe.setup()
    recipe.cleanup(preempted=recipe.train())


if __name__ == "__main__":
    recipe_main()
