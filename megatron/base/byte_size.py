"""Sizes of files and folders as text for people."""


def format_bytes(size: float) -> str:
    """Return a size with at most two decimals, in units of 1000 as disks and quotas are sold."""
    unit = "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        # 999.5 would be rounded to 1000, which has four digits.
        if size < 999.5:
            break
        size = size / 1000
        unit = larger
    if unit == "bytes" or size >= 99.95:
        decimals = 0
    else:
        decimals = 1 if size >= 9.995 else 2
    return f"{size:,.{decimals}f} {unit}"
