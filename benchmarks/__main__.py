"""`python -m benchmarks`. Nothing else: measuring processes import this module again."""

if __name__ == "__main__":
    from benchmarks.cli import run

    run()
