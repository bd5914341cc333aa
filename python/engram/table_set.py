"""Several tables, gathered in one round of reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from engram import _engram
from engram._arguments import out_of_range, path_text, table_argument
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
        ids: Mapping[str | int, Any] | Mapping[str, Any] | Mapping[int, Any],
        out: Mapping[str | int, Any] | Mapping[str, Any] | Mapping[int, Any] | None = None,
        *,
        pad_id: int | None = None,
        timeout: float | None = None,
    ) -> dict[Any, Any]:
        """Reads rows of several tables at once.

        Args:
            ids: Row ids per table, by its name or its place in layer order, as for
                `FileGather.gather`.
            out: Where rows go, for some or all of the tables.
            pad_id: As for `FileGather.gather`.
            timeout: Seconds after which to give up.

        Returns:
            Rows by the keys of `ids`, in their order.

        Raises:
            ValueError: A name or a place of no table of this set, whose names are listed; or a
                table twice.
            Exception: As `FileGather.gather` does.
        """
        wanted = self._by_name("ids", ids)
        given = {} if out is None else self._by_name("out", out)
        requests: list[Request] = []
        rows: dict[Any, Any] = {}
        name = None
        try:
            for name, (key, table) in wanted.items():
                _, into = given.get(name, (None, None))
                request, rows[key] = self._gathers[name]._request(table, into, pad_id)  # pyright: ignore[reportPrivateUsage]
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
        ids: Mapping[str | int, Any] | Mapping[str, Any] | Mapping[int, Any],
        out: Mapping[str | int, Any] | Mapping[str, Any] | Mapping[int, Any] | None = None,
        *,
        pad_id: int | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        """Starts one gather over several tables and returns at once.

        Args:
            ids: Row ids per table, by its name or its place in layer order, as for
                `FileGather.submit`.
            out: Where rows go, for all of the tables or none.
            pad_id: As for `FileGather.gather`.
            deadline: As for `FileGather.submit`.

        Returns:
            The ticket, whose `wait` returns rows by the keys of `ids`, in their order.

        Raises:
            ValueError: As for `gather`.
            Exception: As `FileGather.submit` does.
        """
        given = {} if out is None else self._by_name("out", out)
        wanted = [
            (key, self._gathers[name], table, given.get(name, (None, None))[1])
            for name, (key, table) in self._by_name("ids", ids).items()
        ]
        return submit(wanted, pad_id=pad_id, deadline=deadline, named=True)

    def _by_name(self, what: str, value: Any) -> dict[str, tuple[Any, Any]]:
        """A mapping's keys and values, by the names of the tables that the keys stand for."""
        if not isinstance(value, Mapping):
            raise placed(TypeError(f"{what} must map tables, not be a {type(value).__name__}"))
        found: dict[str, tuple[Any, Any]] = {}
        for key, each in cast("Mapping[Any, Any]", value).items():
            name = self._name(key)
            if name in found:
                raise placed(ValueError(f"{what} has table {name!r} twice, as {key!r} too"))
            found[name] = (key, each)
        return found

    def _name(self, table: Any) -> str:
        """The name of a table that is given by it, or by its place in layer order."""
        if table is not None:
            table = table_argument(table)
        names = list(self._gathers)
        if isinstance(table, int) and table < len(names):
            return names[table]
        if table not in self._gathers:
            raise placed(ValueError(f"no table {table!r} in this set; it has {names}"))
        return table

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
