"""Small models over the tiny tokenizer, in memory and as folders, and rows of several teachers for them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from tests.torchtune_grpo.builders import make_rollout
from tests.torchtune_grpo.tiny_models import dense_logits
from torchtune_grpo.data.tiny import TOKENIZER_FOLDER
from torchtune_grpo.distillation.heads import TeacherHeads
from torchtune_grpo.distillation.payloads import DistillationTrajectory
from torchtune_grpo.distillation.projection import TeacherSide
from torchtune_grpo.distillation.vocabulary_parallel import HeadGroup
from torchtune_grpo.models import tiny_llama
from torchtune_grpo.models.weights import scratch_hf_config, write_hf_folder
from torchtune_grpo.types import Rollout

VOCAB = 59
SIZES = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "intermediate_dim": 24, "max_seq_len": 64}
WIDER = {"num_layers": 2, "embed_dim": 24}
ROW_TEACHERS = (1, 0, 1, 1)


def make_small(seed: int, **changes: int) -> TransformerDecoder:
    """Random weights large enough for distributions far from uniform."""
    torch.manual_seed(seed)
    model = tiny_llama(**({"vocab_size": VOCAB} | SIZES | changes))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return model


def node(folder: Path, **changes: object) -> dict[str, object]:
    """The config node of a teacher in ``folder``."""
    model = {"_component_": "torchtune_grpo.models.tiny_llama", "vocab_size": VOCAB} | SIZES
    widths = {k: v for k, v in changes.items() if k in model}
    rest = {k: v for k, v in changes.items() if k not in model}
    teacher = {"_component_": "torchtune_grpo.distillation.Teacher", "weights": str(folder), "dtype": "fp32"}
    return teacher | {"model": model | widths} | rest


def save_small(folder: Path, model: TransformerDecoder) -> Path:
    """The model as a Hugging Face folder with the tiny tokenizer."""
    config = scratch_hf_config(model, bos_id=None, eos_id=1, pad_id=0)
    write_hf_folder(folder, model.state_dict(), config, torch.float32)
    for file in TOKENIZER_FOLDER.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def two_teachers(folder: Path) -> list[TransformerDecoder]:
    """Two that differ in seed, width and depth, saved as ``folder/0`` and ``folder/1``."""
    models = [make_small(1), make_small(2, **WIDER)]
    for i, model in enumerate(models):
        save_small(folder / str(i), model)
    return models


def make_rows(seed: int = 3) -> Rollout:
    """Four rows of uneven length, to be split among two teachers in the order of ``ROW_TEACHERS``."""
    return make_rollout([3, 1, 5, 2], prompt_lengths=[1, 4, 2, 3], extra=1, seed=seed)


def response_logits(model: TransformerDecoder, rollout: Rollout, row: int) -> Tensor:
    """Logits ``[length, V]`` in float64 that predict a row's response, from the weights alone."""
    prompt, length = int(rollout.prompt_lengths[row]), int(rollout.response_lengths[row])
    start = rollout.prompt_width - prompt
    return dense_logits(model, rollout.tokens[row, start : start + prompt + length].tolist())[prompt - 1 : -1]


def response_states(model: TransformerDecoder, rollout: Rollout, row: int) -> Tensor:
    """What the LM head reads ``[length, D]`` fp32 where a row's response is predicted, by torchtune's own forward."""
    prompt, length = int(rollout.prompt_lengths[row]), int(rollout.response_lengths[row])
    start = rollout.prompt_width - prompt
    states: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda module, args, output: states.append(output))
    with torch.no_grad():
        model(rollout.tokens[None, row, start : start + prompt + length])
    hook.remove()
    return states[0][0, prompt - 1 : -1]


def make_distillation(
    rollout: Rollout,
    teachers: Sequence[TransformerDecoder],
    *,
    row_teachers: Sequence[int] = ROW_TEACHERS,
    kind: str = "hidden",
    weights: Tensor | None = None,
) -> DistillationTrajectory:
    """The rows with their teachers' payloads, worked out row by row; ``row_teachers`` also are the sources."""
    payload = []
    for row, number in enumerate(row_teachers):
        states = response_states(teachers[number], rollout, row)
        payload.append(states if kind == "hidden" else states @ teachers[number].tok_embeddings.weight.detach().T)
    mask = rollout.response_mask
    return DistillationTrajectory(
        rollout=rollout,
        advantages=torch.zeros(mask.shape),
        ref_logprobs=torch.zeros(mask.shape),
        token_weights=mask.float() if weights is None else weights,
        teacher_index=torch.tensor(row_teachers),
        payload=payload,
    )


def make_side(
    folder: Path, widths: Sequence[int], *, kind: str = "hidden", vocabulary: HeadGroup | None = None
) -> TeacherSide:
    """The student's side of the teachers saved in ``folder``."""
    vocabulary = vocabulary or HeadGroup(start=0, stop=VOCAB, group=None)
    heads = None
    if kind == "hidden":
        heads = TeacherHeads(
            [str(folder / str(i)) for i in range(len(widths))],
            widths,
            dtype=torch.float32,
            start=vocabulary.start,
            stop=vocabulary.stop,
            device=torch.device("cpu"),
            lifecycle="keep",
        )
    else:
        widths = [VOCAB] * len(widths)
    names = [f"t{i}" for i in range(len(widths))]
    return TeacherSide(names=names, widths=widths, dtype=torch.float32, heads=heads, vocabulary=vocabulary)
