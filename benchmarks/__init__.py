"""What the library costs beside what one would otherwise write: `python -m benchmarks`."""
