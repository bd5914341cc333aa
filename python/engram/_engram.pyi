"""Native half of engram."""

from collections.abc import Callable, Sequence
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

_Integers = NDArray[np.int64] | NDArray[np.int32]

__version__: str

class CheckpointError(ValueError):
    path: str | None
    table: str | None
    row: int | None
    position: int | None
    offset: int | None

@disjoint_base
class HostBuffer:
    def __new__(cls, nbytes: int, huge_pages: bool = False, *, fd: int | None = None) -> Self: ...
    @property
    def capacity(self) -> int: ...
    def prefault(self, offset: int, nbytes: int) -> None:
        """Makes the kernel give memory for a part of the buffer now; the contents stay.

        Raises:
            OSError: There is not enough memory.
        """

    def collapse(self, offset: int, nbytes: int) -> None:
        """Makes huge pages of a part of the buffer, as far as the kernel finds room; Linux 6.1.

        Raises:
            OSError: It finds none, or knows no such request.
        """

    def place(self, nodes: Sequence[int], interleave: bool) -> None:
        """Says which memory nodes pages touched from now on come from, in turn or by preference.

        Raises:
            OSError: There is no such node, or the kernel knows none.
        """

    def load_word(self, offset: int) -> int:
        """The four bytes at `offset`, a multiple of four, as one number, as it is now."""

    def store_word(self, offset: int, value: int) -> None:
        """Sets the four bytes at `offset`; who sees them sees all that was written before."""

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def huge_pages(self) -> bool:
        """Whether the kernel took the advice to use huge pages."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class Reader:
    def __new__(
        cls,
        path: str,
        table: str | int | None,
        io: str,
        threads: int | None,
        advice: str,
        max_mapped_bytes: int | None,
        cache_bytes: int,
    ) -> Reader: ...
    def resize(self, cache_bytes: int) -> None: ...
    def save_hot(self, path: str) -> int: ...
    def load_hot(self, path: str, progress: Callable[[int, int], Any] | None) -> int: ...
    def table(self) -> dict[str, Any]: ...
    def gather(
        self, ids: Any, out: Any, pad_id: object = None, timeout: float | None = None
    ) -> bool: ...
    def prefetch(self, ids: Any) -> None: ...
    def prewarm(self, max_bytes: int | None, progress: Callable[[int, int], Any] | None) -> int: ...
    def residency(self) -> tuple[int, int | None, int, int]: ...
    def fallbacks(self) -> list[str]: ...
    def stats(self) -> dict[str, Any]: ...
    def verify(
        self, rows: int | None, seed: int, progress: Callable[[int, int], Any] | None
    ) -> dict[str, Any]: ...
    def reopen(self, path: str) -> dict[str, Any]: ...
    def close(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def runs(self) -> str: ...

@final
class Ticket:
    def wait(self, timeout: float | None = None) -> HostBuffer | None: ...
    def done(self) -> bool: ...
    def cancel(self) -> bool: ...

@final
class StepGather:
    def __new__(
        cls,
        tables: Sequence[tuple[NgramHash, Reader, Sequence[tuple[Any, int, int]], int | None]],
        max_tokens: int,
    ) -> StepGather: ...
    def run(
        self,
        tokens: _Integers,
        query_start_loc: _Integers | None = None,
        context: _Integers | None = None,
    ) -> int: ...

def after_fork() -> None: ...
def ring_refusal() -> int | None: ...
def random_reads(
    reader: Reader, depth: int, seconds: float, seed: int
) -> dict[str, int | float]: ...
def survey(path: str) -> dict[str, Any]: ...
def submit(
    requests: Sequence[tuple[Reader, Any, Sequence[tuple[Any, int, int]] | None, int | None]],
    deadline: float | None = None,
) -> Ticket: ...
def at_exit() -> None: ...
def drop_cache(paths: Sequence[str]) -> int: ...
def gather_many(
    requests: Sequence[tuple[Reader, Any, Sequence[tuple[Any, int, int]], int | None]],
    timeout: float | None = None,
) -> None: ...
def gather_tokens(
    hash: NgramHash,
    reader: Reader,
    tokens: _Integers,
    query_start_loc: _Integers | None,
    context: _Integers | None,
    planes: Sequence[tuple[Any, int, int]],
    pad_id: int | None,
) -> None: ...
def tables(path: str, plain: bool) -> list[dict[str, Any]]: ...
def configured_tables(config: str) -> list[dict[str, Any]]: ...

@final
class Hosted:
    def __new__(
        cls,
        buffer: HostBuffer,
        table: str,
        rows: int,
        first_row: int,
        held: int,
        planes: Sequence[tuple[int, int]],
        threads: int | None = None,
    ) -> Hosted: ...
    def gather(self, ids: Any, out: Any, pad_id: int | None = None) -> None: ...
    def gather_planes(
        self, ids: Any, targets: Sequence[tuple[Any, int, int]], pad_id: int | None = None
    ) -> None: ...

def load_rows(
    reader: Reader,
    first_row: int,
    rows: int,
    targets: Sequence[tuple[Any, int]],
    progress: Callable[[int, int], Any] | None,
) -> None: ...
def huge_page_bytes(address: int, nbytes: int) -> tuple[int, int]: ...
def memory_bytes() -> tuple[int, int]: ...
def table_of(name: str) -> str | None: ...
def bind_views(
    views: Sequence[tuple[str, str, Sequence[int], int]],
    num_rows: int | None,
    config: str | None,
    table: str | int | None,
    io: str,
    threads: int | None,
    advice: str,
    max_mapped_bytes: int | None,
) -> Reader: ...

@final
class NgramHash:
    @staticmethod
    def qwen(
        *,
        vocab_size: int,
        ngram_size: int,
        heads_per_ngram: int,
        vocab_size_base: int,
        divisor: int,
        seed: int,
        ple_index: int,
        eos: int,
        wrap: bool,
        dead_id: int | None,
    ) -> NgramHash: ...
    @staticmethod
    def deepseek(
        *,
        layer_ids: Sequence[int],
        layer: int,
        max_ngram: int,
        heads_per_order: int,
        vocab_sizes: Sequence[int],
        pad_token: int,
        seed: int,
        token_map: _Integers,
        image_token: int | None,
        demo: bool,
        wrap: bool,
        dead_id: int | None,
    ) -> NgramHash: ...
    @staticmethod
    def longcat(
        *,
        vocab_size: int,
        valid_tokens: int,
        base_size: int,
        ngram: int,
        splits: int,
        eos: int,
        ignored: Sequence[int],
        vllm: bool,
        wrap: bool,
        dead_id: int | None,
    ) -> NgramHash: ...
    @property
    def heads(self) -> int: ...
    @property
    def context_len(self) -> int: ...
    @property
    def filler(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def multipliers(self) -> list[list[int]]: ...
    @property
    def head_sizes(self) -> list[int]: ...
    @property
    def head_offsets(self) -> list[int]: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def padded_rows(self) -> int: ...
    def ids(
        self,
        tokens: _Integers,
        query_start_loc: _Integers | None,
        context: _Integers | None,
        out: NDArray[np.int64],
        threads: int | None = None,
    ) -> None: ...
