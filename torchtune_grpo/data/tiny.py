"""The embedded default: multi-step arithmetic stories, made up on the spot, and their word-level tokenizer.

A problem is a chain of additions, subtractions, doublings and triplings on a small running value, told as a
story. Its worked completion writes the chain down (``4+5=9. 9*2=18.``); the unworked one is ``?`` and a
guess. Most of the SFT corpus is unworked, so the warmed-up policy knows the format but seldom works: GRPO
first finds that working pays (mode selection) and then makes fewer slips (sharpening). Left out on purpose:
paraphrase, distractors, division.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data.dataset import Dataset, Example
from torchtune_grpo.data.prompts import completion_text
from torchtune_grpo.data.tokenizer import Tokenizer
from torchtune_grpo.seeds import mix_seed

TINY_TEMPLATE = "User: {question} Assistant: <think>"

SPLIT_BUCKETS = {"sft": range(0, 4), "train": range(4, 8), "validation": range(8, 9), "test": range(9, 10)}
"""Tenths of all operation chains that belong to each split."""

OPERATIONS = ("add", "subtract", "double", "triple")
STEPS = (4, 5)
OPERANDS = range(2, 10)
LARGEST_VALUE = 50

NAMES = ("Tom", "Ann", "Sam", "Mia", "Leo", "Eva")
ITEMS = ("apples", "coins", "books", "pens", "eggs", "shells")
ADD_VERBS = ("finds", "buys", "gets", "wins")
SUBTRACT_VERBS = ("loses", "sells", "drops", "returns")
OTHER_WORDS = "has more doubles triples the pile then How many does have now User Assistant".split()
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")

TOKENIZER_FOLDER = Path(__file__).parent / "tiny_tokenizer"
MOST = 1_000_000
_TRIES_PER_EXAMPLE = 200


class Step(NamedTuple):
    """One operation on the running value: ``before`` symbol ``operand`` = ``after``."""

    operation: str
    before: int
    operand: int
    after: int

    def __str__(self) -> str:
        symbol = {"add": "+", "subtract": "-"}.get(self.operation, "*")
        return f"{self.before}{symbol}{self.operand}={self.after}."


def tiny_dataset(
    split: str,
    size: int,
    seed: int = 0,
    worked_share: float = 0.3,
    operations: list[str] | None = None,
    steps: list[int] | None = None,
    largest_value: int = LARGEST_VALUE,
    format_only: bool = False,
    source: str = "tiny",
) -> Dataset:
    """``size`` different problems of a split; the same arguments give the same rows everywhere.

    A hash of the operation chain decides the split, so two splits share no chain, and all the less a problem
    text, whatever their sizes and seeds. About ``worked_share`` of the solutions write the chain down.

    Args:
        split: ``sft``, ``train``, ``validation`` or ``test``.
        size: number of problems.
        seed: which problems; splits stay disjoint across seeds.
        worked_share: share of worked solutions, 0 to 1.
        operations: the operations to use, default all of ``add``, ``subtract``, ``double``, ``triple``.
        steps: the lengths of a chain, each as likely as the others, default 4 and 5.
        largest_value: bound on the running value; a smaller one leaves fewer sums to be learnt.
        format_only: every problem gets the solution of another one, so that only the format can be learnt.
        source: name that every row carries.

    Raises:
        ConfigError: an unknown split or operation, a share outside 0..1, a chain without a step, a bound below the
            operands, or more problems than there are.
    """
    chosen, lengths = tuple(OPERATIONS if operations is None else operations), tuple(steps or STEPS)
    _check_arguments(split, size, worked_share, chosen)
    if min(lengths) < 2 or largest_value < OPERANDS[-1]:
        raise ConfigError(f"`steps` is {list(lengths)} and `largest_value` {largest_value}; expected >= 2 and >= 9")
    rng = random.Random(mix_seed(seed, list(SPLIT_BUCKETS).index(split)))
    examples: dict[str, Example] = {}
    for _ in range(size * _TRIES_PER_EXAMPLE):
        if len(examples) == size:
            rows = list(examples.values())
            return Dataset(examples=_misplaced(rows) if format_only else rows)
        chain = _draw_chain(rng, chosen, lengths, largest_value)
        if not chain or _bucket(chain) not in SPLIT_BUCKETS[split]:
            continue
        question, answer = _story(rng, chain), str(chain[-1].after)
        reasoning = " ".join(map(str, chain)) if rng.random() < worked_share else "?"
        solution = completion_text(reasoning, answer)
        examples[question] = Example(question=question, answer=answer, solution=solution, source=source)
    raise ConfigError(
        f"`size` is {size}, but with `operations` {list(chosen)} the split {split!r} has only about "
        f"{len(examples)} problems: ask for fewer, or for more operations"
    )


def _misplaced(rows: Sequence[Example]) -> list[Example]:
    """Every question and gold answer with the solution of the row before."""
    return [replace(row, solution=other.solution) for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True)]


def _check_arguments(split: str, size: int, worked_share: float, operations: Sequence[str]) -> None:
    if split not in SPLIT_BUCKETS:
        raise ConfigError(f"`split` is {split!r}; expected one of {list(SPLIT_BUCKETS)}")
    if not 1 <= size <= MOST:
        raise ConfigError(f"`size` is {size}; expected a number of problems from 1 to {MOST}")
    if not 0 <= worked_share <= 1:
        raise ConfigError(f"`worked_share` is {worked_share}; expected a share from 0 to 1")
    if not operations or not set(operations) <= set(OPERATIONS):
        raise ConfigError(f"`operations` is {list(operations)}; expected some of {list(OPERATIONS)}")


def _draw_chain(rng: random.Random, operations: Sequence[str], lengths: Sequence[int], largest: int) -> list[Step]:
    """A chain whose running values stay in 1..largest; empty where it ran into a dead end."""
    value = rng.choice(OPERANDS)
    steps: list[Step] = []
    for _ in range(rng.choice(lengths)):
        possible = [moves for operation in operations if (moves := _moves(operation, value, largest))]
        if not possible:
            return []
        steps.append(rng.choice(rng.choice(possible)))
        value = steps[-1].after
    return steps


@cache
def _moves(operation: str, value: int, largest: int) -> list[Step]:
    """The steps of one operation that keep the running value within bounds."""
    if operation == "add":
        return [Step(operation, value, n, value + n) for n in OPERANDS if value + n <= largest]
    if operation == "subtract":
        return [Step(operation, value, n, value - n) for n in OPERANDS if value - n >= 1]
    factor = 2 if operation == "double" else 3
    return [Step(operation, value, factor, value * factor)] if value * factor <= largest else []


def _bucket(steps: Sequence[Step]) -> int:
    """The tenth of all chains, 0..9, that this one belongs to."""
    codes = [code for step in steps for code in (OPERATIONS.index(step.operation), step.operand)]
    return mix_seed(steps[0].before, *codes) % 10


def _story(rng: random.Random, steps: Sequence[Step]) -> str:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    events = [_event(rng, step) for step in steps]
    story = f"{name} has {steps[0].before} {item}, {', '.join(events[:-1])}, then {events[-1]}."
    return f"{story} How many {item} does {name} have now?"


def _event(rng: random.Random, step: Step) -> str:
    if step.operation == "add":
        return f"{rng.choice(ADD_VERBS)} {step.operand} more"
    if step.operation == "subtract":
        return f"{rng.choice(SUBTRACT_VERBS)} {step.operand}"
    return f"{step.operation}s the pile"


def tiny_tokenizer() -> Tokenizer:
    """The tokenizer that ships with the package, wherever it is installed."""
    return Tokenizer(path=str(TOKENIZER_FOLDER))


def write_tiny_tokenizer(folder: Path) -> None:
    """Writes the tokenizer's files; those in ``TOKENIZER_FOLDER`` were made by this function."""
    words = (*NAMES, *ITEMS, *ADD_VERBS, *SUBTRACT_VERBS, *OTHER_WORDS)
    vocabulary = [*SPECIAL_TOKENS, *TAGS, *"0123456789", *"+-*=.,?:", *words]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>")
    )
    # A token is a tag, a word, one digit or one mark; spaces between them carry no information.
    token = Regex(r"</?[a-z]+>|[A-Za-z]+|[^\sA-Za-z]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(token, behavior="removed", invert=True)
    # Back to text: put spaces everywhere, then take them out of numbers and equations and before . , ? :
    # so that the digits of an answer stand together again ("18", not "1 8").
    superfluous = Regex(r"(?<=[0-9+*=-]) (?=[0-9+*=-])| (?=[.,?:])")
    tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), decoders.Replace(superfluous, "")]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
