"""Where n-gram embedding tables live, and which combinations of settings make sense.

[`EngramConfig`][engram.config.EngramConfig] carries the settings under the names that vLLM's
`--engram-config` uses, so one JSON object serves both. It reads no environment variable: what a
server runs with is what it was given, or the defaults documented here. A server checks a
configuration in this order, before it allocates anything:

```python
config = EngramConfig.of(user_input)  # an EngramConfig, a mapping or a JSON string
config.verify_model_config(model_config)
config.resolve_dp_shared_memory(parallel_config)
config.verify_parallel_config(parallel_config)
```

A setting that cannot be honoured is an error or a warning, never silently off.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ArgsKwargs

from engram._errors import complete, completes
from engram._topology import ParallelSizes
from engram.model_config import Platform, detect_platform, ngram_layers, require_ngram_layers

if TYPE_CHECKING:
    from typing import Self

__all__ = ["EngramConfig", "Placement", "Platform", "detect_platform", "model_has_engram_layers"]

Placement = Literal["device", "pinned", "shared", "file"]
"""The four places a table can live."""

_logger = logging.getLogger(__name__)

_PLATFORMS: tuple[Platform, ...] = ("cuda", "rocm", "cpu")

# The file backend was first released under this name.
_DISK_OFFLOAD_ALIAS = "host_file_gather"

# Names that released or proposed servers used for settings which now have another name.
_FORMER_KEYS = {
    "disk_offload_dir": "disk_offload (rows are read from the checkpoint; no directory is needed)",
    "enable_engram_dp_sharding": "embedding_across_dp",
    "enable_engram_shared_memory": "dp_shared_memory",
    "thp_packing": "use_thp",
}


@pydantic_dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True), kw_only=True)
class EngramConfig:
    """Storage and sharding of n-gram embedding tables.

    `host_file_gather`, the file backend's first name, is accepted as a keyword, a mapping key and
    a JSON key, and reads back as `disk_offload`.

    Raises:
        ValueError: An unknown setting, a value that is not a boolean, two settings that contradict
            each other, or both names of the file backend with different values. The message names
            every setting involved. (pydantic's `ValidationError` is a `ValueError`.)
    """

    cpu_offload: bool = True
    """Keep tables in pinned host memory, read by the device in place; off: in device memory."""

    disk_offload: bool = False
    """Serve rows from the checkpoint's files. Takes precedence over `cpu_offload`; `use_thp`,
    `dp_shared_memory` and `embedding_across_dp` are ignored beside it, with one warning each."""

    embedding_across_dp: bool = False
    """Shard a table over all tensor-parallel and data-parallel ranks together, at the price of an
    exchange per step; off: every data-parallel rank has its own tensor-parallel shards."""

    dp_shared_memory: bool | None = None
    """One copy per node of each tensor-parallel shard, shared by the data-parallel ranks. None
    lets `resolve_dp_shared_memory` decide, and permits a fall-back to per-rank tables; True that
    cannot be met is an error."""

    use_thp: bool = False
    """Back private pinned tables with transparent huge pages, best effort."""

    if TYPE_CHECKING:
        # The runtime __init__ is pydantic's; this one tells type checkers about the alias.
        def __init__(
            self,
            *,
            cpu_offload: bool = True,
            disk_offload: bool = False,
            embedding_across_dp: bool = False,
            dp_shared_memory: bool | None = None,
            use_thp: bool = False,
            host_file_gather: bool = False,
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _settle_names(cls, data: Any) -> Any:
        """Maps the alias to its field and refuses unknown names with a suggestion."""
        if isinstance(data, ArgsKwargs):
            return ArgsKwargs(data.args, _settled(data.kwargs or {}))
        if isinstance(data, Mapping):
            return _settled(cast("Mapping[str, Any]", data))
        return data

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        self._refuse_contradictions()
        if self.disk_offload:
            for name in ("use_thp", "dp_shared_memory", "embedding_across_dp"):
                if getattr(self, name):
                    _warn_user(
                        f"{name}=True is ignored beside disk_offload=True: rows come from the "
                        "checkpoint's files, whose page cache all ranks of a node share"
                    )
        return self

    @classmethod
    @completes
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Builds a configuration from a mapping of setting names to booleans.

        Raises:
            TypeError: `settings` is not a mapping.
            ValueError: As the constructor.
        """
        if not isinstance(settings, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"settings must be a mapping of names to booleans, not {type(settings).__name__}"
            )
        strange = [key for key in settings if not isinstance(key, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
        if strange:
            raise ValueError(f"setting names must be strings, not {strange[0]!r}")
        return cls(**settings)

    @classmethod
    @completes
    def from_json(cls, text: str | bytes) -> Self:
        """Builds a configuration from a JSON object, e.g. `'{"disk_offload": true}'`.

        Raises:
            ValueError: The text is not a JSON object, repeats a key, or as the constructor.
        """
        try:
            settings = json.loads(text, object_pairs_hook=_object_without_repeats)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"an engram configuration must be a JSON object such as "
                f'{{"disk_offload": true}}, got {text!r} ({error})'
            ) from None
        if not isinstance(settings, dict):
            raise ValueError(
                f"an engram configuration must be a JSON object such as "
                f'{{"disk_offload": true}}, got {text!r}'
            )
        return cls.from_dict(cast("dict[str, Any]", settings))

    @classmethod
    @completes
    def of(cls, config: EngramConfig | Mapping[str, Any] | str) -> EngramConfig:
        """The configuration in any form that engram's functions accept.

        Args:
            config: An `EngramConfig` (returned itself, not copied), a mapping or a JSON string.

        Raises:
            TypeError: Anything else.
            ValueError: As the constructor and `from_json`.
        """
        if isinstance(config, EngramConfig):
            return config
        if isinstance(config, str):
            return cls.from_json(config)
        if isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            return cls.from_dict(config)
        raise TypeError(
            f"an engram configuration is an EngramConfig, a mapping or a JSON string, "
            f"not {type(config).__name__}"
        )

    @property
    def host_file_gather(self) -> bool:
        """The file backend's first name: the same as `disk_offload`."""
        return self.disk_offload

    @host_file_gather.setter
    def host_file_gather(self, value: bool) -> None:
        self.disk_offload = value

    @property
    def placement(self) -> Placement:
        """Where the settings put a table, `disk_offload` first, then `cpu_offload`."""
        if self.disk_offload:
            return "file"
        if not self.cpu_offload:
            return "device"
        return "shared" if self.dp_shared_memory else "pinned"

    @property
    def dp_shared_memory_required(self) -> bool:
        """Whether the user wrote `dp_shared_memory=True`.

        Sharing that cannot be met is then an error; where `resolve_dp_shared_memory` chose it, the
        storage falls back to per-rank tables with a warning. No part of the fields or the hash;
        survives pickling, copying, `dataclasses.replace` and a round trip through `to_dict` or
        `to_json`.
        """
        return self.__dict__.get(_Sharing.NAME) is True

    @completes
    def verify_model_config(self, model_config: object, platform: Platform | None = None) -> None:
        """Refuses models without n-gram embedding tables and platforms without a backend.

        Args:
            model_config: vLLM's `ModelConfig`, a transformers configuration, the content of a
                `config.json` as a mapping, nested under `text_config` or flat, or a checkpoint's
                path.
            platform: `"cuda"`, `"rocm"` or `"cpu"`; None detects it, without importing torch.

        Raises:
            ValueError: `model_config` is None, its architecture is not one with n-gram tables, its
                text configuration lacks the n-gram field (which the message names), the platform is
                unknown, or `disk_offload` is set on ROCm.
        """
        self._refuse_contradictions()
        require_ngram_layers(model_config)
        if platform is None:
            platform = detect_platform()
        if platform not in _PLATFORMS:
            raise ValueError(
                f"platform {platform!r} is not supported; supported are {', '.join(_PLATFORMS)}"
            )
        if self.disk_offload and platform == "rocm":
            raise ValueError(
                "disk_offload=True is not supported on platform 'rocm'; use cpu_offload=True with "
                "disk_offload=False"
            )

    @completes
    def resolve_dp_shared_memory(self, parallel_config: object = None) -> None:
        """Replaces `dp_shared_memory=None`, in place, by what the other settings allow.

        None becomes True exactly when `cpu_offload` is on, `use_thp` is off,
        `data_parallel_size > 1` and elastic expert parallelism is off; otherwise False. A value
        that the user wrote stays. The resolved configuration is logged once.

        Args:
            parallel_config: vLLM's `ParallelConfig`, or any object or mapping with
                `tensor_parallel_size`, `data_parallel_size` and `enable_elastic_ep`; None stands
                for a single process.

        Raises:
            TypeError: `parallel_config` has none of these attributes.
            ValueError: A size is not a positive integer.
        """
        parallel = ParallelSizes.of(parallel_config)
        if self.dp_shared_memory is None:
            self.__dict__[_Sharing.RESOLVED] = (
                self.cpu_offload
                and not self.use_thp
                and parallel.data_parallel_size > 1
                and not parallel.enable_elastic_ep
            )
        if not self.__dict__.get("_logged", False):
            self.__dict__["_logged"] = True
            _logger.info("engram configuration: %s", json.dumps(self._values()))

    @completes
    def verify_parallel_config(self, parallel_config: object = None) -> None:
        """Refuses topologies in which the settings cannot work.

        `dp_shared_memory` beside `disk_offload` is ignored, so it is not checked there.

        Args:
            parallel_config: As for `resolve_dp_shared_memory`.

        Raises:
            TypeError: As `resolve_dp_shared_memory`.
            ValueError: `dp_shared_memory` with `data_parallel_size <= 1`; `dp_shared_memory`,
                `disk_offload`, or `embedding_across_dp` with `data_parallel_size > 1`, where
                expert parallelism is elastic. The message names both settings.
        """
        self._refuse_contradictions()
        parallel = ParallelSizes.of(parallel_config)
        elastic = "enable_elastic_ep=True: ranks come and go, which {} cannot follow"
        if self.disk_offload and parallel.enable_elastic_ep:
            raise ValueError(f"disk_offload=True contradicts {elastic.format('a bound file')}")
        if self.dp_shared_memory and not self.disk_offload:
            if parallel.data_parallel_size <= 1:
                raise ValueError(
                    f"dp_shared_memory=True contradicts data_parallel_size="
                    f"{parallel.data_parallel_size}: with one replica there is nothing to share; "
                    "drop dp_shared_memory"
                )
            if parallel.enable_elastic_ep:
                raise ValueError(
                    f"dp_shared_memory=True contradicts {elastic.format('a shared table')}"
                )
        if (
            self.embedding_across_dp
            and parallel.data_parallel_size > 1
            and parallel.enable_elastic_ep
        ):
            raise ValueError(
                f"embedding_across_dp=True contradicts {elastic.format('a sharded table')}"
            )

    @completes
    def get_parallel_size(self, parallel_config: object = None) -> int:
        """Ranks that share one table: TP, times DP where `embedding_across_dp` spans it.

        Args:
            parallel_config: As for `resolve_dp_shared_memory`.

        Raises:
            TypeError: As `resolve_dp_shared_memory`.
            ValueError: As `resolve_dp_shared_memory`.
        """
        parallel = ParallelSizes.of(parallel_config)
        if self.embedding_across_dp and parallel.data_parallel_size > 1:
            return parallel.tensor_parallel_size * parallel.data_parallel_size
        return parallel.tensor_parallel_size

    def to_dict(self) -> dict[str, bool | None]:
        """Every setting by name, as it may be handed to another process.

        `dp_shared_memory` is None as long as nobody wrote it, also once it is resolved: whoever
        reads True takes it for a demand.
        """
        return {**self._values(), _Sharing.NAME: self.__dict__.get(_Sharing.NAME)}

    def to_json(self) -> str:
        """`to_dict` as a JSON object, which `from_json` and vLLM's `--engram-config` read."""
        return json.dumps(self.to_dict())

    def _values(self) -> dict[str, bool | None]:
        """Every setting's current value by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def compute_hash(self) -> str:
        """SHA-256 of every setting's current value, as 64 hexadecimal digits.

        The same in every process and on every machine; any change of a setting changes it.
        """
        canonical = json.dumps({"EngramConfig": self._values()}, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _refuse_contradictions(self) -> None:
        """Refuses settings that cannot hold together.

        Fields can be assigned to, so every `verify_*` asks again.
        """
        if self.disk_offload:
            return
        if self.dp_shared_memory and not self.cpu_offload:
            raise ValueError(
                "dp_shared_memory=True contradicts cpu_offload=False: only tables in host memory "
                "can be shared; set cpu_offload=True or drop dp_shared_memory"
            )
        if self.use_thp and not self.cpu_offload:
            raise ValueError(
                "use_thp=True contradicts cpu_offload=False: huge pages back tables in host "
                "memory; set cpu_offload=True or drop use_thp"
            )
        if self.use_thp and self.dp_shared_memory:
            raise ValueError(
                "use_thp=True contradicts dp_shared_memory=True: huge pages back private tables "
                "only; drop one of them"
            )


class _Sharing:
    """`dp_shared_memory` as an attribute: what was written or, for None, what it was resolved to.

    `dataclasses.replace` reads attributes and hands them to a new configuration, which would take
    what was resolved for what was written; so it is given the latter.
    """

    NAME = "dp_shared_memory"
    RESOLVED = "_resolved_dp_shared_memory"

    _COPIERS = frozenset(
        copier.__code__
        for copier in (getattr(dataclasses, name, None) for name in ("replace", "_replace"))
        if copier is not None
    )

    def __get__(self, config: EngramConfig | None, owner: type | None = None) -> bool | None:
        if config is None:
            return None
        written = config.__dict__.get(self.NAME)
        caller = sys._getframe(1).f_code  # pyright: ignore[reportPrivateUsage]
        if written is not None or caller in self._COPIERS:
            return written
        return config.__dict__.get(self.RESOLVED)

    def __set__(self, config: EngramConfig, value: bool | None) -> None:  # noqa: FBT001
        config.__dict__[self.NAME] = value
        config.__dict__.pop(self.RESOLVED, None)


type.__setattr__(EngramConfig, _Sharing.NAME, _Sharing())
_construct: Any = EngramConfig.__init__


@functools.wraps(_construct)
def _constructed(self: EngramConfig, *args: Any, **settings: Any) -> None:
    try:
        _construct(self, *args, **settings)
    except Exception as error:
        complete(error)
        raise


# What pydantic raises is an exception of engram's like any other.
type.__setattr__(EngramConfig, "__init__", _constructed)


def model_has_engram_layers(model_config: object) -> bool:
    """Whether a model has n-gram embedding tables that engram serves.

    Args:
        model_config: As for `EngramConfig.verify_model_config`; None is no model.

    Raises:
        FileNotFoundError: A path without a `config.json`.
    """
    return ngram_layers(model_config) is not None


def _settled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` under field names only."""
    settled = dict(settings)
    if _DISK_OFFLOAD_ALIAS in settled:
        value = settled.pop(_DISK_OFFLOAD_ALIAS)
        if settled.setdefault("disk_offload", value) != value:
            raise ValueError(
                f"{_DISK_OFFLOAD_ALIAS}={value!r} contradicts disk_offload="
                f"{settled['disk_offload']!r}: they are two names of one setting; give one"
            )
    valid = [field.name for field in dataclasses.fields(EngramConfig)]
    unknown = [key for key in settled if key not in valid]
    if unknown:
        raise ValueError(
            f"unknown setting {', '.join(map(_with_suggestion, unknown))}; "
            f"valid settings are {', '.join(valid)} and {_DISK_OFFLOAD_ALIAS} "
            "(another name of disk_offload)"
        )
    for name, value in settled.items():
        if not isinstance(value, bool) and (value is not None or name != _Sharing.NAME):
            raise ValueError(f"{name} is {value!r}, which is no boolean: give True or False")
    return settled


def _with_suggestion(key: str) -> str:
    names = [field.name for field in dataclasses.fields(EngramConfig)] + [_DISK_OFFLOAD_ALIAS]
    near = difflib.get_close_matches(key, names, n=1)
    if key in _FORMER_KEYS:
        return f"{key!r} (now {_FORMER_KEYS[key]})"
    return f"{key!r} (did you mean {near[0]!r}?)" if near else repr(key)


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"setting {repeated!r} is given twice")
    return built


def _warn_user(message: str) -> None:
    """Warns at the caller's line: the first frame outside engram and pydantic."""
    level = 1
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in {"engram", "pydantic"}:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level)
