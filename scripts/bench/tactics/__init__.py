"""Find, record, verify and capture kernel tactics of FlashInfer's AutoTuner."""


def main(argv: list[str]) -> int:
    """Runs one `tactics` verb and returns the process's exit code."""
    from .cli import main as run

    return run(argv)
