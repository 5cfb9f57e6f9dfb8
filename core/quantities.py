"""Numbers with their nouns, as text."""


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as `1 replica`, `2 batches` or `1,200 samples`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "tch")) else "s"
    return f"{number:,} {noun}{ending}"
