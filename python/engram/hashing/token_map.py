"""DeepSeek's compressed token map: tokens whose text normalises to the same string share one id."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engram._errors import placed

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["compressed_token_map", "token_map_checksum"]

_REPLACEMENT = "\ufffd"
# Stands for a text of one space while blanks are stripped; from the private use area.
_KEPT_SPACE = "\ue000"


def compressed_token_map(tokenizer: Any) -> NDArray[np.int32]:
    """The compressed id of every token, as DeepSeek-V4.1's reference code numbers them.

    Token by token, in the order of their ids: the text that the token decodes to, normalised (NFKC,
    accents stripped, lower case, runs of blanks as one space, stripped), is looked up among those
    seen before; a new one takes the next number. A text that normalises to nothing stands for
    itself; a token that is no text of its own (its bytes are part of a character) goes by its name
    in the vocabulary.

    Args:
        tokenizer: Path of a `tokenizer.json` or of the directory that holds it, a
            `tokenizers.Tokenizer`, or a transformers tokenizer with one inside.

    Returns:
        int32 `[len(tokenizer)]`, added tokens included.

    Raises:
        FileNotFoundError: There is no `tokenizer.json`.
        ImportError: The `tokenizers` package is not installed.
    """
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ImportError(
            "DeepSeek's token map is built with the tokenizers package: "
            "pip install 'engram-gather[tokenizers]'"
        ) from error

    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise placed(
                FileNotFoundError(
                    2,
                    "DeepSeek hashes compressed token ids, which are numbered from the tokenizer; "
                    "no such file",
                    str(file),
                ),
                path=str(file),
            )
        backend: Any = tokenizers.Tokenizer.from_file(str(file))
    else:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)

    normalizers, regex = tokenizers.normalizers, tokenizers.Regex
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(regex(r"^ $"), _KEPT_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_KEPT_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    compressed: list[int] = []
    for token in range(backend.get_vocab_size(with_added_tokens=True)):
        text: str = backend.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key: str = backend.id_to_token(token)
        else:
            key = normalizer.normalize_str(text) or text
        compressed.append(numbers.setdefault(key, len(numbers)))
    return np.array(compressed, np.int32)


def token_map_checksum(token_map: NDArray[Any]) -> str:
    """SHA-256, in hexadecimal, of the map as little-endian int64."""
    return hashlib.sha256(token_map.astype("<i8").tobytes()).hexdigest()
