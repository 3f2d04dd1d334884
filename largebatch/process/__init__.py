"""What concerns this process and its host alone. Standard library only."""
