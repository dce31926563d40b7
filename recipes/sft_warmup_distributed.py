"""SFT warm-up: teach a model the R1 format, prompt in, ``thinking </think> <answer> 18 </answer>`` out.

Launch from the root of the repository, on any number of ranks:

    tune run --nproc_per_node 2 recipes/sft_warmup_distributed.py --config configs/tiny/sft_warmup.yaml

Left out: packing (rows of like length share a micro-batch instead) and LoRA.
"""

from dataclasses import dataclass

from torchtune_grpo.collectives import all_reduce
from torchtune_grpo.config import instantiate
from torchtune_grpo.data import SFTBatch, SFTLoader
from torchtune_grpo.entry import recipe_entry
from torchtune_grpo.evaluation import build_evaluator
from torchtune_grpo.logprobs import FullSoftmaxHead, target_logprobs
from torchtune_grpo.microbatches import plan_lengths_in_step
from torchtune_grpo.training.distributed import init_ranks, set_gradient_sync
from torchtune_grpo.training.preemption import Preemption
from torchtune_grpo.training.progress import progress_bar
from torchtune_grpo.training.reporting import Reporter, report_data
from torchtune_grpo.training.setup import TrainingConfig, check_at_least, check_model, make_output_dir, per_rank
from torchtune_grpo.training.train_state import TrainState

CONSOLE = ("loss", "lr", "grad_norm", "tokens_per_second/update")


@dataclass(kw_only=True)
class Config(TrainingConfig):
    """The recipe's own keys, beside those of ``TrainingConfig``."""

    examples_per_step: int  # over all ranks
    max_tokens: int  # longest example, prompt to end token; longer ones are left out and counted
    log_every_n_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "log_every_n_steps")


class SFTWarmupRecipe:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self._preemption = Preemption()
        self.ranks = init_ranks(cfg.device, num_threads=cfg.num_threads)
        self.step = 0  # optimizer steps done

    # --- Plumbing ---

    def setup(self) -> None:
        cfg, ranks = self.cfg, self.ranks
        make_output_dir(cfg, ranks)
        checkpoints = instantiate(cfg.checkpoints, output_dir=cfg.output_dir)
        resume_from = checkpoints.start(cfg.resume)
        self._tokenizer, self._prompt = instantiate(cfg.tokenizer), instantiate(cfg.prompt)
        self._setup_data()
        check_model(cfg, self._tokenizer, longest=max(cfg.max_tokens, self._evaluator.longest))
        self._state = TrainState(cfg, ranks, self._tokenizer, checkpoints, resume_from, self._dataset)
        report_data(cfg, ranks, self._dataset, self._loader.dropped, self._evaluator)
        resumed = self._state.resume()  # last: it restores the random state
        self._report = Reporter(cfg, ranks, self._evaluator, resumed=resumed, console=CONSOLE)
        self.step = 0 if resumed is None else resumed.step

    def _setup_data(self) -> None:
        cfg, ranks = self.cfg, self.ranks
        self._dataset = instantiate(cfg.dataset)
        self._loader = SFTLoader(
            self._dataset,
            self._tokenizer,
            self._prompt,
            batch_size=per_rank(cfg.examples_per_step, ranks, "examples_per_step"),
            max_tokens=cfg.max_tokens,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=cfg.seed,
        )
        self._evaluator = build_evaluator(
            cfg.evaluation,
            tokenizer=self._tokenizer,
            prompt=self._prompt,
            score=instantiate(cfg.rewards),
            ranks=ranks,
        )

    # --- Algorithm: edit here ---

    def _update(self, batch: SFTBatch) -> None:
        """One optimizer step on the mean cross-entropy over all ranks' target tokens."""
        targets = all_reduce(batch.loss_mask.sum().double()).item()
        parts = plan_lengths_in_step(batch.lengths, self.cfg.max_tokens_per_micro_batch)
        for i, (rows, weight) in enumerate(parts):
            width = int(batch.lengths[rows].max())
            tokens = batch.tokens[rows, :width].to(self.ranks.device)
            mask = batch.loss_mask[rows, :width].to(self.ranks.device)
            set_gradient_sync(self._state.model, i == len(parts) - 1)
            logprobs = target_logprobs(self._state.model, tokens, mask, FullSoftmaxHead(), temperature=1.0)
            total = -weight * logprobs.sum()
            # FSDP averages gradients over ranks; times their number this is the mean over all target tokens.
            (total * self.ranks.world_size / targets).backward()
            self._report.add({"loss": (total.detach(), weight * mask.sum())})
        self._report.add_values(self._state.optimizer_step(batch, self.step + 1))
        self.step += 1

    def train(self) -> bool:
        """True where the run was preempted, False where it is done."""
        self._preemption.defer()
        self._state.model.train()
        preempted = self._between_steps()
        for _ in progress_bar(range(self.step, self.cfg.total_steps), "SFT steps"):
            if preempted:
                break
            batch = self._loader.batch(self.step)
            with self._report.phase("update", tokens=int(batch.lengths.sum())):
                self._update(batch)
            if self.cfg.is_due(self.step, self.cfg.log_every_n_steps):
                self._report.log(self.step)
            preempted = self._between_steps()
        return preempted

    # --- Plumbing ---

    def _between_steps(self) -> bool:
        """Evaluates and saves what is due at this step; True on every rank where the run has to end here."""
        preempted = self._preemption.requested()
        if not preempted and self.cfg.is_due(self.step, self.cfg.evaluate_every_n_steps):
            preempted = not self._report.evaluate(self.step, self._state.model, stop=self._preemption.requested)
        if self.step and (preempted or self.cfg.is_due(self.step, self._state.checkpoints.every_n_steps)):
            self._state.save(self.step, self._report)
        return preempted

    def cleanup(self, preempted: bool) -> None:
        self._state.finish(self._report, self.step, preempted=preempted)


@recipe_entry(Config)
def recipe_main(cfg: Config) -> None:
    """SFT warm-up on the R1 format. See the config file for the keys."""
    recipe = SFTWarmupRecipe(cfg)
    recipe.setup()
    recipe.cleanup(preempted=recipe.train())


if __name__ == "__main__":
    recipe_main()
