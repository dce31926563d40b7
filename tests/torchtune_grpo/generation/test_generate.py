"""Generation on one process, against a float64 forward that has no cache, no padding and no batch."""

from dataclasses import replace

import pytest
import torch

from tests.torchtune_grpo.tiny_models import (
    KINDS,
    NO_STOP,
    VOCAB,
    dense_greedy,
    dense_logits,
    dense_logprobs,
    make_model,
    make_prompts,
    responses,
)
from torchtune_grpo.config import ConfigError
from torchtune_grpo.failures import RunError
from torchtune_grpo.generation import Generate
from torchtune_grpo.generation.decoding import EagerStep
from torchtune_grpo.logprobs import DenseLogprobs

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [11, 8, 9, 7]]
SOME_STOPS = (1, 4, 7)
EVERY_TOKEN = tuple(range(VOCAB))


def _greedy(max_new_tokens: int = 12, group_size: int = 1) -> Generate:
    return Generate(group_size=group_size, max_new_tokens=max_new_tokens, temperature=0.0)


def _sampled(max_new_tokens: int = 12, group_size: int = 4, temperature: float = 1.0) -> Generate:
    return Generate(group_size=group_size, max_new_tokens=max_new_tokens, temperature=temperature)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_equals_dense_recomputation(kind: str, tied: bool) -> None:
    model = make_model(kind, tied=tied)
    rollout = _greedy()(model, make_prompts(PROMPTS, stop_ids=SOME_STOPS))
    assert responses(rollout) == [dense_greedy(model, prompt, 12, SOME_STOPS) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_same_alone_in_a_batch_and_after_rows_retire(kind: str) -> None:
    model = make_model(kind)
    free = [dense_greedy(model, prompt, 12, NO_STOP) for prompt in PROMPTS]
    # A token that ends some rows before the last step, and not others.
    stop = next(t for t in range(VOCAB) if 1 <= sum(t in tokens[:8] for tokens in free) <= 2)
    together = _greedy()(model, make_prompts(PROMPTS, stop_ids=(stop,)))
    lengths = together.response_lengths.tolist()
    assert min(lengths) <= 8 < max(lengths)
    for row, prompt in enumerate(PROMPTS):
        alone = _greedy()(model, make_prompts([prompt], stop_ids=(stop,)))
        assert responses(alone)[0] == responses(together)[row]
        torch.testing.assert_close(alone.old_logprobs[0], together.old_logprobs[row, : lengths[row]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_dense_forward_and_training_forward(kind: str, temperature: float) -> None:
    model = make_model(kind)
    generate, batch = _sampled(temperature=temperature), make_prompts(PROMPTS, seeds=[5, 6, 7])
    free = generate(model, batch).responses.tolist()
    # The token whose first place differs most between rows.
    stop = max(range(VOCAB), key=lambda token: len({row.index(token) for row in free if token in row}))
    rollout = generate(model, replace(batch, stop_ids=(stop,)))
    assert len(set(rollout.response_lengths.tolist())) > 3  # rows retire at different steps
    expected = dense_logprobs(model, rollout, temperature).float()
    torch.testing.assert_close(rollout.old_logprobs, expected, atol=1e-5, rtol=0)
    trained = DenseLogprobs(temperature=temperature)(model, rollout)
    assert trained.requires_grad and trained.dtype == torch.float32
    torch.testing.assert_close(trained.detach(), expected, atol=1e-5, rtol=0)


def test_greedy_logprobs_are_at_temperature_one() -> None:
    model = make_model("gqa")
    rollout = _greedy()(model, make_prompts(PROMPTS))
    expected = dense_logprobs(model, rollout, 1.0).float()
    torch.testing.assert_close(rollout.old_logprobs, expected, atol=1e-5, rtol=0)


def test_responses_longer_than_the_cache_grows_at_a_time() -> None:
    model = make_model("gqa", max_seq_len=160)
    rollout = _greedy(max_new_tokens=140)(model, make_prompts(PROMPTS[:2]))
    torch.testing.assert_close(rollout.old_logprobs, dense_logprobs(model, rollout, 1.0).float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("pad_is_stop", [True, False])
def test_stop_token_belongs_to_the_response_and_padding_follows(pad_is_stop: bool) -> None:
    model = make_model("mha")
    free = [dense_greedy(model, prompt, 12, NO_STOP) for prompt in PROMPTS]
    stop = free[1][2]
    pad = stop if pad_is_stop else next(t for t in range(VOCAB) if t != stop)
    rollout = _greedy()(model, make_prompts(PROMPTS, pad_id=pad, stop_ids=(stop,)))
    for row, tokens in enumerate(free):
        length = tokens.index(stop) + 1 if stop in tokens else 12
        assert rollout.responses[row].tolist() == tokens[:length] + [pad] * (12 - length)
        assert rollout.response_mask[row].tolist() == [True] * length + [False] * (12 - length)
        assert bool(rollout.truncated[row]) == (stop not in tokens)
        assert rollout.old_logprobs[row, :length].abs().min() > 0
        assert rollout.old_logprobs[row, length:].abs().sum() == 0
    assert 1 < rollout.response_lengths[1] <= 3


def test_rollout_keeps_prompts_positions_and_labels() -> None:
    model = make_model("mha")
    batch = make_prompts([[7, 8, 9], [5]], pad_id=2)
    rollout = _sampled(max_new_tokens=2, group_size=2)(model, batch)
    assert rollout.tokens[:, :3].tolist() == [[7, 8, 9], [7, 8, 9], [2, 2, 5], [2, 2, 5]]
    assert rollout.positions.tolist() == [[0, 1, 2, 3, 4]] * 2 + [[0, 0, 0, 1, 2]] * 2
    assert rollout.prompt_lengths.tolist() == [3, 3, 1, 1]
    assert rollout.answers == ["answer 0", "answer 0", "answer 1", "answer 1"]
    assert rollout.source == ["source 0", "source 0", "source 1", "source 1"]
    assert rollout.group_size == 2
    assert rollout.groups.tolist() == [0, 0, 1, 1]


def test_several_stop_ids_each_end_a_row() -> None:
    model = make_model("mha")
    free = [dense_greedy(model, prompt, 12, NO_STOP) for prompt in PROMPTS]
    stops = (free[0][3], free[1][1])
    rollout = _greedy()(model, make_prompts(PROMPTS, stop_ids=stops))
    assert responses(rollout) == [dense_greedy(model, prompt, 12, stops) for prompt in PROMPTS]
    assert responses(rollout)[0][-1] in stops and responses(rollout)[1][-1] in stops


@pytest.mark.parametrize("group_size", [1, 4])
def test_every_row_may_stop_at_its_first_token(group_size: int) -> None:
    batch = make_prompts(PROMPTS, stop_ids=EVERY_TOKEN)
    rollout = _sampled(group_size=group_size)(make_model("mha"), batch)
    assert rollout.response_mask.tolist() == [[True]] * (3 * group_size)
    assert not rollout.truncated.any()


@pytest.mark.parametrize("stop_ids", [NO_STOP, EVERY_TOKEN])
def test_one_new_token(stop_ids: tuple[int, ...]) -> None:
    rollout = _sampled(max_new_tokens=1)(make_model("gqa"), make_prompts(PROMPTS, stop_ids=stop_ids))
    assert rollout.response_mask.tolist() == [[True]] * 12
    assert rollout.truncated.tolist() == [stop_ids == NO_STOP] * 12


def test_stop_at_the_length_limit_is_no_truncation() -> None:
    model = make_model("mha")
    stop = dense_greedy(model, PROMPTS[0], 1, NO_STOP)[0]
    rollout = _greedy(max_new_tokens=1)(model, make_prompts(PROMPTS[:1], stop_ids=(stop,)))
    assert rollout.truncated.tolist() == [False]


def test_completions_depend_on_their_seed_alone() -> None:
    model = make_model("gqa")
    batch = make_prompts([*PROMPTS, PROMPTS[0]], seeds=[5, 6, 7, 8], stop_ids=SOME_STOPS)
    together = responses(_sampled()(model, batch))
    for row, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        alone = _sampled()(model, make_prompts([prompt], seeds=[5 + row], stop_ids=SOME_STOPS))
        assert responses(alone) == together[4 * row : 4 * row + 4]
    assert together[:4] != together[12:]  # the same prompt with another seed
    assert len({tuple(response) for response in together[:4]}) > 1  # siblings


def test_first_tokens_follow_the_model(kind: str = "gqa") -> None:
    model = make_model(kind)
    batch = make_prompts([PROMPTS[0]] * 8, seeds=range(8))
    rollout = _sampled(max_new_tokens=1, group_size=256)(model, batch)
    counts = torch.bincount(rollout.responses[:, 0], minlength=VOCAB).double()
    expected = dense_logits(model, PROMPTS[0])[-1].softmax(dim=-1) * 2048
    likely = expected > 5
    statistic = ((counts - expected)[likely].square() / expected[likely]).sum()
    assert statistic < 2.5 * likely.sum()  # chi-square, mean = cells - 1


def test_sampling_leaves_the_generator_and_dropout_alone() -> None:
    model = make_model("mha").train()
    modes = []
    handle = model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: modes.append((module.training, torch.is_grad_enabled()))
    )
    before = torch.get_rng_state()
    _sampled(max_new_tokens=3)(model, make_prompts(PROMPTS))
    handle.remove()
    assert torch.equal(torch.get_rng_state(), before)
    assert modes == [(False, False)] * 3
    assert model.training
    _sampled(max_new_tokens=1)(model.eval(), make_prompts(PROMPTS))
    assert not model.training


@pytest.mark.parametrize("failing_forward", [1, 2])
def test_model_is_restored_after_an_error(failing_forward: int) -> None:
    model, calls = make_model("mha").train(), []
    before = dense_logits(model, PROMPTS[0])

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == failing_forward:
            raise RuntimeError("no memory")

    handle = model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        _sampled()(model, make_prompts(PROMPTS))
    handle.remove()
    attention = model.layers[0].attn
    assert attention.kv_cache is None and not attention.cache_enabled
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.training and torch.is_grad_enabled() and "unembed" not in vars(model)
    logits = model(torch.tensor(PROMPTS[:1]))[0]
    torch.testing.assert_close(logits.double(), before, atol=1e-4, rtol=0)
    logits.sum().backward()


def test_compacting_early_or_never_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gqa")
    batch = make_prompts(PROMPTS, seeds=[5, 6, 7], stop_ids=SOME_STOPS)
    usual = _sampled()(model, batch)
    for threshold in (0.0, 1.0):
        monkeypatch.setattr("torchtune_grpo.generation.decoding.COMPACT_BELOW", threshold)
        other = _sampled()(model, batch)
        assert torch.equal(other.tokens, usual.tokens)
        torch.testing.assert_close(other.old_logprobs, usual.old_logprobs, atol=1e-5, rtol=0)


def test_ended_rows_are_no_longer_computed() -> None:
    model, rows = make_model("mha"), []
    handle = model.tok_embeddings.register_forward_hook(lambda m, args, out: rows.append(len(out)))
    batch = make_prompts(PROMPTS, seeds=[5, 6, 7], stop_ids=SOME_STOPS)
    rollout = _sampled()(model, batch)
    handle.remove()
    alive_after = [int((rollout.response_lengths > step).sum()) for step in range(1, 12)]
    assert rows[0] == len(PROMPTS)  # a prompt is prefilled once, whatever its group's size
    for computed, alive in zip(rows[1:], alive_after, strict=False):
        assert alive <= computed <= max(alive / 0.875, 1)


def test_row_limits_end_rows_as_truncated() -> None:
    model, batch = make_model("gqa"), make_prompts(PROMPTS, seeds=[5, 6, 7])
    free = _sampled(group_size=2)(model, batch)
    limits = torch.tensor([1, 12, 3, 99, 5, 2])
    rollout = _sampled(group_size=2)(model, batch, row_limits=limits)
    assert rollout.response_lengths.tolist() == [1, 12, 3, 12, 5, 2]
    assert rollout.truncated.all()
    expected = [row[:limit] for row, limit in zip(responses(free), limits.tolist(), strict=True)]
    assert responses(rollout) == expected


def test_a_stop_token_at_the_row_limit_is_no_truncation() -> None:
    model = make_model("mha")
    stop = dense_greedy(model, PROMPTS[0], 1, NO_STOP)[0]
    batch = make_prompts([PROMPTS[0]] * 2, stop_ids=(stop,))
    rollout = _greedy()(model, batch, row_limits=torch.tensor([1, 5]))
    assert rollout.response_lengths.tolist() == [1, 1] and not rollout.truncated.any()


def test_long_prompts_leave_their_completions_less_room() -> None:
    generate = replace(_greedy(max_new_tokens=6), max_total_tokens=9)
    rollout = generate(make_model("gqa"), make_prompts(PROMPTS))
    assert rollout.response_lengths.tolist() == [2, 6, 5]
    assert generate.longest(8) == 9 and generate.longest(2) == 8
    with pytest.raises(ConfigError, match="max_total_tokens: got 9, expected more than the 9"):
        generate.longest(9)
    with pytest.raises(ValueError, match="may have 0 tokens"):
        generate(make_model("gqa"), make_prompts([list(range(9))]))


@pytest.mark.parametrize(
    ("budget", "prefills"), [(1, [1, 1, 1]), (109, [1, 2]), (110, [2, 1]), (164, [2, 1]), (165, [3])]
)
def test_a_batch_beyond_the_budget_is_sampled_in_parts_of_whole_groups(budget: int, prefills: list[int]) -> None:
    """Prompts of 7, 2 and 4 tokens, padded to the longest of a part; 4 completions of 12."""
    model, batch = make_model("gqa"), make_prompts(PROMPTS, seeds=[5, 6, 7], stop_ids=SOME_STOPS)
    usual, calls = _sampled()(model, batch), []
    handle = model.tok_embeddings.register_forward_hook(lambda m, args, out: calls.append(tuple(out.shape[:2])))
    parts = replace(_sampled(), max_cached_tokens=budget)(model, batch)
    handle.remove()
    assert [rows for rows, width in calls if width > 1] == prefills
    assert torch.equal(parts.tokens, usual.tokens) and torch.equal(parts.response_mask, usual.response_mask)
    torch.testing.assert_close(parts.old_logprobs, usual.old_logprobs, atol=1e-5, rtol=0)
    assert parts.answers == usual.answers and parts.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (parts.cache_bytes < usual.cache_bytes) == (len(prefills) > 1)


def test_cache_bytes_count_a_prompt_once_and_the_tokens_allocated() -> None:
    """2 layers, keys and values, 2 KV heads of 8 numbers of 4 bytes."""
    token = 2 * 2 * 2 * 8 * 4
    model, batch = make_model("gqa", max_seq_len=160), make_prompts([PROMPTS[0]] * 3)
    assert _sampled(max_new_tokens=10)(model, batch).cache_bytes == token * 3 * (7 + 4 * 10)
    assert _sampled(max_new_tokens=100)(model, batch).cache_bytes == token * 3 * (7 + 4 * 100)
    stopped = replace(batch, stop_ids=EVERY_TOKEN)
    assert _sampled(max_new_tokens=100)(model, stopped).cache_bytes == token * 3 * 7


def test_cuda_graphs_are_refused_without_cuda_and_with_sharded_parameters() -> None:
    with pytest.raises(ConfigError, match="cuda_graphs: got true on device cpu"):
        replace(_sampled(), cuda_graphs=True)(make_model("mha"), make_prompts(PROMPTS))
    with pytest.raises(ConfigError, match="gather_parameters true"):
        replace(_sampled(), cuda_graphs=True, gather_parameters=False)


def test_decoding_with_fixed_shapes_samples_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph captures: the same kernels every token, over all that is allocated."""
    model, batch = make_model("gqa", max_seq_len=160), make_prompts(PROMPTS, seeds=[5, 6, 7], stop_ids=(1, 4))
    usual = _sampled(max_new_tokens=100)(model, batch)
    assert int(usual.response_lengths.max()) > 16
    monkeypatch.setattr(EagerStep, "fixed_shapes", True)
    fixed = _sampled(max_new_tokens=100)(model, batch)
    assert torch.equal(fixed.tokens, usual.tokens)
    torch.testing.assert_close(fixed.old_logprobs, usual.old_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", 0),
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.5),
        ("max_total_tokens", 1),
        ("max_cached_tokens", 0),
    ],
)
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"generate.{key}"):
        replace(_sampled(), **{key: value})


def test_rollouts_are_ordinary_tensors_without_gradient() -> None:
    rollout = _sampled()(make_model("gqa"), make_prompts(PROMPTS))
    for tensor in (rollout.tokens, rollout.old_logprobs, rollout.response_mask, rollout.positions):
        assert not tensor.is_inference() and not tensor.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_models_sample_near_a_dense_forward(kind: str) -> None:
    model = make_model(kind).bfloat16()
    rollout = _sampled()(model, make_prompts(PROMPTS))
    # bf16 rounds to 2^-9; logits of a few units, two layers
    torch.testing.assert_close(rollout.old_logprobs, dense_logprobs(model, rollout, 1.0).float(), atol=0.15, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(temperature: float) -> None:
    model = make_model("mha")
    with torch.no_grad():
        model.norm.scale.fill_(torch.nan)
    with pytest.raises(RunError, match="logits are not finite"):
        _sampled(temperature=temperature)(model, make_prompts(PROMPTS))


def test_on_policy_says_whether_ratios_hold() -> None:
    assert _sampled().on_policy and _sampled(temperature=0.7).on_policy
    assert not _greedy().on_policy
    for setting in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert not replace(_sampled(), **setting).on_policy


def test_top_k_of_one_is_greedy() -> None:
    model, batch = make_model("gqa"), make_prompts(PROMPTS, seeds=[5, 6, 7], stop_ids=SOME_STOPS)
    sampled = replace(_sampled(group_size=1), top_k=1)(model, batch)
    assert torch.equal(sampled.tokens, _greedy()(model, batch).tokens)
