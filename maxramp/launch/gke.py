"""Jobs on Kubernetes."""

from maxramp.launch.jobs import Run


def apply(run: Run, dry_run: bool) -> int:
    """Placeholder."""
    raise NotImplementedError
