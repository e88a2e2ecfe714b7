"""Compare the size of the project with limits that only fall.

Run `python .ci/limits.py` from the repository's root. It prints each size beside its limit, and
exits with 1 if one is above its limit. The limits are in `.ci/limits.toml`.

`python .ci/limits.py --lower` writes today's sizes plus 1 %, where this is lower than the limit.
Then it removes the grants, because they are part of the new limits.

To raise a limit, add a grant to `.ci/limits.toml`. A grant has the name of a size, the number that
is added, and a reason: the issue that grants it, or what was taken out elsewhere.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from measure_core import measure_packages, sum_core
from measure_start import measure_phases

LIMITS = Path(".ci/limits.toml")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
HEADER = """\
# Limits of sizes. `python .ci/limits.py` compares, `--lower` lowers them to what is true today.
# They only fall. Who needs more adds a [[grants]] entry with a name, a number and a reason.
"""


def measure_sizes() -> Iterator[tuple[str, int]]:
    """Yield the name and the value of each size."""
    packages, _ = measure_packages()
    yield "code lines of the package", sum(packages.values())
    yield "code lines of the core", sum_core(packages)
    for group in sorted(path.name for path in Path("megatron/extras").iterdir() if path.is_dir()):
        # The key of a module directly in the group has the same beginning.
        own = [n for name, n in packages.items() if f"{name}/".startswith(f"extras/{group}/")]
        if own:
            yield f"code lines of extras/{group}", sum(own)
    yield "modules of the package", len(list(Path("megatron").rglob("*.py")))
    files, _, lines = measure_phases()["start"]
    yield "files of a start", files
    yield "code lines of a start", lines
    yield "words of pages", sum(len(_read_by_hand(page).split()) for page in _list_pages())


def _list_pages() -> Iterator[Path]:
    for pattern in PAGES:
        yield from Path().glob(pattern)


def _read_by_hand(page: Path) -> str:
    """Return the text of a page without the tables that a test writes."""
    return re.sub(
        r"<!-- known errors.*?<!-- end of known errors -->", "", page.read_text(), flags=re.S
    )


def read_limits(text: str) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the limits without their grants, and the grants.

    Raises:
        SystemExit: A grant names no limit, or lacks its number or its reason.
    """
    found = tomllib.loads(text)
    limits = found["limits"]
    grants = found.get("grants", [])
    for grant in grants:
        if grant.get("limit") not in limits:
            raise SystemExit(f"{LIMITS}: a grant for {grant.get('limit')!r}, which has no limit")
        if not isinstance(grant.get("more"), int) or not grant.get("reason", "").strip():
            raise SystemExit(f"{LIMITS}: a grant needs `more`, a number, and a `reason`: {grant}")
    return limits, grants


def format_limits(limits: Mapping[str, int]) -> str:
    """Return the text of `.ci/limits.toml` without grants."""
    rows = [f'"{name}" = {limit:_}' for name, limit in limits.items()]
    return "\n".join([HEADER, "[limits]", *rows, ""])


def main() -> int:
    """Print the table. Return the exit code."""
    parser = argparse.ArgumentParser(description="Compare the project's size with its limits.")
    parser.add_argument("--lower", action="store_true", help="lower the limits to today's sizes")
    lower = parser.parse_args().lower
    limits, grants = read_limits(LIMITS.read_text())
    total = dict(limits)
    for grant in grants:
        total[grant["limit"]] += grant["more"]
    sizes = dict(measure_sizes())
    missed = False
    for name, size in sizes.items():
        # A size without a limit is new, and gets one by `--lower`.
        limit = total.get(name)
        above = limit is None or size > limit
        missed |= above
        shown = "no limit" if limit is None else f"at most {limit:,}"
        print(f"{name:40}{size:9,}   {shown:18}{'MISSED' if above else 'ok'}")
    if lower:
        one_more = {name: size + size // 100 for name, size in sizes.items()}
        lowered = {name: min(n, total.get(name, n)) for name, n in one_more.items()}
        LIMITS.write_text(format_limits(lowered))
        return 0
    if missed:
        print(f"Remove something, or add a grant with its reason to {LIMITS}.")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
