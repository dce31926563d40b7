import pytest
import torch

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import (
    TINY_TEMPLATE,
    Dataset,
    EvalLoader,
    Example,
    Prompt,
    PromptLoader,
    SFTLoader,
    left_pad,
    tiny_tokenizer,
)
from torchtune_grpo.seeds import mix_seed

TOKENIZER = tiny_tokenizer()
PROMPT = Prompt(template=TINY_TEMPLATE)
TEMPLATE_TOKENS = 5  # User : Assistant : <think>


def made_dataset(lengths):
    """One example for each length: a question of so many words, which is also its answer."""
    return Dataset(
        examples=[
            Example(
                question=" ".join(["Tom"] * n),
                answer=str(n),
                solution=f" ? </think> <answer> {n} </answer>",
                source="even" if n % 2 == 0 else "odd",
            )
            for n in lengths
        ]
    )


def prompt_loader(lengths, *, batch_size=2, limit=100, rank=0, world_size=1, seed=0):
    return PromptLoader(
        made_dataset(lengths),
        TOKENIZER,
        PROMPT,
        batch_size=batch_size,
        max_prompt_tokens=limit,
        rank=rank,
        world_size=world_size,
        seed=seed,
    )


def sft_loader(lengths, *, batch_size=2, limit=100, rank=0, world_size=1, seed=0):
    return SFTLoader(
        made_dataset(lengths),
        TOKENIZER,
        PROMPT,
        batch_size=batch_size,
        max_tokens=limit,
        rank=rank,
        world_size=world_size,
        seed=seed,
    )


def eval_batches(lengths, *, batch_size=2, limit=100, rank=0, world_size=1, seed=0):
    loader = EvalLoader(
        made_dataset(lengths),
        TOKENIZER,
        PROMPT,
        batch_size=batch_size,
        max_prompt_tokens=limit,
        rank=rank,
        world_size=world_size,
        seed=seed,
    )
    batches = list(loader)
    assert len(batches) == len(loader)
    return batches


def test_left_pad_puts_padding_in_front_and_keeps_ids_equal_to_it():
    tokens, lengths = left_pad([[7, 0, 9], [5], [0, 0]], pad_id=0)
    assert tokens.tolist() == [[7, 0, 9], [0, 0, 5], [0, 0, 0]]
    assert lengths.tolist() == [3, 1, 2]
    assert tokens.dtype == lengths.dtype == torch.int64


def test_prompt_batch_holds_the_prompts_of_its_answers():
    batch = prompt_loader([3, 8, 5, 11], batch_size=4).batch(0)
    assert sorted(map(int, batch.answers)) == [3, 5, 8, 11]
    assert batch.tokens.shape == (4, 11 + TEMPLATE_TOKENS)
    assert (batch.pad_id, batch.stop_ids) == (0, (1,))
    for tokens, length, answer, source in zip(batch.tokens, batch.lengths, batch.answers, batch.source, strict=True):
        n = int(answer)
        expected = TOKENIZER.encode("User:" + " Tom" * n + " Assistant: <think>")
        assert length == n + TEMPLATE_TOKENS
        assert tokens[-length:].tolist() == expected
        assert tokens[:-length].eq(TOKENIZER.pad_id).all()
        assert source == ("even" if n % 2 == 0 else "odd")


def test_prompt_batch_brings_the_worked_solutions_with_their_end_token():
    batch = prompt_loader([3, 4, 1]).batch(0)
    expected = [[*TOKENIZER.encode(f" ? </think> <answer> {n} </answer>"), TOKENIZER.eos_id] for n in batch.answers]
    assert batch.solutions == expected


def test_prompt_loader_names_the_sources_of_its_usable_rows():
    assert prompt_loader([3, 4, 1]).sources == ["even", "odd"]
    assert prompt_loader([3, 4, 1], limit=TEMPLATE_TOKENS + 3).sources == ["odd"]


def test_prompt_loader_gives_each_row_once_an_epoch_and_shuffles_the_next_anew():
    loader = prompt_loader(range(1, 13))
    assert loader.steps_per_epoch == 6
    epochs = [[a for s in range(6) for a in loader.batch(6 * e + s).answers] for e in range(2)]
    assert sorted(map(int, epochs[0])) == sorted(map(int, epochs[1])) == list(range(1, 13))
    assert epochs[0] != epochs[1]


def test_prompt_loader_leaves_out_the_remainder_of_an_epoch():
    loader = prompt_loader(range(1, 12), batch_size=2, world_size=2)
    assert loader.steps_per_epoch == 2
    answers = [a for step in range(2) for a in loader.batch(step).answers]
    assert len(set(answers)) == len(answers) == 4


def test_prompt_loader_order_needs_no_history():
    walked, fresh = prompt_loader(range(1, 13), seed=3), prompt_loader(range(1, 13), seed=3)
    for step in range(20):
        batch = walked.batch(step)
    assert fresh.batch(19).answers == batch.answers
    assert fresh.batch(19).seeds.equal(batch.seeds)
    assert [prompt_loader(range(1, 13), seed=4).batch(s).answers for s in range(6)] != [
        fresh.batch(s).answers for s in range(6)
    ]


