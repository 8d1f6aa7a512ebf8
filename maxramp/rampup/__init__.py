"""The batch-size schedule as data. Imports no JAX."""

from maxramp.rampup.schedule import RampupBatchManager, ResumePoint, Stage

__all__ = ["RampupBatchManager", "ResumePoint", "Stage"]
