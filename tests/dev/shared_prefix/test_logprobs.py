"""Shared-prefix execution against dense execution: values and the gradient of every parameter.

torchtune's norms, rotary embeddings and heads compute in fp32 by calling ``Tensor.float``; the tests in float64 leave
that call without effect, so that nothing on either side is rounded to fp32.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from dev.shared_prefix import FlexBackend, SharedPrefixLogprobs
from dev.shared_prefix.attention import VarlenPattern
from dev.shared_prefix.logprobs import layout_of
from tests.dev.shared_prefix.rollouts import (
    SHAPES,
    dense_rows,
    gradients,
    relative_error,
    shared_rollout,
    worst_error,
)
from tests.dev.shared_prefix.test_attention import plain_kernel
from tests.torchtune_grpo.tiny_models import KINDS, VOCAB, dense_logprobs, make_model, make_prompts
from torchtune_grpo.generation import Generate
from torchtune_grpo.logprobs import DenseLogprobs, FullSoftmaxHead
from torchtune_grpo.old_logprobs import score

TEMPERATURE = 0.7


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else convert(x))


def _checkpointed(model: nn.Module) -> nn.Module:
    set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    return model


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_dense_execution_in_float64(
    kind: str, tied: bool, checkpointing: bool, shape: str
) -> None:
    rollout = shared_rollout(*SHAPES[shape])
    model = make_model(kind, tied=tied).double()
    dense = dense_rows(model, rollout, TEMPERATURE)
    expected = gradients(dense, rollout, model)
    if checkpointing:
        model = _checkpointed(model)
    compact = SharedPrefixLogprobs(temperature=TEMPERATURE)(model, rollout)
    assert compact.dtype == torch.float64
    assert relative_error(compact, dense) <= 1e-10
    assert worst_error(gradients(compact, rollout, model), expected) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_dense_execution_in_fp32(kind: str) -> None:
    rollout, model = shared_rollout(*SHAPES["uneven groups"]), make_model(kind)
    compact, dense = (
        SharedPrefixLogprobs(temperature=TEMPERATURE)(model, rollout),
        dense_rows(model, rollout, TEMPERATURE),
    )
    assert compact.dtype == torch.float32
    assert relative_error(compact, dense) <= 1e-5
    assert worst_error(gradients(compact, rollout, model), gradients(dense, rollout, model)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_a_float64_forward_written_out_by_hand(kind: str) -> None:
    rollout, model = shared_rollout(*SHAPES["interleaved"]), make_model(kind)
    expected = dense_logprobs(model, rollout, TEMPERATURE).float()
    actual = SharedPrefixLogprobs(temperature=TEMPERATURE)(model, rollout)
    torch.testing.assert_close(actual.detach(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_near_to_the_truth_as_dense_bf16(kind: str) -> None:
    """Both arms round every activation to 8 bits, each in its own order; neither may be systematically worse.

    Compact execution has fewer roundings of a prompt's gradient (one sum in fp32 for G sums of rounded parameter
    gradients), attention in other blocks: 1.5 times dense's own error leaves room for chance alone.
    """
    rollout, model = shared_rollout(*SHAPES["uneven groups"]), make_model(kind)
    truth = dense_rows(model, rollout)
    true_gradients = gradients(truth, rollout, model)
    half = make_model(kind).bfloat16()
    dense, compact = dense_rows(half, rollout), SharedPrefixLogprobs()(half, rollout)
    assert compact.dtype == torch.float32
    assert relative_error(compact, truth) <= 1.5 * relative_error(dense, truth)

    def mean_error(logprobs: Tensor) -> float:
        found = gradients(logprobs, rollout, half)
        return sum(relative_error(found[name], true_gradients[name]) for name in found) / len(found)

    assert mean_error(compact) <= 1.5 * mean_error(dense)


@pytest.mark.usefixtures("in_float64")
def test_parameters_after_an_optimizer_step_equal_those_of_dense_execution() -> None:
    rollout = shared_rollout(*SHAPES["uneven groups"])
    stepped: list[dict[str, Tensor]] = []
    for logprobs_fn in (SharedPrefixLogprobs(), dense_rows):
        model = make_model("gqa").double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for name, gradient in gradients(logprobs_fn(model, rollout), rollout, model).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
        stepped.append(dict(model.named_parameters()))
    before = dict(make_model("gqa").double().named_parameters())
    assert all(relative_error(before[name], stepped[1][name]) > 1e-4 for name in before)
    assert worst_error(stepped[0], stepped[1]) <= 1e-10


@pytest.mark.usefixtures("in_float64")
def test_group_split_over_micro_batches_gives_the_gradient_of_the_whole() -> None:
    rollout = shared_rollout(*SHAPES["uneven groups"])
    model = make_model("qwen2").double()
    expected = gradients(dense_rows(model, rollout), rollout, model)
    total = {name: torch.zeros_like(value) for name, value in expected.items()}
    logprobs_fn = SharedPrefixLogprobs()
    planned = logprobs_fn.plan(rollout, max_tokens=10)
    groups = [set(rollout.groups[rows].tolist()) for rows in planned]
    # 3 + 2, 5 + 4 + 1 + 3 and 1 + 5 + 2 tokens: the second group alone does not fit
    assert sum(1 in of_part for of_part in groups) == 2
    for rows in planned:
        part = rollout.rows(rows)
        assert layout_of(part).num_tokens <= 10
        found = gradients(logprobs_fn(model, part), rollout, model, rows.tolist())
        total = {name: total[name] + found[name] for name in total}
    assert worst_error(total, expected) <= 1e-10


@pytest.mark.usefixtures("in_float64")
def test_varlen_pattern_in_the_model_equals_dense_execution() -> None:
    rollout, model = shared_rollout(*SHAPES["interleaved"]), make_model("gqa").double()
    compact = SharedPrefixLogprobs(backend=lambda layout: VarlenPattern(layout, plain_kernel))(model, rollout)
    dense = dense_rows(model, rollout)
    assert relative_error(compact, dense) <= 1e-10
    assert worst_error(gradients(compact, rollout, model), gradients(dense, rollout, model)) <= 1e-10


def test_flex_backend_in_the_model_equals_dense_execution() -> None:
    rollout, model = shared_rollout(*SHAPES["interleaved"]), make_model("gqa")
    with torch.no_grad():
        assert (
            relative_error(SharedPrefixLogprobs(backend=FlexBackend())(model, rollout), dense_rows(model, rollout))
            <= 1e-5
        )


def test_padding_and_old_logprobs_have_no_effect() -> None:
    model, tight = make_model("mha"), shared_rollout(*SHAPES["interleaved"], extra=0)
    wide = shared_rollout(*SHAPES["interleaved"], extra=3)
    real = torch.zeros_like(wide.tokens, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(*SHAPES["interleaved"][:2], strict=True)):
        start = wide.prompt_width - prompt
        real[row, start : wide.prompt_width + response] = True
        ours = tight.tokens[row, tight.prompt_width - prompt : tight.prompt_width + response]
        wide.tokens[row, start : wide.prompt_width + response] = ours
    wide = replace(
        wide,
        tokens=wide.tokens.masked_fill(~real, VOCAB - 1),
        old_logprobs=torch.full_like(wide.old_logprobs, torch.nan),
    )
    expected = SharedPrefixLogprobs()(model, tight)
    actual = SharedPrefixLogprobs()(model, wide)
    assert torch.equal(actual[:, : expected.shape[1]], expected)
    assert not actual[~wide.response_mask].any()


@dataclass(frozen=True, kw_only=True)
class _CountingHead:
    seen: list[int]
    targets: list[int]

    def __call__(self, model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        self.seen.append(len(hidden))
        self.targets.extend(targets.tolist())
        return FullSoftmaxHead()(model, hidden, targets, temperature)


def test_model_runs_on_the_compact_tokens_and_the_head_on_response_tokens_row_after_row() -> None:
    head = _CountingHead(seen=[], targets=[])
    model, rollout = make_model("mha"), shared_rollout([3, 2, 3, 2], [2, 3, 1, 2], [7, 9, 7, 9])
    model.layers[0].mlp.register_forward_hook(lambda module, arguments, output: head.seen.append(output.shape[1]))
    SharedPrefixLogprobs(head=head)(model, rollout)
    assert head.seen == [13, 8]
    assert head.targets == rollout.responses[rollout.response_mask].tolist()


def test_more_compact_tokens_than_positions_are_no_fault() -> None:
    model = make_model("gqa", max_seq_len=9)
    rollout = shared_rollout([4] * 6, [5, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1])  # 28 tokens, rows of at most 9
    assert relative_error(SharedPrefixLogprobs()(model, rollout), dense_rows(model, rollout)) <= 1e-5
    assert model.max_seq_len == 9


def test_dense_forwards_and_generation_of_the_same_model_stay_as_they_were() -> None:
    model, rollout = make_model("gqa"), shared_rollout(*SHAPES["uneven groups"])
    mask = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    prompts, generate = make_prompts([[1, 2], [3, 4, 5]]), Generate(group_size=2, max_new_tokens=4)

    def outputs() -> list[Tensor]:
        ids = torch.tensor([[1, 2, 3]])
        sampled = generate(model, prompts)
        masked = model(ids, mask=mask, input_pos=torch.arange(3)[None])
        return [model(ids), masked, DenseLogprobs()(model, rollout), sampled.tokens, sampled.old_logprobs]

    before = outputs()
    SharedPrefixLogprobs()(model, rollout)
    SharedPrefixLogprobs()(model, rollout)
    for one, other in zip(before, outputs(), strict=True):
        assert torch.equal(one, other)


def test_score_takes_it_for_reference_and_old_logprobs() -> None:
    model, rollout = make_model("gqa"), shared_rollout(*SHAPES["equal lengths"], extra=1)
    rollout = replace(rollout, group_size=4)
    shared, dense = (score(model, rollout, fn, max_tokens=100) for fn in (SharedPrefixLogprobs(), DenseLogprobs()))
    torch.testing.assert_close(shared, dense, atol=1e-5, rtol=0)
    assert shared.any() and not shared.requires_grad