@pytest.mark.parametrize("make", [prompt_loader, sft_loader])
def test_ranks_share_out_the_batch_that_one_rank_would_take(make):
    alone = make(range(1, 25), batch_size=4)
    ranks = [make(range(1, 25), batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    for step in range(8):
        dealt = [n for loader in ranks for n in loader.batch(step).lengths.tolist()]
        assert dealt == alone.batch(step).lengths.tolist()


def test_sampling_seeds_do_not_depend_on_the_number_of_ranks():
    alone = prompt_loader([4] * 8, batch_size=4, seed=9)
    ranks = [prompt_loader([4] * 8, batch_size=2, rank=rank, world_size=2, seed=9) for rank in range(2)]
    for step in range(4):
        seeds = [seed for loader in ranks for seed in loader.batch(step).seeds.tolist()]
        assert seeds == alone.batch(step).seeds.tolist()


def test_prompt_loader_seeds_differ_between_steps_ranks_and_places():
    loaders = [prompt_loader([4] * 8, rank=rank, world_size=2, seed=9) for rank in range(2)]
    seeds = torch.stack([loader.batch(step).seeds for loader in loaders for step in range(3)])
    assert seeds.unique().numel() == 12
    assert seeds[3 + 2].tolist() == [mix_seed(9, 2, 2), mix_seed(9, 2, 3)]  # step 2, places 2 and 3 of the global batch


def test_prompt_loader_drops_and_counts_prompts_beyond_the_limit():
    loader = prompt_loader([3, 4, 5, 6, 7], limit=5 + TEMPLATE_TOKENS)
    assert loader.dropped == {"prompt_too_long": 2}
    answers = {a for step in range(40) for a in loader.batch(step).answers}
    assert answers == {"3", "4", "5"}
    assert prompt_loader([3, 4]).dropped == {}


@pytest.mark.parametrize("make", [prompt_loader, sft_loader])
def test_loader_refuses_fewer_rows_than_one_batch_on_every_rank(make):
    with pytest.raises(ConfigError, match="3 rows are usable .*, expected at least the 4.*prompts_per_step"):
        make([1, 2, 3], batch_size=2, world_size=2)
    with pytest.raises(ConfigError, match="1 rows are usable"):
        make([1, 99], batch_size=2)
    make([1, 2, 3, 4], batch_size=2, world_size=2)


def test_sft_batch_trains_completion_and_end_token_only():
    batch = sft_loader([2, 13], batch_size=2).batch(0)
    order = batch.lengths.argsort()
    for row, n in zip(order, (2, 13), strict=True):
        prompt = TOKENIZER.encode("User:" + " Tom" * n + " Assistant: <think>")
        target = [*TOKENIZER.encode(f"? </think> <answer> {n} </answer>"), TOKENIZER.eos_id]
        padding = batch.tokens.shape[1] - len(prompt) - len(target)
        assert batch.tokens[row].tolist() == prompt + target + [TOKENIZER.pad_id] * padding
        assert batch.loss_mask[row].tolist() == ([False] * len(prompt) + [True] * len(target) + [False] * padding)
        assert batch.lengths[row] == len(prompt) + len(target)


def test_rl_prompt_is_a_prefix_of_its_sft_example():
    prompts, examples = prompt_loader(range(1, 9)).batch(1), sft_loader(range(1, 9)).batch(1)
    for tokens, length, target, mask in zip(
        prompts.tokens, prompts.lengths, examples.tokens, examples.loss_mask, strict=True
    ):
        assert tokens[-length:].equal(target[:length])
        assert mask.nonzero()[0] == length


def test_sft_loader_drops_and_counts_what_does_not_fit_whole():
    longest = TEMPLATE_TOKENS + 3 + len("? </think> <answer> 3 </answer> <eos>".split())
    loader = sft_loader([1, 2, 3, 4, 5], limit=longest)
    assert loader.dropped == {"example_too_long": 2}
    for step in range(10):
        batch = loader.batch(step)
        last = batch.tokens[torch.arange(2), batch.lengths - 1]
        assert last.eq(TOKENIZER.eos_id).all()
        assert batch.lengths.max() <= longest


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_eval_loader_gives_every_row_once_on_any_number_of_ranks(world_size, batch_size):
    lengths = [3, 8, 5, 11, 2, 7, 13]
    ranks = [
        eval_batches(lengths, batch_size=batch_size, rank=r, world_size=world_size, seed=6) for r in range(world_size)
    ]
    counted = {}
    for batches in zip(*ranks, strict=True):  # the same number of batches on every rank
        assert len({len(batch) for batch, _ in batches}) == 1
        for batch, indices in batches:
            for index, answer, seed in zip(indices, batch.answers, batch.seeds.tolist(), strict=True):
                if index >= 0:
                    assert index not in counted
                    counted[index] = (int(answer), seed)
    assert counted == {i: (n, mix_seed(6, i)) for i, n in enumerate(lengths)}


def test_eval_loader_fills_up_with_real_prompts_that_are_marked():
    (batch, indices), *rest = eval_batches([3, 8, 5], rank=1, world_size=2)
    assert (indices, rest) == ([1, -1], [])
    assert batch.answers == ["8", "3"]


def test_eval_loader_indices_and_seeds_are_those_of_the_whole_data_set():
    ((batch, indices),) = eval_batches([3, 99, 5, 99, 4], batch_size=8, limit=20, seed=1)
    assert indices == [0, 2, 4]
    assert batch.answers == ["3", "5", "4"]
    assert batch.seeds.tolist() == [mix_seed(1, i) for i in (0, 2, 4)]


def test_eval_loader_counts_prompts_beyond_the_limit():
    loader = EvalLoader(
        made_dataset([3, 99, 5]),
        TOKENIZER,
        PROMPT,
        batch_size=2,
        max_prompt_tokens=20,
        rank=0,
        world_size=1,
        seed=0,
    )
    assert loader.dropped == {"prompt_too_long": 1}


def test_eval_loader_refuses_to_evaluate_nothing():
    with pytest.raises(ConfigError, match="0 usable rows"):
        eval_batches([99], limit=20)
