"""The environments in tests/launchers, recorded under real launchers."""

from pathlib import Path

FOLDER = Path(__file__).parent / "launchers"


def recorded(name: str) -> list[dict[str, str]]:
    """Return the variables of each rank, in rank order."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    return [dict(word.split("=", 1) for word in line.split()) for line in lines if not line.startswith("#")]
