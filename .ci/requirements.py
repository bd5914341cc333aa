"""Prints what an extra of pyproject.toml needs, or with `build` the build system, line by line.

    pip install $(python .ci/requirements.py dev)

`pip install .[dev]` would build the package first, and build it again after every change.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(document: dict[str, Any], extra: str) -> Iterator[str]:
    """The requirements of `extra`, those of the extras it names included."""
    project = document["project"]
    if extra == "build":
        yield from document["build-system"]["requires"]
        return
    for requirement in project["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{project['name']}\[(.+)\]", requirement)
        if own is None:
            yield requirement
        else:
            for name in own[1].split(","):
                yield from requirements(document, name)


def main() -> None:
    document = tomllib.loads(PYPROJECT.read_text())
    print("\n".join(sorted(set(requirements(document, sys.argv[1])))))


if __name__ == "__main__":
    main()
