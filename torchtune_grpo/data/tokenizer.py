"""The tokenizer of a Hugging Face model folder, read with the ``tokenizers`` library alone."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from torchtune_grpo.config import ConfigError

_EXPORTED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class Tokenizer:
    """Text to ids and back, and the ids that generation and padding need.

    Attributes:
        vocab_size: largest id + 1; a model's embedding may be padded to more.
        bos_id: the begin token, or None where the tokenizer has none.
        eos_id: the end token that SFT targets end with.
        stop_ids: every id that ends a completion, ``eos_id`` first (Llama 3 Instruct has three).
        pad_id: the tokenizer's padding token, else ``eos_id``. It may occur inside prompts: masks must come
            from lengths, never from ``ids != pad_id``.
        files: the folder's tokenizer files, to be copied beside exported weights.

    Args:
        path: folder with ``tokenizer.json`` and, where the model has them, ``tokenizer_config.json``,
            ``generation_config.json`` and ``config.json``.
        stop_tokens: further tokens that end a completion, by their text.

    Raises:
        ConfigError: files missing or unreadable, no end token named by any of them, or an unknown stop token.
    """

    def __init__(self, *, path: str, stop_tokens: list[str] | None = None) -> None:
        folder = Path(path).expanduser().absolute()
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"`tokenizer.path` is {path!r}; expected a folder that holds tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"`tokenizer.path`: cannot read {folder / 'tokenizer.json'}: {error}") from error
        # A file saved after training with padding or truncation switched on would apply them to every text.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.files = [folder / name for name in _EXPORTED_FILES if (folder / name).is_file()]
        if not self.vocabulary:
            raise ConfigError(f"`tokenizer.path`: {folder / 'tokenizer.json'} holds no token")
        self.vocab_size = max(self.vocabulary.values()) + 1
        self._read_special_tokens(folder, stop_tokens or [])
        with_specials = self._tokenizer.encode("", add_special_tokens=True).ids
        self._adds_bos = self.bos_id is not None and self.bos_id in with_specials

    def _read_special_tokens(self, folder: Path, stop_tokens: Sequence[str]) -> None:
        names = _read_json(folder / "tokenizer_config.json")
        model, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
        # tokenizer_config.json has the last word, also when it says null: Qwen's config.json names a begin
        # token that its tokenizer does not use.
        bos = [names["bos_token"]] if "bos_token" in names else _as_list(model.get("bos_token_id"))
        self.bos_id = next(iter(self._ids(bos)), None)
        pad_id = next(iter(self._ids([names.get("pad_token")])), None)
        stop_ids = self._ids(
            [
                names.get("eos_token"),
                *_as_list(generation.get("eos_token_id")),
                *_as_list(model.get("eos_token_id")),
            ]
        )
        if not stop_ids:
            raise ConfigError(
                f"`tokenizer.path`: none of tokenizer_config.json (eos_token), generation_config.json and "
                f"config.json (eos_token_id) in {folder} names an end token of the vocabulary"
            )
        unknown = [token for token in stop_tokens if self._tokenizer.token_to_id(token) is None]
        if unknown:
            raise ConfigError(f"`tokenizer.stop_tokens` has {unknown}; expected tokens of the vocabulary in {folder}")
        self.eos_id = stop_ids[0]
        self.stop_ids = tuple(dict.fromkeys([*stop_ids, *self._ids(stop_tokens)]))
        self.pad_id = self.eos_id if pad_id is None else pad_id

    def _ids(self, tokens: Iterable[Any]) -> list[int]:
        """Ids of tokens given as text, saved AddedToken or id; what the vocabulary lacks is left out."""
        ids = []
        for token in tokens:
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str | int | None) or (isinstance(token, dict) and text is None):
                raise ConfigError(f"`tokenizer.path`: got the special token {token!r}, expected a text or an id")
            ids.append(self._tokenizer.token_to_id(text) if isinstance(text, str) else text)
        return [i for i in ids if i is not None and 0 <= i < self.vocab_size]

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token with its id."""
        return self._tokenizer.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; nothing is added. Special tokens written out in ``text`` count as such."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of ``text`` with exactly one begin token in front if this tokenizer's own rules add one."""
        ids = self.encode(text)
        if self._adds_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``; ids that the vocabulary lacks (a padded embedding has such) give nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"`tokenizer.path`: {path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"`tokenizer.path`: {path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _as_list(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [ids]
