"""Looks for every public name in the documentation that was built.

python .ci/check_reference.py site
"""

import re
import sys
from pathlib import Path

PUBLIC = Path(__file__).parents[1] / "tests" / "data" / "public_api.txt"
NOT_CALLED = {"from_native", "begin_step", "run", "extra_repr", "forward"}
"""Public for the package's own modules, or called by torch."""


def main() -> None:
    pages = Path(sys.argv[1], "reference").rglob("*.html")
    html = "".join(page.read_text(encoding="utf-8") for page in pages)
    anchors = set(re.findall(r'id="engram\.([\w.]+)"', html))
    # Attributes are items of a list, without an anchor.
    code = set(re.findall(r"<b><code>(?:<span[^>]*>)?(\w+)", html))
    bases: dict[str, str] = {}
    missing = []
    for line in PUBLIC.read_text(encoding="utf-8").splitlines():
        name = re.match(r"[\w.]+", line)
        if name is None or "[" in line or name[0] == "__version__":
            continue
        parent, _, last = name[0].rpartition(".")
        base = re.search(r"\) is (\w+)$", line)
        if base is not None:
            bases[name[0]] = f"{parent}.{base[1]}".lstrip(".")
        # Methods are described where they are defined.
        if f"{bases.get(parent)}.{last}" in anchors:
            continue
        attribute = "." in name[0] and "(" not in line
        if name[0] not in anchors and last not in NOT_CALLED and not (attribute and last in code):
            missing.append(name[0])
    if missing:
        sys.exit(f"not in the reference: {', '.join(missing)}")
    print(f"every public name is in the reference, {len(anchors)} anchors")


if __name__ == "__main__":
    main()
