"""Numbers of bytes as people read them."""


def describe_bytes(num_bytes: int) -> str:
    """Three digits and a unit: ``"1.5 GiB"``."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:.0f} GiB"
