"""Tables from tensors that a loader has already mapped, without a copy and without their path.

Servers load weights through their own loaders, which hand out views into mapped files one by one.
[`ViewLoader`][engram.views.ViewLoader] collects those that belong to a table and, once the loader
is through, traces each to its file:

```python
loader = engram.ViewLoader(model_config)
for name, tensor in weights:  # e.g. from safetensors.safe_open(...).get_tensor
    loader.add(name, tensor)
table = loader.bind()  # an engram.FileGather
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram import _engram
from engram._errors import placed
from engram._views import described, expectation, open_views
from engram.gather import FileGather

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engram.gather import Advice, Io

__all__ = ["ViewLoader"]


class ViewLoader:
    """Collects the zero-copy views of a table that a loader hands out, and opens their files.

    Views may come in any order and in any number of calls, weights and scales alike; names may have
    the segment `language_model.` or not. The views are kept until `bind`, so that their mappings
    stay; they are never read as a whole.

    Args:
        config_or_num_rows: What says how many rows the table has, padding rows included: the number
            itself, or the model's configuration (a transformers configuration, vLLM's
            `ModelConfig`, the content of a `config.json` as a mapping, or its path). Without it a
            piece that the loader left out could go unnoticed.

    Raises:
        TypeError: Neither of these.
        ValueError: A number of rows below 1.
        FileNotFoundError: There is no such configuration file.
    """

    def __init__(self, config_or_num_rows: Any) -> None:
        self._expected = expectation(config_or_num_rows)
        self._views: dict[str, Any] = {}
        self._seen: dict[str, str] = {}
        self._others = 0
        self._bound: set[str] = set()

    def add(self, name: str, tensor: Any) -> bool:
        """Keeps a view, if its name says that it belongs to an n-gram or per-layer table.

        Args:
            name: The tensor's name in the checkpoint; a loader may have dropped
                `language_model.` from it.
            tensor: A CPU torch tensor or a NumPy array whose memory is mapped from a file, e.g.
                what `safetensors.safe_open(...).get_tensor(name)` gives for torch.

        Returns:
            Whether the tensor belongs to a table and was kept.

        Raises:
            RuntimeError: `bind` was called: weights cannot be loaded again into an open table.
            ValueError: A tensor of that name was added before, or it is not contiguous.
            TypeError: Not a tensor in host memory, or of an element type safetensors has not.
        """
        if self._bound:
            raise placed(
                RuntimeError(
                    f"cannot add {name!r}: the table is bound to its files already. Weights are "
                    "loaded once; open a new table to serve other files"
                )
            )
        if _engram.table_of(name) is None:
            self._others += 1
            return False
        plain = name.replace("language_model.", "")
        if plain in self._seen:
            raise placed(ValueError(f"tensor {name!r} was added before, as {self._seen[plain]!r}"))
        described(name, tensor)  # What cannot be bound is refused where it comes from.
        self._seen[plain] = name
        self._views[name] = tensor
        return True

    def bind(
        self,
        table: str | int | None = None,
        *,
        io: Io = "auto",
        threads: int | None = None,
        advice: Advice = "auto",
        max_mapped_bytes: int | str | None = None,
    ) -> FileGather:
        """Traces every view to its file, checks that the table is whole, and opens it.

        Each view's memory must be mapped from a file, as `/proc/self/maps` has it, and agree with
        the file; every piece, scale and bias must be there, and the pieces must make up exactly the
        expected number of rows. On success the views are let go.

        Args:
            table: Which table, where views of several were added: its name, or its place in layer
                order.
            io: As for `FileGather`.
            threads: As for `FileGather`.
            advice: As for `FileGather`.
            max_mapped_bytes: As for `FileGather`.

        Returns:
            The open table.

        Raises:
            ValueError: No view, or views of several tables, were added; or a tensor's memory is
                the heap, pinned, anonymous or shared memory, or a deleted file. It is named with
                what backs it.
            CheckpointError: Pieces or scales are missing or contradict each other or the number of
                rows, or a view differs from its file.
            RuntimeError: The table was bound before.
            OSError: A file cannot be opened.
        """
        if not self._views and self._bound:
            raise placed(RuntimeError("the table is bound already; weights are loaded once"))
        native = open_views(
            self._views,
            self._others,
            self._expected,
            table,
            io=io,
            threads=threads,
            advice=advice,
            max_mapped_bytes=max_mapped_bytes,
        )
        gather = FileGather._over(native)  # pyright: ignore[reportPrivateUsage]
        if gather.info.name in self._bound:
            raise placed(RuntimeError(f"table {gather.info.name!r} is bound already"))
        self._bound.add(gather.info.name)
        remaining = {_table_key(name) for name in self._views} - {
            _plain(name) for name in self._bound
        }
        self._views = {
            name: tensor for name, tensor in self._views.items() if _table_key(name) in remaining
        }
        return gather

    def items(self) -> Iterator[tuple[str, Any]]:
        """Names and tensors of the views kept and not yet bound."""
        return iter(self._views.items())

    def __len__(self) -> int:
        """Views kept and not yet bound."""
        return len(self._views)

    def __repr__(self) -> str:
        state = f", bound {sorted(self._bound)}" if self._bound else ""
        return f"<engram.ViewLoader of {len(self._views)} views{state}>"


def _plain(name: str) -> str:
    return name.replace("language_model.", "")


def _table_key(name: str) -> str:
    return _plain(_engram.table_of(name) or "")
