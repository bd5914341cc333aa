"""Several tables, gathered in one round of reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from engram import _engram
from engram._arguments import out_of_range, path_text
from engram._errors import complete, placed
from engram._notices import failed
from engram.gather import FileGather
from engram.table import tables
from engram.ticket import Ticket, submit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from engram.gather import Io, Request


def _require_gathers(gathers: object) -> list[FileGather]:
    one = not isinstance(gathers, Iterable)
    several: list[Any] = [gathers] if one else list(cast("Iterable[Any]", gathers))
    for gather in several:
        if not isinstance(gather, FileGather):
            kind = type(gather).__name__
            raise placed(TypeError(f"a TableSet is made of a path or FileGathers, not {kind}"))
    return several


def _require_mapping(what: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise placed(TypeError(f"{what} must map table names, not be a {type(value).__name__}"))


class TableSet:
    """Several tables, gathered with one plan, one pool of threads and one round of reads.

    Args:
        source: A checkpoint path, of which every n-gram and per-layer table is opened; or
            `FileGather` objects, as a sequence or as a mapping with names of your choice.
        io: As for `FileGather`; only with a path.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[FileGather] | Mapping[str, FileGather],
        *,
        io: Io = "auto",
    ) -> None:
        if isinstance(source, str | bytes | os.PathLike):
            path = path_text(source)
            self._gathers = {info.name: FileGather(path, info.name, io=io) for info in tables(path)}
            if not self._gathers:
                raise placed(ValueError(f"{path} holds no n-gram or per-layer table"), path=path)
        elif isinstance(source, Mapping):
            self._gathers = dict(source)
            _require_gathers(self._gathers.values())
        else:
            gathers = _require_gathers(source)
            self._gathers = {gather.info.name: gather for gather in gathers}
            if len(self._gathers) < len(gathers):
                names = [gather.info.name for gather in gathers]
                raise placed(
                    ValueError(f"tables of one name in {names}: pass a mapping with other names")
                )

    def gather(
        self,
        ids: Mapping[str, Any],
        out: Mapping[str, Any] | None = None,
        *,
        pad_id: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Reads rows of several tables at once.

        Args:
            ids: Row ids per table name, as for `FileGather.gather`.
            out: Where rows go, for some or all of the tables.
            pad_id: As for `FileGather.gather`.
            timeout: Seconds after which to give up.

        Returns:
            Rows per table name, in the order of `ids`.

        Raises:
            ValueError: A name that is no table of this set; the names are listed.
            Exception: As `FileGather.gather` does.
        """
        given: Mapping[str, Any] = {} if out is None else out
        _require_mapping("ids", ids)
        _require_mapping("out", given)
        self._require_known(*ids, *given)
        requests: list[Request] = []
        rows: dict[str, Any] = {}
        name = None
        try:
            for name, wanted in ids.items():
                request, rows[name] = self._gathers[name]._request(  # pyright: ignore[reportPrivateUsage]
                    wanted, given.get(name), pad_id
                )
                requests.append(request)
            name = None
            _engram.gather_many(requests, timeout)
        except OverflowError:
            raise out_of_range(None, pad_id, timeout) from None
        except Exception as error:
            complete(error, table=name)
            failed(error)
            raise
        return rows

    def submit(
        self,
        ids: Mapping[str, Any],
        out: Mapping[str, Any] | None = None,
        *,
        pad_id: int | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        """Starts one gather over several tables and returns at once.

        Args:
            ids: Row ids per table name, as for `FileGather.submit`.
            out: Where rows go, for all of the tables or none.
            pad_id: As for `FileGather.gather`.
            deadline: As for `FileGather.submit`.

        Returns:
            The ticket, whose `wait` returns rows per table name, in the order of `ids`.

        Raises:
            ValueError: A name that is no table of this set; the names are listed.
            Exception: As `FileGather.submit` does.
        """
        given: Mapping[str, Any] = {} if out is None else out
        _require_mapping("ids", ids)
        _require_mapping("out", given)
        self._require_known(*ids, *given)
        wanted = [
            (name, self._gathers[name], table, given.get(name)) for name, table in ids.items()
        ]
        return submit(wanted, pad_id=pad_id, deadline=deadline, named=True)

    def _require_known(self, *names: str) -> None:
        for name in names:
            if name not in self._gathers:
                raise placed(
                    ValueError(f"no table {name!r} in this set; it has {list(self._gathers)}")
                )

    @property
    def gathers(self) -> dict[str, FileGather]:
        """The tables of the set, by name, in layer order."""
        return dict(self._gathers)

    def close(self) -> None:
        """Closes every table of the set."""
        for gather in self._gathers.values():
            gather.close()

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied.

        Raises:
            TypeError: Always.
        """
        raise placed(TypeError("a TableSet holds open files: open it again where it is needed"))

    def __enter__(self) -> TableSet:
        """Returns the set itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        return f"<engram.TableSet of {len(self._gathers)} tables: {list(self._gathers)}>"
